"""Line charts as SVG text, for pages that must stand alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import zip_longest

_WIDTH, _HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 52, 44
# Okabe and Ito's colours, told apart by nearly everyone.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#777777")
_DOTTED = 70  # lines of so few points show them as dots
_LETTER = 6.2  # about the width of a letter


@dataclass(frozen=True, slots=True)
class Series:
    """`points`: ascending x; a y of None breaks the line. `step`: each value holds until the next."""

    name: str
    points: Sequence[tuple[float, float | None]]
    step: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """`log`: values at or below zero are left out. `low`, `high`: where the data does not decide."""

    label: str
    log: bool = False
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """A thin labelled line across the chart: at an x value, or at a y value when `level`."""

    at: float
    label: str
    level: bool = False


@dataclass(frozen=True, slots=True)
class _Scale:
    low: float
    high: float
    log: bool
    pixels: tuple[float, float]

    def __call__(self, value: float) -> float:
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        share = ((math.log10(value) if self.log else value) - low) / (high - low)
        return self.pixels[0] + share * (self.pixels[1] - self.pixels[0])

    def shows(self, value: float) -> bool:
        return self.low <= value <= self.high

    def ticks(self) -> list[float]:
        return _log_ticks(self.low, self.high) if self.log else _ticks(self.low, self.high)


def chart(title: str, x: Axis, y: Axis, series: Sequence[Series], marks: Sequence[Mark] = ()) -> str:
    """Scales to the width it is given; colours of text and lines follow the page's."""
    points = [(px, py) for s in series for px, py in s.points if py is not None]
    levels = [mark.at for mark in marks if mark.level]
    sx = _scale([px for px, _ in points], x, (_LEFT, _WIDTH - _RIGHT), loose=False)
    sy = _scale([py for _, py in points] + levels, y, (_HEIGHT - _BOTTOM, _TOP), loose=True)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}" font-size="11">',
        f'<text x="{_LEFT}" y="16" font-size="14" font-weight="600">{escape(title)}</text>',
        *_legend(series),
        *_grid(sx, sy, x, y),
        *_marks(marks, sx, sy),
    ]
    for i, s in enumerate(series):
        parts += _line(s, sx, sy, _COLOURS[i % len(_COLOURS)])
    if not points:
        parts.append(
            f'<text class="dim" x="{_WIDTH / 2}" y="{_HEIGHT / 2}" text-anchor="middle">nothing to show</text>'
        )
    return "\n".join([*parts, "</svg>"])


def _legend(series: Sequence[Series]) -> Iterator[str]:
    at = float(_LEFT)
    for i, s in enumerate(series):
        name = s.name if len(s.name) <= 40 else s.name[:39] + "…"
        yield f'<rect x="{at:.0f}" y="27" width="12" height="4" fill="{_COLOURS[i % len(_COLOURS)]}"/>'
        yield f'<text x="{at + 16:.0f}" y="34">{escape(name)}</text>'
        at += 36 + _LETTER * len(name)


def _grid(sx: _Scale, sy: _Scale, x: Axis, y: Axis) -> Iterator[str]:
    bottom = _HEIGHT - _BOTTOM
    for value in sy.ticks():
        at = sy(value)
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text class="dim" x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{_short(value)}</text>'
    for value in sx.ticks():
        at = sx(value)
        yield f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{bottom}" y2="{bottom + 4}"/>'
        yield f'<text class="dim" x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{_short(value)}</text>'
    yield f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>'
    yield (
        f'<text class="dim" x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 8}" text-anchor="middle">'
        f"{escape(x.label)}</text>"
    )
    middle = (_TOP + bottom) / 2
    yield (
        f'<text class="dim" x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">'
        f"{escape(y.label)}</text>"
    )


def _marks(marks: Sequence[Mark], sx: _Scale, sy: _Scale) -> Iterator[str]:
    """An upright mark whose label would run into the next mark goes without it."""
    upright = sorted((mark for mark in marks if not mark.level and sx.shows(mark.at)), key=lambda mark: mark.at)
    for mark, after in zip_longest(upright, upright[1:]):
        at = sx(mark.at)
        yield f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP - 6}" y2="{_HEIGHT - _BOTTOM}"/>'
        if after is None or sx(after.at) - at > _LETTER * len(mark.label) + 6:
            yield f'<text class="dim" x="{at + 3:.1f}" y="{_TOP}">{escape(mark.label)}</text>'
    for mark in marks:
        if not mark.level or not sy.shows(mark.at):
            continue
        at = sy(mark.at)
        yield f'<line class="mark" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text class="dim" x="{_WIDTH - _RIGHT}" y="{at - 4:.1f}" text-anchor="end">{escape(mark.label)}</text>'


def _line(s: Series, sx: _Scale, sy: _Scale, colour: str) -> Iterator[str]:
    path: list[str] = []
    dots: list[str] = []
    drawing = False
    for px, py in s.points:
        if py is None or not sx.shows(px) or not sy.shows(py):
            drawing = False
            continue
        ax, ay = sx(px), sy(py)
        if not drawing:
            path.append(f"M{ax:.1f} {ay:.1f}")
        else:
            path.append(f"H{ax:.1f}V{ay:.1f}" if s.step else f"L{ax:.1f} {ay:.1f}")
        dots.append(f'<circle cx="{ax:.1f}" cy="{ay:.1f}" r="2" fill="{colour}"/>')
        drawing = True
    if path:
        yield f'<path d="{"".join(path)}" fill="none" stroke="{colour}" stroke-width="1.6" stroke-linejoin="round"/>'
    if len(dots) <= _DOTTED and not s.step:
        yield from dots


def _scale(values: Sequence[float], axis: Axis, pixels: tuple[float, float], *, loose: bool) -> _Scale:
    """`loose`: room above the highest value, and a linear scale begins at zero."""
    if axis.log:
        values = [v for v in values if v > 0]
    low = axis.low if axis.low is not None else min(values, default=1.0)
    high = axis.high if axis.high is not None else max(values, default=1.0)
    if axis.log:
        low, high = (low * 0.9, high * 1.1) if high <= low * 1.2 else (low, high)
        return _Scale(low, high, True, pixels)
    if loose:
        low = min(0.0, low)
        high = high if axis.high is not None else high * 1.08
    return _Scale(low, high if high > low else low + 1.0, False, pixels)


def _ticks(low: float, high: float, wanted: int = 6) -> list[float]:
    raw = (high - low) / wanted
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * m for m in (1, 2, 5, 10) if size * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for multiples in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
        ticks = [m * 10.0**d for d in decades for m in multiples if low <= m * 10.0**d <= high]
        if len(ticks) >= 4:
            return ticks
    return _ticks(low, high)


def _short(value: float) -> str:
    if abs(value) >= 10000:
        return f"{value / 1000:g}k"
    return f"{value:.4g}"
