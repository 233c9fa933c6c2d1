"""Made-up traffic, the same for the same seed. Requests are Poisson with a rate that moves with time, as fractions of
a `rate` that is the trace's mean; lengths are log-normal."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from autoscaling.settings import PolicyError
from autoscaling.traces.trace import Trace

Rng = np.random.Generator
Array = NDArray[np.float64]

_STEP_S = 1.0  # rates hold for so long
_MEDIAN_PROMPT, _SIGMA_PROMPT = 512.0, 0.9
_MEDIAN_OUTPUT, _SIGMA_OUTPUT = 128.0, 0.7
_MAX_PROMPT, _MAX_OUTPUT = 8000, 1000


def constant(t: Array, duration_s: float, rng: Rng) -> Array:
    """The mean, all the time."""
    return np.ones_like(t)


def diurnal(t: Array, duration_s: float, rng: Rng) -> Array:
    """One day within the duration, from 0.3 to 1.7 of the mean, with some noise of minutes."""
    return (1.0 - 0.7 * np.cos(2 * np.pi * t / duration_s)) * _wander(t, 0.08, 300.0, rng)


def weekly(t: Array, duration_s: float, rng: Rng) -> Array:
    """Seven days within the duration; the last two have less than half the traffic."""
    day = t * 7 / duration_s
    busy = np.where(day % 7 < 5, 1.0, 0.45)
    return (1.0 - 0.7 * np.cos(2 * np.pi * day)) * busy * _wander(t, 0.08, 600.0, rng)


def burst(t: Array, duration_s: float, rng: Rng) -> Array:
    """Bursts of three times the rest, two minutes long on the mean, every ten minutes on the mean, each reached
    within 20 to 60 s."""
    shape = np.ones_like(t)
    at = rng.exponential(400.0)
    while at < duration_s:
        rise = rng.uniform(20.0, 60.0)
        hold = rng.uniform(40.0, 200.0)
        edges = [at, at + rise, at + rise + hold, at + 2 * rise + hold]
        shape += np.interp(t, edges, [0.0, 2.0, 2.0, 0.0], left=0.0, right=0.0)
        at = edges[-1] + rng.exponential(440.0)
    return shape


def ramp(t: Array, duration_s: float, rng: Rng) -> Array:
    """In a straight line from 0.2 to 1.8 of the mean."""
    return 0.2 + 1.6 * t / duration_s


def flash_crowd(t: Array, duration_s: float, rng: Rng) -> Array:
    """A quiet time; at a third of it everybody comes within three minutes, six times as many; they lose interest over
    an eighth of the whole."""
    at, rise_s = duration_s / 3, min(180.0, duration_s / 20)
    up = np.clip((t - at) / rise_s, 0.0, 1.0)
    down = np.exp(-np.clip(t - at - 2 * rise_s, 0.0, None) / (duration_s / 8))
    return 1.0 + 5.0 * up * down


GENERATORS: dict[str, Callable[[Array, float, Rng], Array]] = {
    "constant": constant,
    "diurnal": diurnal,
    "weekly": weekly,
    "burst": burst,
    "ramp": ramp,
    "flash_crowd": flash_crowd,
}


def generate(name: str, rate: float, duration_s: float, seed: int) -> Trace:
    """`rate`: mean requests per second over the whole. Raises PolicyError."""
    if name not in GENERATORS:
        raise PolicyError(f"trace: no file and no generator is called {name!r}; generators: {', '.join(GENERATORS)}")
    if not rate > 0 or not duration_s >= 1:
        raise PolicyError(f"trace: need a rate above 0 and at least 1 s, got {rate:g} and {duration_s:g}")
    rng = np.random.default_rng([seed, *name.encode()])
    t = np.arange(0.0, duration_s, _STEP_S)
    shape = np.maximum(0.0, GENERATORS[name](t, duration_s, rng))
    counts = rng.poisson(shape * (rate * _STEP_S / shape.mean()))
    at_s = np.repeat(t, counts) + rng.random(int(counts.sum())) * _STEP_S
    at_s = np.sort(at_s[at_s < duration_s])
    n = len(at_s)
    note = f"generated, {rate:g} requests/s on the mean, {duration_s / 3600:g} h, seed {seed}"
    return Trace(
        name,
        at_s,
        _lengths(_MEDIAN_PROMPT, _SIGMA_PROMPT, _MAX_PROMPT, n, rng),
        _lengths(_MEDIAN_OUTPUT, _SIGMA_OUTPUT, _MAX_OUTPUT, n, rng),
        duration_s,
        (note,),
    )


def _lengths(median: float, sigma: float, most: int, n: int, rng: Rng) -> NDArray[np.int64]:
    return np.clip(np.rint(rng.lognormal(np.log(median), sigma, n)), 1, most).astype(np.int64)


def _wander(t: Array, size: float, over_s: float, rng: Rng) -> Array:
    """About 1, moving smoothly."""
    knots = np.arange(t[0], t[-1] + 2 * over_s, over_s)
    return np.exp(np.interp(t, knots, size * rng.standard_normal(len(knots))))
