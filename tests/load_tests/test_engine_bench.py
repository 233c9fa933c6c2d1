"""The engine's micro-benchmarks: that each part measures what it says. Figures themselves are not judged."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers_models import make_gguf

from engine.kernels import cpu
from engine.runner.graphs import StepGraph
from engine.types import NewSequence, SamplingParams, SeqSlice, StepPlan
from load_tests.engine_bench import breakdown, contention, overhead, throughput
from load_tests.engine_bench.__main__ import PARTS, main
from load_tests.engine_bench.bench import Bench
from load_tests.engine_bench.executors import result_of
from load_tests.engine_bench.figures import EngineReport, Figures, as_json, document, table
from load_tests.engine_bench.linears import linears_of
from load_tests.engine_bench.memory import read_bandwidth
from load_tests.engine_bench.timers import Timers
from load_tests.engine_bench.timing import samples

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_gguf(tmp_path_factory.mktemp("model"), max_position_embeddings=1600))


@pytest.fixture(scope="module")
def bench(model: str) -> Bench:
    return Bench(model, quick=True, say=lambda line: None)


@pytest.mark.sockets
@pytest.mark.slow
def test_every_part_gives_full_tables(bench: Bench) -> None:
    for name, run in PARTS.items():
        for found in run(bench):
            # Nothing is missing but what has no meaning: transformers' own prefill time.
            gaps = [key for row in found.rows for key in found.columns if row.get(key) is None]
            assert found.rows and gaps == (["prefill_s"] if name == "throughput" else []), found.name
            assert all(row.keys() == found.columns.keys() for row in found.rows), found.name


def test_what_does_not_fit_is_left_out(bench: Bench) -> None:
    # A sequence of 1024 + 128 tokens takes 72 blocks, and one is kept free for each; one more is never promised.
    most = (bench.subject.capacity.num_blocks - 1) // 73
    assert bench.subject.fits(most, 1024) and not bench.subject.fits(most + 1, 1024)
    assert bench.subject.fits(1, 1600 - 128) and not bench.subject.fits(1, 1600 - 127)


def test_decoding_costs_no_prefill_and_leaves_nothing_behind(bench: Bench) -> None:
    ran: list[StepPlan] = []
    with bench.subject.decoding(3, 300) as (engine, executor):
        inner = executor.inner.submit
        executor.inner.submit = lambda plan: ran.append(plan) or inner(plan)  # type: ignore[method-assign, func-returns-value]
        try:
            deltas = [engine.step() for _ in range(4)]
        finally:
            del executor.inner.submit
    assert all(len(step) == 3 for step in deltas)
    assert all(len(s.token_ids) == 1 and s.start > 299 for plan in ran for s in plan.slices) and len(ran) == 4
    assert executor.announced == {}
    assert executor.last is ran[-1]


def test_linear_layers_are_those_of_the_model(bench: Bench) -> None:
    linears = linears_of(bench.subject, 3)
    shapes = [tuple(x.shape) for _, x in linears.calls]
    assert shapes == [(3, 64), (3, 128), (3, 64), (3, 128)] * 2 + [(3, 64)]  # qkv, o, gate and up, down; head
    # Q4_1 has 20 bytes per 32 weights, Q8_0 34. A packed layer may be padded, never smaller.
    weights = 2 * (64 * 256 + 128 * 64 + 64 * 256 + 128 * 64) * 20 // 32 + 64 * 288 * 20 // 32
    assert weights <= linears.weight_bytes <= weights * 8
    linears()


def test_a_step_is_taken_apart_whether_it_is_replayed_or_not(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    found = breakdown.measure(bench.subject, 2, 1)
    assert found.replayed is cpu.available()
    monkeypatch.setattr(StepGraph, "hidden", lambda self, slices: None)
    eager = breakdown.measure(bench.subject, 2, 1)
    assert not eager.replayed
    for shares in (found.shares, eager.shares):
        assert set(shares) == {*breakdown.FORWARD, *breakdown.AROUND, "python"}
        assert all(share >= 0 for share in shares.values()) and shares["sampling"]
    assert eager.shares["gemm"]
    # The split of a replay this short can leave nothing for one kind, never for all.
    assert sum(found.shares[kind] for kind in breakdown.FORWARD)


def test_a_replay_is_split_without_the_python_of_each_call() -> None:
    calls = {"gemm": 10, "attention": 5, "kernels": 5}
    # 20 calls of 1 s of Python each, over 35 s of kernels
    assert breakdown.split_replay(35.0, {"gemm": 30.0, "attention": 15.0, "kernels": 10.0}, calls) == {
        "gemm": 20.0,
        "attention": 10.0,
        "kernels": 5.0,
    }
    # a replay that is slower than its kernels: the rest is not theirs
    assert breakdown.split_replay(9.0, {"gemm": 4.0, "attention": 2.0, "kernels": 1.0}, calls)["gemm"] == 4.0
    # a kind of which nothing would be left; the others do not grow beyond the replay
    split = breakdown.split_replay(10.0, {"gemm": 18.0, "attention": 1.0, "kernels": 5.0}, calls)
    assert split["attention"] == 0.0 and sum(split.values()) == pytest.approx(10.0)


def test_timers_count_nested_work_once_and_go_away() -> None:
    class Work:
        def outer(self, depth: int) -> int:
            return sum(self.inner() for _ in range(depth))

        def inner(self) -> int:
            return 1

    plain = vars(Work)["outer"]
    timers = Timers({(Work, "outer"): "a", (Work, "inner"): "b"})
    with timers.on():
        assert Work().outer(3) == 3
    assert vars(Work)["outer"] is plain
    seconds, calls = timers.take()
    assert calls == Counter(a=1, b=3) and seconds["a"] > 0 and seconds["b"] > 0
    assert Work().outer(2) == 2 and timers.take() == (Counter(), Counter())


def test_nested_time_is_not_the_outer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    class Work:
        def outer(self) -> None:
            now[0] += 1
            self.inner()
            self.inner()

        def inner(self) -> None:
            now[0] += 10

    timers = Timers({(Work, "outer"): "a", (Work, "inner"): "b"})
    with timers.on():
        Work().outer()
        Work().outer()
    assert timers.seconds == Counter(a=2.0, b=40.0)


def test_every_timed_method_is_there() -> None:
    kinds = breakdown.timed_methods()
    assert set(kinds.values()) == {*breakdown.FORWARD, *breakdown.AROUND, breakdown.REPLAY}


def test_scheduler_steps_are_decodes_of_everyone() -> None:
    schedule_s, update_s, plan = overhead.scheduler_step(8, 20)
    assert schedule_s > 0 and update_s > 0
    assert [len(s.token_ids) for s in plan.slices] == [1] * 8 and {s.start for s in plan.slices} == {128 + 19}


@pytest.mark.sockets
def test_a_busy_core_is_given_back() -> None:
    with pytest.MonkeyPatch.context() as patch:
        children: list[subprocess.Popen[bytes]] = []

        class Watched(subprocess.Popen):  # type: ignore[type-arg]
            def __init__(self, *args: object, **kwargs: object) -> None:
                super().__init__(*args, **kwargs)  # type: ignore[call-overload]
                children.append(self)

        patch.setattr(subprocess, "Popen", Watched)
        with pytest.raises(RuntimeError), contention.one_core_busy():
            (child,) = children
            assert child.poll() is None
            raise RuntimeError
        assert child.poll() is not None


def test_throughput_counts_every_token(bench: Bench) -> None:
    with bench.subject.engine() as engine:
        run = throughput.run_engine(engine, throughput.random_prompts(3, 20, 288, 0), 5)
        assert engine.stats().generated_tokens == 15 and not engine.has_work
    assert run.prefill_s is not None and run.prefill_s > 0 and run.tokens_per_s > 0


def test_samples_are_bounded() -> None:
    calls: list[int] = []
    assert len(samples(lambda: calls.append(0), 1000.0, most=5)) == 5 and len(calls) == 7
    now = [0.0]

    def slow() -> None:
        now[0] += 10

    assert samples(slow, 1.0, least=2, clock=lambda: now[0]) == [10, 10] and now[0] == 30


def test_bandwidth_is_positive() -> None:
    assert read_bandwidth(0.0, quick=True) > 0


def test_fake_results_follow_the_plan() -> None:
    slices = (SeqSlice(0, (1, 2), 3, (0,), sample=False), SeqSlice(1, (1,), 4, (1,), sample=True))
    got = result_of(StepPlan(7, slices, new=(NewSequence(0, SamplingParams(), 0, (1,)),)), (10, 11, 12))
    assert got.step_id == 7 and [s.token_ids for s in got.slices] == [(), (12,)]


def test_report_shows_what_was_not_measured() -> None:
    found = Figures("t", "Title", {"a": "A ms", "b": "B"}, [{"a": 1.23456789, "b": "x"}, {"a": 12345.6}], ("a note",))
    report = EngineReport({"model": "m"}, (found,))
    assert table(found).text().splitlines() == ["Title", "A ms   B", "1.23   x", "12346  -", "  (a note)"]
    assert "| 12346 | - |" in document(report) and "- a note" in document(report)
    data = json.loads(json.dumps(as_json(report)))
    assert data["settings"] == {"model": "m"} and data["tables"]["t"]["rows"][0] == {"a": 1.2346, "b": "x"}


def test_command_line(model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "bench.json", tmp_path / "out"
    assert main(["prefill", model, "--quick", "--json", str(file), "--out", str(out)]) == 0
    shown = capfd.readouterr()
    assert "tokens/s" in shown.out and "prefill of 64 after 0" in shown.err
    assert json.loads(file.read_text()) == json.loads((out / "engine_bench.json").read_text())
    assert "# Engine benchmarks" in (out / "engine_bench.md").read_text()
    assert main(["prefill", str(tmp_path / "none.gguf"), "--quick"]) == 2
    assert "none.gguf" in capfd.readouterr().err
