"""Seasons: traffic of one hour or day ago as a forecast of now, by Holt-Winters (statsmodels)."""

from __future__ import annotations

import math
import warnings
from collections import deque
from dataclasses import dataclass
from typing import ClassVar, Self

from autoscaling.base import Proposal, Signals
from autoscaling.demand import Demand
from autoscaling.settings import PolicyError, Settings, setting

_STARTUP_S = 30.0
_MAX_SEASON = 288  # points: a fit of more takes too long for a control loop


@dataclass(frozen=True, slots=True)
class PredictiveParams(Settings):
    """`season_s`: after how long traffic repeats. It is seen in points of `bucket_s`, of which a season may have up to
    288; two whole seasons must have passed before they count. `refit_s`: how often the seasons are learnt anew.
    `utilisation`: how full replicas are to be. `headroom`: added to the forecast, as a share of it."""

    season_s: float = setting(86400.0, above=0)
    bucket_s: float = setting(600.0, above=0)
    refit_s: float = setting(3600.0, above=0)
    utilisation: float = setting(0.7, 0.05, 1.0)
    headroom: float = setting(0.1, 0)

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        points = self.season_s / self.bucket_s
        if not 2 <= points <= _MAX_SEASON:
            raise PolicyError(
                f"bucket_s: must split season_s {self.season_s:g} into 2 to {_MAX_SEASON}, got {points:g}"
            )


class Predictive:
    """The present demand or the forecast of the next bucket and the start-up after it, whichever is more. A fit takes
    a second or so: do not refit often inside a controller that others share."""

    Params: ClassVar[type[Settings]] = PredictiveParams
    raw: ClassVar[bool] = False

    def __init__(self, params: PredictiveParams) -> None:
        self._params = params
        self._season = round(params.season_s / params.bucket_s)
        self._demand = Demand()
        self._points: deque[float] = deque(maxlen=4 * self._season)
        self._bucket: int | None = None
        self._sum = 0.0
        self._count = 0
        self._forecast: list[float] = []  # from the bucket `_forecast_at` on
        self._forecast_at = 0
        self._fitted_s = -math.inf

    @classmethod
    def build(cls, params: PredictiveParams) -> Self:
        """A policy without a past."""
        return cls(params)

    def decide(self, signals: Signals, now_s: float) -> Proposal:
        """The present demand or the forecast, whichever is more, at the utilisation aimed at."""
        s, p = signals, self._params
        if s.serving == 0:
            return Proposal(max(s.target, s.queued > 0), "no replica serves", {"queued": s.queued}, hold=not s.queued)
        demand = self._demand.update(s, now_s, 0.5 * s.serving)
        if demand is None:
            return Proposal(s.target, "unknown", hold=True)
        self._note(demand, now_s)
        ahead = now_s + (s.startup_s or _STARTUP_S)
        forecast = max(self._at(now_s), self._at(ahead), self._at(ahead + p.bucket_s)) * (1 + p.headroom)
        terms = {"demand": demand, "forecast": forecast}
        return Proposal(max(demand, forecast) / p.utilisation, "season" if forecast > demand else "work", terms)

    def _note(self, demand: float, now_s: float) -> None:
        bucket = int(now_s / self._params.bucket_s)
        if self._bucket is not None and bucket != self._bucket:
            mean = self._sum / self._count
            self._points.extend([mean] * min(bucket - self._bucket, self._season))  # a pause counts as more of the same
            self._sum, self._count = 0.0, 0
            if len(self._points) >= 2 * self._season and now_s - self._fitted_s >= self._params.refit_s:
                self._fit(bucket)
                self._fitted_s = now_s
        self._bucket = bucket
        self._sum += demand
        self._count += 1

    def _fit(self, bucket: int) -> None:
        from statsmodels.tsa.holtwinters import ExponentialSmoothing

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of every fit that is not perfect
            model = ExponentialSmoothing(list(self._points), seasonal="add", seasonal_periods=self._season)
            fitted = model.fit(optimized=True)
        self._forecast = [max(0.0, float(v)) for v in fitted.forecast(self._season)]
        self._forecast_at = bucket

    def _at(self, at_s: float) -> float:
        """0 where there is no forecast."""
        i = int(at_s / self._params.bucket_s) - self._forecast_at
        return self._forecast[i] if 0 <= i < len(self._forecast) else 0.0
