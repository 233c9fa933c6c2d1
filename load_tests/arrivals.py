"""When requests are due. Pure: the random generator is an argument.

`times` yields ascending seconds from the phase's start, without end but for a recorded trace and a ramp: the phase
cuts them by its number of requests or its duration.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field

from load_tests.spec import Count, NotNegative, Positive, Spec


class Poisson(Spec):
    """Independent users: exponential gaps with a mean of 1 / rate seconds."""

    kind: Literal["poisson"]
    rate: Positive

    def times(self, rng: random.Random) -> Iterator[float]:
        at = 0.0
        while True:
            at += rng.expovariate(self.rate)
            yield at


class Constant(Spec):
    """A metronome: one every 1 / rate seconds, the first at once."""

    kind: Literal["constant"]
    rate: Positive

    def times(self) -> Iterator[float]:
        i = 0
        while True:
            yield i / self.rate
            i += 1


class Burst(Spec):
    """`size` requests in the same instant, every `every_s` seconds, the first at once."""

    kind: Literal["burst"]
    size: Count
    every_s: Positive

    def times(self) -> Iterator[float]:
        i = 0
        while True:
            yield (i // self.size) * self.every_s
            i += 1


class Ramp(Spec):
    """Poisson arrivals whose rate moves in a straight line from one value to another over the phase."""

    kind: Literal["ramp"]
    from_rate: NotNegative
    to_rate: NotNegative

    def times(self, rng: random.Random, duration_s: float) -> Iterator[float]:
        """Unit-rate arrivals, pulled through the inverse of the expected count a*t + slope*t^2/2."""
        slope = (self.to_rate - self.from_rate) / duration_s
        expected = (self.from_rate + self.to_rate) / 2 * duration_s
        count = rng.expovariate(1.0)
        while count < expected:
            if slope:
                # The form that cancels nothing for small slopes and for a rate that falls to zero.
                root = math.sqrt(max(0.0, self.from_rate**2 + 2 * slope * count))
                yield 2 * count / (self.from_rate + root)
            else:
                yield count / self.from_rate
            count += rng.expovariate(1.0)


class Closed(Spec):
    """No arrivals: `concurrency` users who each send the next request when the last one is answered."""

    kind: Literal["closed"]
    concurrency: Count


class RecordedArrivals(Spec):
    """The arrival times of the phase's trace."""

    kind: Literal["trace"]

    def times(self, recorded: Sequence[float]) -> Iterator[float]:
        yield from recorded


Arrivals = Annotated[Poisson | Constant | Burst | Ramp | Closed | RecordedArrivals, Field(discriminator="kind")]
