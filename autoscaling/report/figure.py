"""Matplotlib figures as text or bytes, without a display and without matplotlib's global state."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#777777")
"""Of lines, in this order: Okabe and Ito's palette, which nearly everyone can tell apart, and two more."""

_PNG_DPI = 80  # pixels per inch: a figure 9 inches wide fits beside text on most screens


def as_svg(figure: Figure) -> str:
    """The `<svg>` element alone, for use inside a page; the same text for the same figure."""
    from matplotlib import rc_context

    out = io.StringIO()
    # Without a salt, ids in the text are random; with fonttype none, text stays text and takes the reader's font.
    with rc_context({"svg.hashsalt": "sluicegate", "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def as_png(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=_PNG_DPI)
    return out.getvalue()
