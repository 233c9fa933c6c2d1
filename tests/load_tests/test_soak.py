"""What counts as growth, without a server."""

from __future__ import annotations

from load_tests.soak import Watched, growth, report

SECONDS = 1800.0


def watched(kind: str, values: list[float]) -> Watched:
    made = Watched()
    made.samples["Gateway a"][kind] = [(i * SECONDS / len(values), value) for i, value in enumerate(values)]
    made.samples["ModelReplica late"][kind] = [(SECONDS / 2, 1.0), (SECONDS * 0.95, 9.0)]  # started anew: not watched
    return made


def test_filling_caches_are_no_growth_and_a_steady_rise_is() -> None:
    filling = [(i * 10.0, min(100.0 + i, 115.0)) for i in range(180)]
    assert growth(filling, SECONDS) == 0
    rising = [(i * 10.0, 100.0 + i) for i in range(180)]
    assert growth(rising, SECONDS) > 0.5


def test_the_report_names_what_grows_and_what_is_held() -> None:
    lines, well = report(watched("python_blocks", [1e6 + 1e3 * i for i in range(180)]), SECONDS, "")
    assert not well and any("python blocks" in line and "**grows**" in line for line in lines)
    assert not any("late" in line for line in lines)
    lines, well = report(watched("tasks", [40, 44] * 90), SECONDS, "")  # a few more are no leak
    assert well
    lines, well = report(watched("tasks", [40.0] * 180), SECONDS, "kv_usage 0.5")
    assert not well and "Still held at the end: kv_usage 0.5." in lines
