"""What every part is given."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from load_tests.engine_bench.subject import Subject


class Bench:
    """`quick`: small grids and few repetitions, to see that everything runs. `say` takes a line of progress."""

    def __init__(self, model: str, quick: bool, say: Callable[[str], None]) -> None:
        self.model = model
        self.quick = quick
        self.say = say

    @property
    def budget_s(self) -> float:
        """How long one figure may be measured."""
        return 0.1 if self.quick else 1.5

    @property
    def rounds(self) -> int:
        """Repetitions of what is compared with something else, alternating."""
        return 1 if self.quick else 3

    @cached_property
    def subject(self) -> Subject:
        self.say(f"loading {self.model}")
        return Subject(self.model, self.quick)
