"""How long prompts and outputs are, in tokens. Pure: the random generator is an argument."""

from __future__ import annotations

import math
import random
from typing import Annotated, Literal

from pydantic import Field, model_validator

from load_tests.spec import Count, NotNegative, Positive, Spec


class Fixed(Spec):
    kind: Literal["fixed"]
    tokens: Count

    def draw(self, rng: random.Random, recorded: int | None) -> int:
        return self.tokens


class Uniform(Spec):
    """Any whole number from `min` to `max`, both included."""

    kind: Literal["uniform"]
    min: Count
    max: Count

    @model_validator(mode="after")
    def _ordered(self) -> Uniform:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        return self

    def draw(self, rng: random.Random, recorded: int | None) -> int:
        return rng.randint(self.min, self.max)


class LogNormal(Spec):
    """Many short, few very long, as people write. `sigma` is that of the logarithm; values are cut to [min, max]."""

    kind: Literal["lognormal"]
    median: Positive
    sigma: NotNegative
    min: Count = 1
    max: Count

    @model_validator(mode="after")
    def _ordered(self) -> LogNormal:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        return self

    def draw(self, rng: random.Random, recorded: int | None) -> int:
        return min(self.max, max(self.min, round(rng.lognormvariate(math.log(self.median), self.sigma))))


class RecordedLength(Spec):
    """The length in the phase's trace times `scale`, cut to [1, max]."""

    kind: Literal["trace"]
    scale: Positive = 1.0
    max: Count | None = None

    def draw(self, rng: random.Random, recorded: int | None) -> int:
        assert recorded is not None  # the phase checks that it has a trace
        length = max(1, round(recorded * self.scale))
        return length if self.max is None else min(length, self.max)


Length = Annotated[Fixed | Uniform | LogNormal | RecordedLength, Field(discriminator="kind")]
