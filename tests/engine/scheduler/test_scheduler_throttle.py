"""What chunks of prompts are learnt to cost, and how much of them goes into a step beside decodes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler.arrivals import PromptArrivals
from engine.scheduler.cost import ChunkCost, StepCost
from engine.scheduler.prefill_throttle import PrefillThrottle
from engine.stats import nearest_rank


@dataclass(frozen=True)
class Machine:
    """Seconds: of a step that decodes, for each sequence; that a chunk adds, for each token of the context before it,
    for each token, for each pair of the two."""

    base: float = 0.004
    decode: float = 0.0009
    chunk: float = 0.003
    ahead: float = 1.2e-6
    token: float = 0.0011
    pair: float = 3e-7

    def seconds(self, num_decodes: int, chunks: Sequence[tuple[int, int]]) -> float:
        decodes = self.base + self.decode * num_decodes
        return decodes + sum(self.chunk + self.ahead * a + n * (self.token + self.pair * a) for a, n in chunks)


class Steps:
    """Scheduling without a scheduler: so many streams, one prompt at a time."""

    def __init__(self, machine: Machine, slowdown: float = 2.5, noise: float = 0.0) -> None:
        self.machine, self.noise, self.rng = machine, noise, random.Random(0)
        self.cost = StepCost()
        self.throttle = PrefillThrottle(slowdown, self.cost)

    def step(self, num_decodes: int, chunks: Sequence[tuple[int, int]] = ()) -> float:
        took = self.machine.seconds(num_decodes, chunks) * (1 + self.noise * abs(self.rng.gauss(0, 1)))
        self.throttle.observe(num_decodes, bool(chunks), took)
        self.cost.observe(num_decodes, chunks, took)
        return took

    def budget(self, streams: int, context: int, wanted: int, most: int = 512) -> int:
        chunks = self.cost.chunks(context)
        return most if chunks is None else self.throttle.beside_decodes(streams, chunks, 0.0, wanted, most)

    def prefill(self, streams: int, length: int) -> list[float]:
        """The steps until it is done."""
        at, took = 0, []
        while at < length:
            count = min(length - at, self.budget(streams, at, length - at))
            took.append(self.step(streams, [(at, count)] if count else []))
            at += count
        return took


def p95(times: Sequence[float]) -> float:
    return nearest_rank(sorted(times), 0.95)


# ------------------------------------------------------------------------------------------------ what is learnt


def test_what_a_chunk_costs_is_found_in_its_parts() -> None:
    machine = Machine()
    steps, rng = Steps(machine), random.Random(1)
    for _ in range(30):
        steps.step(8)
    for _ in range(600):
        steps.step(8, [(rng.randrange(6000), rng.choice((4, 10, 40, 120, 300)))])
    for context in (0, 1000, 5000):
        chunks = steps.cost.chunks(context)
        assert chunks is not None
        for tokens in (8, 100):
            right = machine.seconds(8, [(context, tokens)]) - machine.seconds(8, [])
            assert chunks.seconds(tokens) == pytest.approx(right, rel=0.1, abs=0.002)


def test_nothing_is_known_before_it_was_seen() -> None:
    cost = StepCost()
    assert cost.decode_s(3) is None and cost.chunks(0) is None and cost.token_s(0) is None
    cost.observe(3, [], 0.0)  # the clock stood still
    cost.observe(3, [(0, 9)], 0.5)  # how much of it was decoding?
    assert cost.decode_s(3) is None and cost.chunks(0) is None
    cost.observe(0, [(0, 100)], 0.1)
    assert cost.token_s(0) == pytest.approx(0.001)
    cost.observe(3, [], 0.01)
    assert cost.decode_s(3) == cost.decode_s(40) == 0.01


def test_a_hiccup_moves_little_and_what_disturbs_is_soon_forgotten() -> None:
    cost = StepCost()
    cost.observe(8, [], 0.01)
    cost.observe(8, [], 60.0)
    assert 0.01 < (disturbed := cost.decode_s(8) or 0.0) <= 0.011
    cost.observe(8, [], 0.01)
    assert 0.01 <= (cost.decode_s(8) or 0.0) < 0.5 * (0.01 + disturbed) + 0.0002
    cost.observe(8, [(0, 30)], 0.04)
    before = cost.chunks(0)
    cost.observe(8, [(0, 30)], 60.0)
    after = cost.chunks(0)
    assert before is not None and after is not None and after.seconds(30) < 1.5 * before.seconds(30)


def test_tokens_that_fit() -> None:
    chunks = ChunkCost(0.010, 0.001)
    assert [chunks.tokens(s, 100) for s in (0.0605, 0.010, 1.0, inf)] == [50, 0, 100, 100]
    assert chunks.tokens(0.0, 100) < 0 and ChunkCost(0.0, 0.0).tokens(0.0, 7) == 7


# ---------------------------------------------------------------------------------------------- side by side


def test_prompts_that_could_share_a_step_have_it_one_after_the_other_if_that_costs_little() -> None:
    steps = Steps(Machine(base=0.01, decode=0.0, chunk=0.0, ahead=0.0, token=0.001, pair=0.0))
    chunks = ChunkCost(0.0, 0.001)
    assert steps.throttle.one_after_another(0, chunks, 32, 512) == 512  # nothing is known yet
    for _ in range(30):
        steps.step(8)
    assert (
        64 <= steps.throttle.one_after_another(0, chunks, 32, 512) <= 96
    )  # two or three of 32, of a step of 8 all 256
    assert steps.throttle.one_after_another(8, chunks, 32, 512) == steps.throttle.one_after_another(0, chunks, 32, 512)
    assert steps.throttle.one_after_another(0, chunks, 256, 512) == 256  # the shortest is not cut
    assert steps.throttle.one_after_another(0, chunks, 256, 100) == 100
    assert (
        steps.throttle.one_after_another(0, ChunkCost(0.0, 1e-6), 32, 512) == 512
    )  # where tokens cost next to nothing, all at once
    assert PrefillThrottle(inf, steps.cost).one_after_another(0, chunks, 32, 512) == 512


# --------------------------------------------------------------------------------------------- beside streams


def test_without_knowledge_or_limit_prompts_get_the_budget() -> None:
    steps = Steps(Machine(), slowdown=inf)
    assert steps.budget(8, 0, 999) == 512
    steps.step(0, [(0, 100)])
    assert steps.budget(8, 0, 999) == 512
    for _ in range(30):
        steps.step(8)
        steps.step(8, [(0, 100)])
        assert steps.budget(8, 0, 999) == 512


def test_a_step_is_as_long_as_allowed_and_longer_when_many_wait_for_a_first_token() -> None:
    steps = Steps(Machine(base=0.012, decode=0.001, chunk=0.0, ahead=0.0, token=0.001, pair=0.0))
    for _ in range(4):
        steps.step(0, [(0, 512)])
    for _ in range(30):
        steps.step(8)
    for _ in range(10):
        steps.step(8, [(0, 30)])
    chunks = steps.cost.chunks(0)
    assert chunks is not None
    steps.step(8)
    assert 28 <= steps.throttle.beside_decodes(8, chunks, 1.0, 999, 512) <= 30
    assert 78 <= steps.throttle.beside_decodes(8, chunks, 2.0, 999, 512) <= 80
    assert 53 <= steps.throttle.beside_decodes(8, chunks, 1.0, 999, 512, less_important_s=0.010) <= 55, "those give way"


def test_now_and_then_a_step_only_decodes_so_that_its_time_stays_known() -> None:
    steps = Steps(Machine(base=0.012, decode=0.001, chunk=0.0, ahead=0.0, token=0.001, pair=0.0))
    steps.step(0, [(0, 512)])
    for _ in range(10):
        steps.step(8)
    for _ in range(4):
        steps.step(8, [(0, 30)])
    for _ in range(20):
        steps.step(8)
    for _ in range(20):
        steps.cost.observe(8, [], 0.060)  # disturbed
    took = steps.prefill(8, 12_000)
    assert max(took[:8]) > 0.08 > 0.055 > max(took[-20:-1])


def test_a_prompt_that_fits_into_a_pause_gets_it_at_once_if_streams_are_rested() -> None:
    steps = Steps(Machine(base=0.012, decode=0.001, chunk=0.0, ahead=0.0, token=0.001, pair=0.0))
    steps.step(0, [(0, 512)])
    for _ in range(30):
        steps.step(8)
    assert steps.budget(8, 0, 200) >= 200
    steps.step(8, [(0, 200)])
    assert steps.budget(8, 0, 200) < 40
    for _ in range(22):
        steps.step(8)
    assert steps.budget(8, 0, 200) >= 200
    assert steps.budget(8, 0, 4000) < 40, "this does not fit"


def test_where_a_chunk_costs_too_much_streams_pause_and_small_ones_need_not_wait() -> None:
    steps = Steps(Machine(base=0.003, decode=0.001, chunk=0.004, ahead=0.0, token=0.001, pair=0.0))
    took = steps.prefill(0, 1000)
    for _ in range(60):
        steps.step(1)
    took = steps.prefill(1, 3000)
    assert p95(took[60:]) < 0.005 and max(took) < 0.3
    while pause := steps.budget(1, 0, 9999):
        assert steps.throttle.one_after_another(1, ChunkCost(0.004, 0.001), 8, pause) == pause, (
            "who is left out waits for the next"
        )
        steps.step(1, [(0, pause)])
    for _ in range(10):
        steps.step(1)
    assert not steps.budget(1, 0, 9999) and steps.budget(1, 0, 40) >= 40, "nothing is left to save for"


@settings(max_examples=60, deadline=None)
@given(
    streams=st.sampled_from((1, 2, 4, 8, 16, 32)),
    machine=st.builds(
        Machine,
        base=st.floats(0.002, 0.02),
        decode=st.floats(0.0002, 0.002),
        chunk=st.floats(0.0, 0.006),
        ahead=st.floats(0.0, 6e-6),
        token=st.floats(0.0004, 0.003),
        pair=st.floats(0.0, 5e-7),
    ),
    noise=st.sampled_from((0.0, 0.1, 0.2)),
    known=st.booleans(),
)
def test_tokens_come_at_most_three_times_as_late_while_a_long_prompt_is_prefilled(
    streams: int, machine: Machine, noise: float, known: bool
) -> None:
    steps = Steps(machine, noise=noise)
    if known:
        steps.prefill(0, 1500)
    steps.step(0, [(0, 64)] * min(8, streams))
    idle = [steps.step(streams) for _ in range(60)]
    took = steps.prefill(streams, 6000)
    alone = sum(machine.seconds(0, [(at, 500)]) for at in range(0, 6000, 500))
    assert nearest_rank(sorted(took), 0.93) <= 3 * p95(idle)  # a few are for learning
    assert sorted(took)[-3] <= 0.4 + 3 * machine.seconds(streams, [])
    assert sum(took) <= 8 * alone


# ----------------------------------------------------------------------------------------------- who is arrivals


def test_who_keeps_coming_is_arrivals_for_a_minute() -> None:
    arrivals = PromptArrivals()
    arrivals.observe(1, 100, 0.0)
    arrivals.observe(0, 400, 30.0)
    assert [arrivals.usual_tokens(cls, 30.0) for cls in (-1, 0, 1, 2)] == [None, 400, 100, 100]
    assert [arrivals.usual_tokens(cls, 70.0) for cls in (-1, 0, 1, 2)] == [None, 400, 400, 400]
    assert arrivals.usual_tokens(2, 91.0) is None
    for _ in range(40):
        arrivals.observe(0, 200, 100.0)
    assert 200 <= (arrivals.usual_tokens(0, 100.0) or 0) <= 205


def test_less_important_prompts_are_brief_while_more_important_ones_are_arrivals() -> None:
    steps = Steps(Machine(base=0.0, decode=0.001, chunk=0.0, ahead=0.0, token=0.001, pair=0.0))
    for _ in range(5):
        steps.step(0, [(0, 200)])
    chunks = steps.cost.chunks(0)
    assert chunks is not None
    briefs = [steps.throttle.beside_more_important(chunks, arrivals, 512) for arrivals in (1, 80, 400)]
    assert briefs == pytest.approx([20, 20, 100], abs=1)
    assert steps.throttle.beside_more_important(ChunkCost(0.0, 0.1), 1, 512) == 4, "they get on"
