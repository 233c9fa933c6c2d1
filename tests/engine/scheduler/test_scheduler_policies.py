"""Priorities, fairness, deadlines, long prompts and the room that decodes leave to prompts."""

from __future__ import annotations

import random

import pytest
from helpers_scheduler import VOCAB, World
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.errors import ConfigError, DeadlineError, QueueFullError
from engine.scheduler.chunk_planner import shortest_first
from engine.scheduler.priority import ByPriority
from engine.types import FinishReason, GenerateRequest, Phase, Sequence, StepPlan


def prompt(n: int, start: int = 1) -> list[int]:
    return [(start * 7 + i * i) % (VOCAB - 1) + 1 for i in range(n)]


def seq(seq_id: int, priority: int = 0, arrival_s: float = 0.0, tenant: str = "", length: int = 1) -> Sequence:
    request = GenerateRequest(str(seq_id), (1,) * length, priority=priority, tenant=tenant)
    return Sequence(seq_id, request, [1] * length, length, arrival_s=arrival_s)


def queue(**settings: object) -> ByPriority:
    return ByPriority(EngineConfig("none", **{"priority_ageing_s": 10.0, **settings}))  # type: ignore[arg-type]


def order(q: ByPriority) -> list[int]:
    return [q.pop().seq_id for _ in range(len(q))]


# ------------------------------------------------------------------------------------------------- the queue


def test_smaller_numbers_first_and_first_come_first_among_equals() -> None:
    q = queue()
    for i, priority in enumerate((2, 0, 1, 0, 2)):
        q.push(seq(i, priority))
    assert order(q) == [1, 3, 2, 0, 4]


def test_a_step_of_priority_is_worth_so_many_seconds_of_waiting() -> None:
    for late, first in ((9.0, 1), (11.0, 0)):
        q = queue()
        q.push(seq(0, priority=2, arrival_s=0.0))
        q.push(seq(1, priority=1, arrival_s=late))
        assert order(q)[0] == first


def test_a_preempted_one_comes_before_its_own_class_only() -> None:
    q = queue()
    for i, priority in enumerate((0, 1, 1)):
        q.push(seq(i, priority))
    q.push_front(seq(9, 1))
    assert order(q) == [0, 9, 1, 2]


def test_who_may_preempt_whom() -> None:
    q = queue()
    high, low, aged = seq(0, 0, arrival_s=30.0), seq(1, 1, arrival_s=29.0), seq(2, 1, arrival_s=1.0)
    assert q.outranks(high, low) and not q.outranks(low, high)
    assert not q.outranks(high, aged), "it came long before: nothing starves"
    assert not q.outranks(seq(3, 1), low)


def test_the_most_important_is_seen_behind_an_older_one() -> None:
    q = queue()
    q.push(seq(0, 1, arrival_s=0.0))
    q.push(seq(1, 0, arrival_s=20.0))
    head, urgent = q.peek(), q.urgent()
    assert head is not None and urgent is not None and (head.seq_id, urgent.seq_id) == (0, 1)


def test_short_ones_are_found_close_to_the_front_only() -> None:
    q = queue()
    for i in range(20):
        q.push(seq(i, length=9))
    q.push(seq(20, length=3))
    assert q.short(9) is None
    for i in range(8):
        q.remove(i)
    short = q.short(9)
    assert short is not None and short.seq_id == 20
    assert (q.num_tokens, q.tokens_ahead(1), q.tokens_ahead(-1)) == (12 * 9 + 3, 12 * 9 + 3, 0)


def test_tenants_share_tokens_not_requests() -> None:
    q = queue(fair_sharing=True)
    for i in range(6):
        q.push(seq(i, tenant="many", length=10))
    for i in range(6, 8):
        q.push(seq(i, tenant="few", length=30))
    taken = []
    while len(q):
        s = q.pop()
        q.charge(s, len(s.tokens))
        taken.append(s.request.tenant)
    assert taken == ["few", "many", "many", "many", "few", "many", "many", "many"]


def test_idle_time_earns_no_credit() -> None:
    q = queue(fair_sharing=True)
    q.charge(seq(0, tenant="idle"), 10)
    for i in range(100):
        q.push(seq(i, tenant="busy"))
        q.charge(q.pop(), 1000)
    q.push(seq(200, tenant="busy"))
    q.pop()
    for i in range(4):
        q.push(seq(300 + i, tenant="idle"))
        q.push(seq(400 + i, tenant="busy"))
    taken = []
    while len(q):
        s = q.pop()
        q.charge(s, 1000)
        taken.append(s.request.tenant)
    assert taken[:4].count("busy") >= 1, "it does not wait until the other has caught up with 100,000 tokens"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), min_size=30, max_size=120))
