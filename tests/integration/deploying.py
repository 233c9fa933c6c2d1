"""For the programs beside it, which deploy: Python finds this next to the program it runs."""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT_S = 120.0


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"still no {what}")
        time.sleep(0.05)
