"""A bar on stderr; on anything but a terminal only what is finished, a line each."""

from __future__ import annotations

import sys
from typing import TextIO

_WIDTH = 30  # characters of the bar


class ProgressBar:
    """One line for what is under way, rewritten; one line for each thing that is finished, which stays."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stderr

    def show(self, what: str, share: float) -> None:
        """`share`: how much of it is done, from 0 to 1."""
        if self._out.isatty():
            full = round(_WIDTH * min(1.0, share))
            self._out.write(f"\r\033[K[{'#' * full}{'.' * (_WIDTH - full)}] {share:4.0%} {what}")
            self._out.flush()

    def done(self, what: str) -> None:
        """Takes the bar away and writes `what`."""
        self._out.write(f"\r\033[K{what}\n" if self._out.isatty() else f"{what}\n")
        self._out.flush()
