"""Arrivals, lengths, traces, prompts: all that is decided before anything is sent."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaling.traces.formats import Row, TraceError, read_trace
from load_tests.arrivals import Burst, Constant, Poisson, Ramp
from load_tests.errors import LoadError
from load_tests.lengths import LogNormal, RecordedLength, Uniform
from load_tests.prompts import Form, PromptWriter, Segment
from load_tests.scenario import Phase
from load_tests.workload import Job, jobs, rows_of

TRACES = Path(__file__).parent.parent / "data" / "traces"
FIXED = {"kind": "fixed", "tokens": 10}


def phase(**settings: Any) -> Phase:
    plain = {"name": "p", "arrivals": {"kind": "poisson", "rate": 5}, "prompt": FIXED, "output": FIXED}
    return Phase.model_validate(plain | settings)


# arrivals


def test_poisson_arrivals_have_the_rate_and_the_spread() -> None:
    times = list(islice(Poisson(kind="poisson", rate=50.0).times(random.Random(0)), 5000))
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.05)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.15)


def test_constant_and_burst_arrivals() -> None:
    assert list(islice(Constant(kind="constant", rate=4.0).times(), 4)) == [0.0, 0.25, 0.5, 0.75]
    assert list(islice(Burst(kind="burst", size=2, every_s=3.0).times(), 5)) == [0.0, 0.0, 3.0, 3.0, 6.0]


@given(st.floats(0, 50), st.floats(0, 50), st.floats(0.5, 100), st.integers(0, 5))
def test_ramps_ascend_within_their_duration(a: float, b: float, duration_s: float, seed: int) -> None:
    times = list(Ramp(kind="ramp", from_rate=a, to_rate=b).times(random.Random(seed), duration_s))
    assert times == sorted(times)
    assert all(0 <= t <= duration_s * (1 + 1e-9) for t in times)


@pytest.mark.parametrize(("a", "b", "share"), [(0, 20, 0.25), (20, 0, 0.75), (10, 10, 0.5)])
def test_ramps_put_their_arrivals_where_the_rate_is(a: float, b: float, share: float) -> None:
    times = list(Ramp(kind="ramp", from_rate=a, to_rate=b).times(random.Random(1), 400.0))
    assert len(times) == pytest.approx((a + b) / 2 * 400, rel=0.1)
    assert sum(t < 200 for t in times) / len(times) == pytest.approx(share, abs=0.05)


# lengths


def test_lengths_stay_in_their_bounds() -> None:
    rng = random.Random(0)
    uniform = {Uniform(kind="uniform", min=3, max=5).draw(rng, None) for _ in range(200)}
    assert uniform == {3, 4, 5}
    normal = LogNormal(kind="lognormal", median=100, sigma=1.0, min=10, max=1000)
    drawn = sorted(normal.draw(rng, None) for _ in range(4001))
    assert drawn[0] >= 10 and drawn[-1] <= 1000
    assert drawn[2000] == pytest.approx(100, rel=0.1)


def test_recorded_lengths_are_scaled_and_cut() -> None:
    assert RecordedLength(kind="trace", scale=0.1).draw(random.Random(), 345) == 34
    assert RecordedLength(kind="trace", scale=0.001).draw(random.Random(), 345) == 1
    assert RecordedLength(kind="trace", max=100).draw(random.Random(), 345) == 100


# traces


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("azure.csv", [(0.0, 300, 40), (0.75, 900, 50), (3.5, 410, 120), (6.0, 80, 15)]),
        ("burstgpt.csv", [(0.0, 400, 20), (40.0, 1000, 200), (113.0, 1300, 400)]),
        ("mooncake.jsonl", [(0.0, 1300, 20), (0.5, 1400, 7), (3.0, 500, 31)]),
    ],
)
def test_formats_are_recognised(name: str, rows: list[tuple[float, int, int]]) -> None:
    read = read_trace(TRACES / name)
    assert [(round(r.at_s, 6), r.prompt_tokens, r.output_tokens) for r in read] == rows
    assert [r.blocks for r in read] == ([(0, 1, 2), (0, 1, 3), (4,)] if name == "mooncake.jsonl" else [()] * len(rows))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a known trace"),
        ("a,b\n1,2\n", "not a known trace"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01,1,1\nyesterday,1,1\n", "request 2 cannot be read"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01,1\n", "request 1 cannot be read"),
        ('{"timestamp": 1}\n', "request 1 cannot be read"),
        ('{"timestamp": 1, \n', "request 1 cannot be read"),
    ],
)
def test_bad_traces(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        read_trace(path)
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "absent")


# jobs


def shape(all_jobs: list[Job]) -> list[tuple[float | None, list[tuple[int, int]]]]:
    return [
        (job.at_s, [(sum(s.tokens for s in turn.segments), turn.output_tokens) for turn in job.turns])
        for job in all_jobs
    ]


def test_the_same_seed_gives_the_same_jobs_and_parts_do_not_mix() -> None:
    spread = {"kind": "uniform", "min": 5, "max": 50}
    one = phase(requests=50, prompt=spread, conversations={"turns": {"kind": "uniform", "min": 1, "max": 3}})
    assert list(jobs(one, 3)) == list(jobs(one, 3)) != list(jobs(one, 4))
    other = phase(requests=50, prompt=spread)
    assert [job.at_s for job in jobs(one, 3)] == [job.at_s for job in jobs(other, 3)]


def test_requests_and_duration_end_a_phase() -> None:
    assert len(list(jobs(phase(requests=7), 0))) == 7
    by_time = list(jobs(phase(duration_s=10), 0))
    assert by_time[-1].at_s is not None and by_time[-1].at_s < 10
    assert len(list(jobs(phase(requests=7, duration_s=1e-9), 0))) == 0


def test_groups_share_prefixes_and_nothing_else() -> None:
    made = list(jobs(phase(requests=40, prefixes={"groups": 3, "tokens": 100}), 0))
    prompts = [job.turns[0].segments for job in made]
    assert {len(segments) for segments in prompts} == {2}
    assert len({segments[0] for segments in prompts}) == 3
    assert len({segments[1] for segments in prompts}) == 40
    assert all(segments[0].tokens == 100 and segments[0].shared for segments in prompts)


def test_a_trace_is_played_at_its_times_scaled() -> None:
    trace = {"file": TRACES / "azure.csv", "time_scale": 2, "start_s": 0.5}
    scaled = {"kind": "trace", "scale": 0.5}
    played = phase(arrivals={"kind": "trace"}, prompt=scaled, output=scaled, trace=trace)
    expected = [(0.5, [(450, 25)]), (6.0, [(205, 60)]), (11.0, [(40, 8)])]
    assert shape(list(jobs(played, 0, rows_of(played)))) == expected
    with pytest.raises(LoadError, match="nothing at or after"):
        rows_of(phase(arrivals={"kind": "trace"}, trace=trace | {"start_s": 99.0}))
    with pytest.raises(LoadError, match="No such file"):
        rows_of(phase(arrivals={"kind": "trace"}, trace=trace | {"file": TRACES / "absent"}))


def test_lengths_of_a_trace_begin_anew_when_it_is_used_up() -> None:
    recorded = phase(requests=5, prompt={"kind": "trace"}, trace={"file": TRACES / "mooncake.jsonl"})
    made = list(jobs(recorded, 0, rows_of(recorded)))
    assert [sum(s.tokens for s in job.turns[0].segments) for job in made] == [1300, 1400, 500, 1300, 1400]


def test_recorded_blocks_become_shared_prefixes() -> None:
    scaled = {"kind": "trace", "scale": 0.125}
    replay = phase(arrivals={"kind": "trace"}, prompt=scaled, trace={"file": TRACES / "mooncake.jsonl"})
    made = list(jobs(replay, 0, rows_of(replay)))
    writer = PromptWriter(Form("word"), 0)
    a, b, c = (writer.text(job.turns[0].segments).split() for job in made)
    assert [len(words) for words in (a, b, c)] == [162, 175, 62]
    assert a[:128] == b[:128] and a[128:140] != b[128:140] and c[:10] != a[:10]


# prompts


def test_prompts_are_distinct_and_repeatable() -> None:
    writer, again = (PromptWriter(Form("word"), 1) for _ in range(2))
    texts = [writer.text([Segment(str(i), 50)]) for i in range(100)]
    assert texts == [again.text([Segment(str(i), 50)]) for i in range(100)]
    assert len({" ".join(text.split()[:8]) for text in texts}) == 100
    assert texts[0] != PromptWriter(Form("word"), 2).text([Segment("0", 50)])


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.sampled_from([Form("id", exact=True), Form("id", overhead=1), Form("word", 1.3, 7), Form("word", 2.0)]),
)
def test_prompts_have_the_length_asked_for(lengths: list[int], form: Form) -> None:
    segments = [Segment(f"s{i}", tokens, shared=i == 0) for i, tokens in enumerate(lengths)]
    json = PromptWriter(form, 0).json(segments).decode()
    units = json[1:-1].split("," if form.unit == "id" else " ")
    assert len(units) == form.num_units(sum(lengths))
    assert json[0] + json[-1] == ("[]" if form.unit == "id" else '""')


@given(st.integers(1, 200), st.integers(1, 50), st.integers(1, 50))
def test_a_shared_beginning_is_the_same_text(shared: int, a: int, b: int) -> None:
    writer = PromptWriter(Form("word", 1.2, 3), 0)
    one, two = (writer.text([Segment("p", shared, True), Segment(k, n)]).split() for k, n in (("a", a), ("b", b)))
    common = min(round(shared / 1.2), len(one), len(two))
    assert one[:common] == two[:common]


def test_rows_know_their_block_size() -> None:
    assert Row(0.0, 1, 1).block_tokens == 512
