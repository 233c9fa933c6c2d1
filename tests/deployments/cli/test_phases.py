from __future__ import annotations

from deployments.cli.phases import Compiling, Phases


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_start_is_told_by_its_parts() -> None:
    clock = Clock()
    phases = Phases(clock)
    clock.now_s += 3.14
    phases.done("Ray")
    clock.now_s += 2
    phases.done("model", " (cold)")
    clock.now_s += 60  # part of nothing
    assert str(phases) == "5.1 s: Ray 3.1 s, model 2.0 s (cold)"


def test_what_is_compiled_meanwhile_is_told_with_its_time() -> None:
    clock, seen = Clock(), iter([False, True, True, False, False])
    compiling = Compiling(lambda: next(seen), clock)
    looks = []
    for _ in range(5):
        looks.append(compiling.look())
        clock.now_s += 1.5
    assert looks == [False, True, True, False, False]
    assert compiling.remark() == " (3.0 s of it compiling kernels, once per machine)"


def test_nothing_is_said_of_kernels_that_were_there() -> None:
    compiling = Compiling(lambda: False)
    compiling.look()
    assert compiling.remark() == ""