def test_backlogged_tenants_get_equal_shares_within_one_request(work: list[tuple[str, int]]) -> None:
    q = queue(fair_sharing=True)
    for i, (tenant, length) in enumerate(work):
        q.push(seq(i, tenant=tenant, length=length))
    had = dict.fromkeys({tenant for tenant, _ in work}, 0)
    while all(any(s.request.tenant == tenant for s in q) for tenant in had):
        s = q.pop()
        q.charge(s, len(s.tokens))
        had[s.request.tenant] += len(s.tokens)
        assert max(had.values()) - min(had.values()) <= 2 * 50


# -------------------------------------------------------------------------------------------------- preemption


def test_a_more_important_one_preempts_and_lets_the_preempted_run_again() -> None:
    world = World(scheduling_policy="priority", max_num_seqs=2, budget=32)
    low = [world.add(prompt(8, i), priority=1, max_tokens=20) for i in range(2)]
    for _ in range(3):
        world.step()
    high = world.add(prompt(6, 7), max_tokens=4)
    plan = world.step()
    assert plan is not None and high.seq_id in {piece.seq_id for piece in plan.slices}
    assert sorted(s.phase for s in low) == [Phase.PREEMPTED, Phase.RUNNING]
    later = world.add(prompt(6, 8), priority=1, max_tokens=4)
    while later.phase is Phase.WAITING:
        world.step()
    assert Phase.PREEMPTED not in {s.phase for s in low}, "they waited before it"
    world.drain()
    assert world.scheduler.num_preemptions == 1 and high.num_preemptions == 0


def test_blocks_are_taken_too_but_only_if_that_is_enough() -> None:
    world = World(scheduling_policy="priority", num_blocks=12, block_size=4, budget=64)
    equal = world.add(prompt(16, 1), priority=0, max_tokens=8)
    low = world.add(prompt(8, 2), priority=1, max_tokens=8)
    world.step()
    big = world.add(prompt(34, 3), priority=0, max_tokens=2)
    world.step()
    assert big.phase is Phase.WAITING and low.phase is Phase.RUNNING, "preempting it would not have been enough"
    world.finish(big.seq_id)
    small = world.add(prompt(17, 4), priority=0, max_tokens=2)
    world.step()
    assert small.phase is Phase.RUNNING and low.phase is Phase.PREEMPTED and equal.num_preemptions == 0
    world.drain()


def test_nobody_preempts_an_equal_and_fcfs_knows_no_classes() -> None:
    for policy, priority in (("priority", 1), ("fcfs", 0)):
        world = World(scheduling_policy=policy, max_num_seqs=1)
        world.add(prompt(8), priority=1, max_tokens=8)
        world.step()
        other = world.add(prompt(8, 2), priority=priority)
        world.step()
        assert other.phase is Phase.WAITING and not world.scheduler.num_preemptions
        world.drain()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_victim_computes_again_only_what_was_not_kept(mode: str) -> None:
    world = World(
        scheduling_policy="priority", max_num_seqs=1, caching=False, budget=64, num_host_slots=64, preemption_mode=mode
    )
    low = world.add(prompt(30), priority=1, max_tokens=10)
    for _ in range(4):
        world.step()
    before = world.ranks.num_tokens
    world.add(prompt(4, 3), max_tokens=2)
    world.drain()
    assert low.num_preemptions == 1 and world.scheduler.num_swaps == (mode == "swap")
    again = world.ranks.num_tokens - before - 5 - 6  # the other request's, and low's own remaining decodes
    assert again == (0 if mode == "swap" else 33)


def test_auto_swaps_what_would_be_lost() -> None:
    for caching in (False, True):
        world = World(scheduling_policy="priority", max_num_seqs=1, caching=caching, num_host_slots=64, budget=64)
        world.add(prompt(30), priority=1, max_tokens=10)
        for _ in range(4):
            world.step()
        world.add(prompt(4, 3), max_tokens=2)
        world.drain()
        assert world.scheduler.num_swaps == (not caching), "cached blocks stay where they are"


