"""Floors by the calendar, for what is known beforehand. Combine it with another policy by `composite`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from autoscaling.base import Proposal, Signals
from autoscaling.settings import PolicyError, Settings, setting


@dataclass(frozen=True, slots=True)
class Entry(Settings):
    """From each time that `cron` names on, for `duration_s`, at least `replicas`."""

    cron: str = ""
    duration_s: float = setting(3600.0, above=0)
    replicas: int = setting(1, 0)

    def __post_init__(self) -> None:
        from croniter import croniter

        Settings.__post_init__(self)
        if not croniter.is_valid(self.cron):
            raise PolicyError(f"cron: must be five cron fields, as '0 8 * * 1-5', got {self.cron!r}")


@dataclass(frozen=True, slots=True)
class ScheduleParams(Settings):
    """`entries`: mappings with cron, duration_s, replicas. `otherwise`: the floor when none applies. `lead_s`: how much
    earlier it is raised, so that replicas serve when the hour comes."""

    entries: Sequence[Any] = field(default_factory=tuple)
    otherwise: int = setting(0, 0)
    lead_s: float = setting(120.0, 0)
    timezone: str = "UTC"

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if isinstance(self.entries, str) or not isinstance(self.entries, Sequence):
            raise PolicyError(f"entries: must be a list of mappings, got {self.entries!r}")
        made = [e if isinstance(e, Entry) else Entry.from_dict(e, f"entries[{i}]") for i, e in enumerate(self.entries)]
        object.__setattr__(self, "entries", tuple(made))
        try:
            ZoneInfo(self.timezone)
        except (ZoneInfoNotFoundError, ValueError):
            raise PolicyError(f"timezone: must be an IANA name as Europe/Berlin, got {self.timezone!r}") from None


class Schedule:
    """The highest floor of the entries that apply. `now_s` is seconds since 1970; looked up once a minute at most."""

    Params: ClassVar[type[Settings]] = ScheduleParams
    raw: ClassVar[bool] = False

    def __init__(self, params: ScheduleParams) -> None:
        self._params = params
        self._zone = ZoneInfo(params.timezone)
        self._minute: int | None = None
        self._floor = params.otherwise

    @classmethod
    def build(cls, params: ScheduleParams) -> Self:
        """A policy without a past."""
        return cls(params)

    def decide(self, signals: Signals, now_s: float) -> Proposal:
        """The highest floor that applies now, or will within `lead_s`."""
        minute = int(now_s // 60)
        if minute != self._minute:
            self._minute = minute
            applying = [e.replicas for e in self._params.entries if self._applies(e, now_s)]
            self._floor = max(applying, default=self._params.otherwise)
        return Proposal(self._floor, "schedule", {"floor": float(self._floor)})

    def _applies(self, entry: Entry, now_s: float) -> bool:
        """Whether its last beginning, as seen `lead_s` from now, is not over yet."""
        from croniter import croniter

        seen = datetime.fromtimestamp(now_s + self._params.lead_s, UTC).astimezone(self._zone)
        # croniter's previous time is strictly before: a second on, so that the very beginning counts.
        began = croniter(entry.cron, seen + timedelta(seconds=1)).get_prev(datetime)
        return float(began.timestamp()) + entry.duration_s > now_s
