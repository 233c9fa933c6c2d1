"""Times as people write them, and the days and months that usage is counted by. All in UTC."""

from __future__ import annotations

import re
from datetime import UTC, datetime

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_LONGEST_S = 36500 * 86400


def duration_s(text: str) -> float:
    """`90s`, `5m`, `1h`, `30d`, `2w`, or 0. Raises ValueError."""
    match = re.fullmatch(r"(\d{1,9})([smhdw])", text)
    if match is None and text != "0":
        raise ValueError(f"{text!r} is no duration: write a number and one of s, m, h, d, w, like 30d")
    seconds = 0.0 if match is None else float(int(match[1]) * _UNITS_S[match[2]])
    if seconds > _LONGEST_S:
        raise ValueError(f"{text!r} is too long: write at most 36500d")
    return seconds


def moment(text: str) -> float:
    """Seconds since 1970 of an ISO date or time, in UTC unless it says otherwise. Raises ValueError."""
    try:
        at = datetime.fromisoformat(text)
        seconds = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
        day_of(seconds)  # a time zone may take it out of the years there are
        return seconds
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is no date: write it like 2030-12-31 or 2030-12-31T18:00:00Z") from None


def day_of(at: float) -> str:
    """The day of a time (seconds since 1970), as YYYY-MM-DD."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d")


def month_of(at: float) -> str:
    """The month of a time (seconds since 1970), as YYYY-MM."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m")


def month_end(at: float) -> float:
    """When the month of `at` is over, seconds since 1970."""
    now = datetime.fromtimestamp(at, UTC)
    years, month = divmod(now.month, 12)
    return datetime(now.year + years, month + 1, 1, tzinfo=UTC).timestamp()