def test_swap_without_host_memory_is_a_contradiction() -> None:
    with pytest.raises(ConfigError, match="host_kv_cache_gib"):
        EngineConfig("none", preemption_mode="swap", host_kv_cache_gib=0)
    with pytest.raises(ConfigError, match="auto, swap, recompute"):
        EngineConfig("none", preemption_mode="copy")
    assert EngineConfig("none", preemption_mode="swap").host_kv_cache_bytes == 1 << 30
    assert EngineConfig("none").host_kv_cache_bytes == 0


# ------------------------------------------------------------------------------------------ limits and deadlines


def test_waiting_tokens_are_bounded_but_one_request_alone_is_not() -> None:
    world = World(max_num_seqs=1, max_waiting_tokens=20)
    world.add(prompt(30))
    world.step()
    world.add(prompt(12))
    with pytest.raises(QueueFullError, match=r"12 tokens wait and the request has 9, max_waiting_tokens is 20"):
        world.add(prompt(9))
    world.add(prompt(8))
    world.drain()


def test_a_waiting_request_ends_when_its_deadline_cannot_be_met_and_a_running_one_goes_on() -> None:
    world = World(max_num_seqs=1)
    running = world.add(prompt(4), max_tokens=40, deadline_s=3.0)
    world.step()
    waiting, patient = world.add(prompt(4, 2), deadline_s=5.0), world.add(prompt(4, 3))
    missed = []
    for _ in range(20):
        missed += world.scheduler.missed(world.now)
        world.step()
    assert missed == [waiting] and running.phase is Phase.RUNNING and patient.phase is Phase.WAITING
    world.finish(waiting.seq_id, FinishReason.ABORT)
    world.drain()


def test_a_deadline_before_the_queue_can_be_through_is_refused_at_once() -> None:
    world = World(max_num_seqs=1, budget=64)
    for i in range(40):
        world.add(prompt(20, i), max_tokens=4)
    for _ in range(60):
        world.step()  # a request takes 4 steps of a second: 5 tokens per second leave the queue
    ahead = 20 * world.scheduler.num_waiting
    with pytest.raises(DeadlineError, match=rf"{ahead} tokens wait before this request"):
        world.add(prompt(4), deadline_s=ahead / 5 / 4)
    world.add(prompt(4), deadline_s=ahead / 5)


# --------------------------------------------------------------------------------------------------- long prompts


def test_short_prompts_pass_long_ones_that_wait_and_few_long_ones_run_at_once() -> None:
    world = World(
        num_blocks=400, budget=16, max_num_seqs=16, long_prefill_tokens=50, max_long_prefills=2, caching=False
    )
    longs = [world.add(prompt(100, i), max_tokens=2) for i in range(4)]
    shorts = [world.add(prompt(6, 10 + i), max_tokens=2) for i in range(4)]
    while any(s.phase is not Phase.FINISHED for s in shorts):
        world.step()
        assert sum(s.phase is Phase.RUNNING and s.num_pending >= 50 for s in longs) <= 2
    assert all(s.phase is not Phase.FINISHED for s in longs)
    world.drain()


def test_a_long_prompt_gets_on_however_many_short_ones_keep_coming() -> None:
    world = World(num_blocks=2000, budget=16, max_num_seqs=16, max_num_waiting=10_000, caching=False)
    long = world.add(prompt(200), max_tokens=1)
    steps = 0
    while long.phase is not Phase.FINISHED:
        for i in range(4):
            world.add(prompt(8, 3 + steps * 4 + i), max_tokens=1)
        world.step()
        steps += 1
    assert steps <= 200 / (16 // 4) + 1
    for s in list(world.seqs.values()):
        if s.phase is not Phase.FINISHED:
            world.finish(s.seq_id)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=12), st.integers(1, 200), st.data())
def test_all_room_is_divided_and_nobody_gets_more_than_it_lacks(
    pending: list[int], room: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, len(pending) - 1))
    grants = shortest_first(pending, room, first, max(1, room // 4))
    assert sum(grants) == min(room, sum(pending))
    assert all(0 <= got <= lacks for got, lacks in zip(grants, pending, strict=True))
    assert grants[first] >= min(pending[first], room // 4)
    served = [i for i, got in enumerate(grants) if got == pending[i] and i != first]
    assert all(pending[i] <= pending[j] for i in served for j, got in enumerate(grants) if not got)


# ------------------------------------------------------------------------------------------- decodes beside prompts


@pytest.mark.parametrize("token_s", [0.0005, 0.002])
def test_streams_keep_their_pace_beside_a_long_prompt(token_s: float) -> None:
    def seconds(plan: StepPlan) -> float:
        return 0.01 + token_s * sum(len(piece.token_ids) for piece in plan.slices if len(piece.token_ids) > 1)

    took = {}
    for slowdown in (2.5, float("inf")):
        world = World(num_blocks=400, budget=256, step_s=seconds, max_decode_slowdown=slowdown, max_model_len=1000)
        world.add(prompt(4), max_tokens=600)
        for _ in range(30):
            world.step()
        long = world.add(prompt(900, 2), max_tokens=1)
        times = []
        while long.phase is not Phase.FINISHED:
            plan = world.schedule()
            assert plan is not None
            times.append(seconds(plan))
            world.update(plan)
        took[slowdown] = sorted(times)
        world.finish(0)
    paced, fast = took[2.5], took[float("inf")]
    assert paced[int(0.95 * (len(paced) - 1))] <= 0.03 and paced[-1] < 0.3 and sum(paced) < 4 * sum(fast)
    assert fast[-2] > 0.1


@pytest.mark.parametrize("classes", [(0, 0), (0, 1), (1, 0)])
def test_dear_prompts_beside_one_stream_all_come_to_an_end(classes: tuple[int, int]) -> None:
    world = World(
        num_blocks=400,
        budget=64,
        max_num_seqs=4,
        max_model_len=1000,
        scheduling_policy="priority",
        step_s=lambda plan: 0.004 + 0.001 * sum(len(piece.token_ids) for piece in plan.slices),
    )
    world.add(prompt(4), max_tokens=900, priority=0)
    for _ in range(30):
        world.step()
    long = world.add(prompt(600, 2), max_tokens=1, priority=classes[0])
    for i in range(40):
        world.add(prompt(5, 3 + i), max_tokens=1, priority=classes[1])
        for _ in range(10):
            world.step()
    assert long.phase is Phase.FINISHED and not world.scheduler.num_waiting


def test_many_prompts_weigh_more_than_the_streams_beside_them() -> None:
    def granted(num_streams: int, num_prompts: int) -> int:
        world = World(
            num_blocks=4000,
            budget=512,
            max_num_seqs=32,
            max_model_len=1000,
            step_s=lambda plan: 0.02 + 0.001 * sum(len(p.token_ids) for p in plan.slices if len(p.token_ids) > 1),
        )
        for i in range(num_streams):
            world.add(prompt(4, i), max_tokens=500)
        for _ in range(5):
            world.step()
        for i in range(num_prompts):
            world.add(prompt(500, 40 + i), max_tokens=1)
        plan = world.step()
        assert plan is not None
        return sum(len(piece.token_ids) for piece in plan.slices if len(piece.token_ids) > 1)

    alone = granted(8, 1)
    assert granted(8, 3) == alone < granted(8, 5) < granted(8, 9)


def test_less_important_prompts_get_nothing_while_a_more_important_one_gets_nothing() -> None:
    rng = random.Random(0)
    world = World(
        num_blocks=2000,
        budget=256,
        max_num_seqs=8,
        caching=False,
        max_model_len=1000,
        max_num_waiting=10_000,
        scheduling_policy="priority",
        step_s=lambda plan: (
            0.004 + sum(0.001 * n + 0.003 * (n > 1) for n in map(len, (s.token_ids for s in plan.slices)))
        ),
    )
    first, most = [], 0
    for _ in range(400):
        if rng.random() < 0.4:
            world.add(prompt(64, rng.randrange(99)), priority=1, max_tokens=12)
        if rng.random() < 0.1:
            first.append(world.add(prompt(64, rng.randrange(99)), max_tokens=12))
        plan = world.step()
        granted = {} if plan is None else {s.seq_id: len(s.token_ids) for s in plan.slices}
        waits = any(seq.first_token_s is None and seq.seq_id not in granted for seq in first)
        low = sum(n for seq_id, n in granted.items() if n > 1 and world.seqs[seq_id].request.priority)
        assert not (waits and low)
        most = max(most, low) if len(first) > 5 else 0
    assert 10 < most < 30, "and they are brief"
