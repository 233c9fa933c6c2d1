"""Named scenarios: admission, limits, prefix reuse, preemption, endings. Each also runs through World's checks."""

from __future__ import annotations

from itertools import pairwise

import pytest
from helpers_scheduler import EOS, VOCAB, World, oracle

from engine.errors import CapacityError, ContextLengthError, InvalidRequestError, QueueFullError
from engine.scheduler.fcfs import Fcfs
from engine.types import FinishReason, Phase, Sequence, SliceResult, StepResult


def prompt(n: int, start: int = 1) -> list[int]:
    """n tokens that share no prefix with another start's."""
    return [(start * 7 + i * i) % (VOCAB - 1) + 1 for i in range(n)]


def run_to_end(world: World, seq: Sequence) -> list[int]:
    while seq.phase is not Phase.FINISHED:
        world.step()
    return world.outputs[seq.seq_id]


# ------------------------------------------------------------------------------------------------ admission


def test_request_that_could_never_fit_is_refused_with_the_numbers() -> None:
    world = World(num_blocks=4, block_size=4)
    with pytest.raises(CapacityError, match=r"10 prompt tokens and 8 .* 17 tokens.* 16 \(4 blocks of 4\)"):
        world.add(prompt(10), max_tokens=8)
    assert not world.scheduler.has_work
    world.add(prompt(10), max_tokens=7)  # the last token needs no K/V
    world.drain()
    assert world.plans[-1].slices[0].start == 15


def test_capacity_counts_no_more_than_the_context() -> None:
    world = World(num_blocks=4, block_size=4, max_model_len=17)
    world.add(prompt(10), max_tokens=1000)
    world.drain()
    assert (len(world.outputs[0]), world.reasons[0]) == (7, FinishReason.LENGTH)


def test_scoring_request_needs_room_for_the_whole_prompt() -> None:
    world = World(num_blocks=4, block_size=4)
    world.add(prompt(16), max_tokens=0)
    with pytest.raises(CapacityError):
        world.add(prompt(17), max_tokens=0)
    world.drain()


def test_prompt_must_leave_room_in_the_context_and_not_be_empty() -> None:
    world = World(max_model_len=10)
    with pytest.raises(ContextLengthError):
        world.add(prompt(10), max_tokens=1)
    with pytest.raises(InvalidRequestError):
        world.add([])
    world.add(prompt(10), max_tokens=0)
    world.add(prompt(9), max_tokens=1)
    world.drain()


def test_full_queue_refuses_but_places_below_the_running_limit_do_not_count_as_waiting() -> None:
    world = World(max_num_seqs=2, max_num_waiting=1)
    for _ in range(3):
        world.add(prompt(4))
    with pytest.raises(QueueFullError, match="max_num_waiting is 1"):
        world.add(prompt(4))
    world.step()
    assert (world.scheduler.num_running, world.scheduler.num_waiting) == (2, 1)
    with pytest.raises(QueueFullError):
        world.add(prompt(4))
    world.finish(0)
    world.add(prompt(4))
    world.drain()


# -------------------------------------------------------------------------------------------- budget, chunks


def test_decodes_go_first_then_a_quarter_to_the_oldest_prompt_then_the_shortest() -> None:
    world = World(budget=8, caching=False)
    a = world.add(prompt(20, 1))
    b = world.add(prompt(5, 2))
    plans = [world.step() for _ in range(4)]
    shares = [[(p.seq_id, p.start, len(p.token_ids), p.sample) for p in plan.slices] for plan in plans if plan]
    assert shares == [
        [(a.seq_id, 0, 3, False), (b.seq_id, 0, 5, True)],
        [(b.seq_id, 5, 1, True), (a.seq_id, 3, 7, False)],
        [(b.seq_id, 6, 1, True), (a.seq_id, 10, 7, False)],
        [(b.seq_id, 7, 1, True), (a.seq_id, 17, 3, True)],
    ]
    assert [[new.seq_id for new in plan.new] for plan in plans if plan] == [[0, 1], [], [], []]
    world.drain()


def test_no_running_sequence_is_starved_by_a_budget_smaller_than_max_num_seqs() -> None:
    world = World(budget=3, max_num_seqs=8)
    for i in range(6):
        world.add(prompt(3, i), max_tokens=5)
    world.drain()
    assert max(len(plan.slices) for plan in world.plans) == 3


def test_drafts_never_take_anothers_token_of_the_budget() -> None:
    world = World(budget=5, num_drafts=4)
    for i in range(4):
        world.add(prompt(2, i), max_tokens=30)
    world.drain()


def test_pending_tokens_counts_prompts_waiting_and_in_progress_only() -> None:
    world = World(budget=8, max_num_seqs=1)
    world.add(prompt(20))
    world.add(prompt(5))
    assert world.scheduler.pending_tokens == 25
    world.step()
    assert world.scheduler.pending_tokens == 12 + 5
    world.step(), world.step()
    assert world.scheduler.pending_tokens == 5
    world.drain()


# ---------------------------------------------------------------------------------------------- prefix cache


def test_salts_separate_tenants_and_the_cache_is_on() -> None:
    world = World(block_size=16, budget=64)
    p = prompt(48)
    cached = []
    for salt in ("a", "a", "b", "b", "a"):
        seq = world.add(p, salt=salt)
        run_to_end(world, seq)
        cached.append(seq.num_cached)
    assert cached == [0, 32, 0, 32, 32]


@pytest.mark.parametrize(("length", "cached"), [(16, 0), (32, 16), (33, 32)])
@pytest.mark.parametrize("max_tokens", [1, 8])
def test_whole_prompt_hit_still_computes_the_last_token(length: int, cached: int, max_tokens: int) -> None:
    world = World(block_size=16, budget=64)
    first = world.add(prompt(length), max_tokens=max_tokens)
    run_to_end(world, first)
    second = world.add(prompt(length), max_tokens=max_tokens)
    assert run_to_end(world, second) == world.outputs[first.seq_id]
    assert (first.num_cached, second.num_cached) == (0, cached)


def test_generated_tokens_are_shared_too() -> None:
    world = World(block_size=4)
    first = world.add(prompt(6), max_tokens=11)
    answer = run_to_end(world, first)
    second = world.add(prompt(6) + answer + [3], max_tokens=2)
    run_to_end(world, second)
    assert second.num_cached == 16  # 16 of first's 17 tokens were computed


def test_recompute_after_preemption_is_no_cache_hit() -> None:
    world = World(num_blocks=10, block_size=4, budget=32)
    a, b = world.add(prompt(8, 1), max_tokens=24), world.add(prompt(8, 2), max_tokens=24)
    world.drain()
    assert world.scheduler.num_preemptions == b.num_preemptions > 0
    assert (a.num_cached, b.num_cached) == (0, 0)
    assert world.ranks.num_tokens < 2 * 31 + 20, "its own blocks were found again, even so"


def test_hit_seen_at_a_failed_admission_is_looked_up_again() -> None:
    world = World(num_blocks=12, block_size=4, budget=64)
    run_to_end(world, world.add(prompt(16, 1), max_tokens=1))
    hog = world.add(prompt(36, 2), max_tokens=8)
    world.step()
    delayed = world.add([*prompt(16, 1), *prompt(8, 5)], max_tokens=4)
    assert world.kv.lookup(delayed).num_tokens == 12
    while hog.phase is not Phase.FINISHED:  # it grows into the blocks that were seen as a hit
        world.step()
        assert delayed.phase is Phase.WAITING
    world.drain()
    assert delayed.num_cached == 4


def test_prompt_logprobs_are_complete_after_preemption_and_take_no_prefix() -> None:
    preempted_in_prefill = 0
    for length in (15, 16, 17, 32):
        for num_blocks in range(60, 80, 4):
            world = World(num_blocks=num_blocks, block_size=1, budget=8)
            run_to_end(world, world.add(prompt(length), max_tokens=1))
            for i in range(3):
                world.add(prompt(10, i + 3), max_tokens=30)
            while world.scheduler.pending_tokens:
                world.step()
            scored = world.add(prompt(length), priority=1, prompt_logprobs=0)
            world.drain()  # compares the positions present with 1 .. length - 1
            assert scored.num_cached == 0
            pieces = [p for plan in world.plans for p in plan.slices if p.seq_id == scored.seq_id]
            preempted_in_prefill += sum(not a.sample and b.start == 0 for a, b in pairwise(pieces))
    assert preempted_in_prefill > 0


# ----------------------------------------------------------------------------------------------- preemption


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_outputs_under_pressure_equal_those_of_a_huge_pool(caching: bool, num_drafts: int) -> None:
    outputs = []
    for num_blocks in (10, 1000):
        world = World(num_blocks=num_blocks, caching=caching, num_drafts=num_drafts, budget=32)
        for i in range(6):
            world.add(prompt(14, i), max_tokens=24, seed=7, logprobs=0)
        world.drain()
        outputs.append(world.outputs)
        assert (world.scheduler.num_preemptions > 0) == (num_blocks == 10)
    assert outputs[0] == outputs[1]


def test_siblings_are_complete_under_pressure_and_leave_nothing_when_aborted() -> None:
    world = World(num_blocks=14, budget=32)
    siblings = [world.add(prompt(14), max_tokens=30, seed=i) for i in range(4)]
    world.drain()
    assert world.scheduler.num_preemptions > 0
    assert len({tuple(world.outputs[s.seq_id]) for s in siblings}) == 4

    world = World(num_blocks=500, max_model_len=2000)
    siblings = [world.add(prompt(14), max_tokens=1500, seed=i) for i in range(4)]
    for _ in range(10):
        world.step()
    for s in siblings:
        world.finish(s.seq_id)
    assert (world.scheduler.num_running, world.kv.num_used, world.scheduler.has_work) == (0, 0, False)
    world.drain()


def test_victim_already_in_the_step_leaves_it_and_returns_its_budget() -> None:
    world = World(num_blocks=6, block_size=4, budget=16)
    low = world.add(prompt(5, 1), max_tokens=12, priority=5)
    high = world.add(prompt(7, 2), max_tokens=12, priority=0)
    world.step()
    assert [s.phase for s in (low, high)] == [Phase.RUNNING, Phase.RUNNING]
    for i, priority in enumerate((3, 0, 9)):
        world.add(prompt(4, 10 + i), max_tokens=4, priority=priority)
    while low.phase is Phase.RUNNING:
        plan = world.step()
    # `low` comes first in the plan's order, and had its grant before `high` asked for the last block.
    assert plan is not None and [piece.seq_id for piece in plan.slices] == [high.seq_id]
    assert low.phase is Phase.PREEMPTED and not plan.new, "no newcomer in a step that preempts"
    world.drain()
    assert high.num_preemptions == 0


def test_nobody_is_admitted_in_a_step_that_preempts_whatever_the_queues_order(monkeypatch: pytest.MonkeyPatch) -> None:
    push, push_front = Fcfs.push, Fcfs.push_front
    monkeypatch.setattr(Fcfs, "push", push_front)
    monkeypatch.setattr(Fcfs, "push_front", push)
    world = World(num_blocks=12, block_size=4, budget=32)
    old = [world.add(prompt(9, i), max_tokens=32) for i in range(2)]
    world.step()
    while not world.scheduler.num_preemptions:
        small = world.add(prompt(4, 6), max_tokens=1)
        plan = world.step()
    assert plan is not None and not plan.new and small.phase is Phase.WAITING
    assert sorted(s.phase for s in old) == [Phase.PREEMPTED, Phase.RUNNING]
    plan = world.step()
    assert plan is not None and plan.new, "there was room"
    world.drain()


def test_preempted_one_resumes_before_those_who_waited_already() -> None:
    world = World(num_blocks=10, block_size=4, budget=32)
    first, second = (world.add(prompt(8, i), max_tokens=24) for i in range(2))
    world.step()
    waiting = world.add(prompt(20, 5), max_tokens=4)
    world.drain()
    assert second.num_preemptions == 1
    order = [piece.seq_id for plan in world.plans for piece in plan.slices]
    assert order.index(waiting.seq_id) > len(order) - 1 - order[::-1].index(first.seq_id)
    resumed = next(i for i, plan in enumerate(world.plans) if plan.slices[0].seq_id == second.seq_id)
    assert resumed <= next(i for i, plan in enumerate(world.plans) if waiting.seq_id in {p.seq_id for p in plan.slices})


@pytest.mark.parametrize(("num_preemptions", "spare"), [(0, 2), (1, 4), (2, 8)])
def test_who_was_preempted_often_waits_for_more_room(num_preemptions: int, spare: int) -> None:
    for missing in (0, 1):
        world = World(num_blocks=2 + 3 + spare - missing, block_size=4, budget=32)
        world.add(prompt(5, 1), max_tokens=2)
        world.step()
        seq = world.add(prompt(9, 2), max_tokens=1)
        seq.num_preemptions = num_preemptions
        world.schedule()
        assert (seq.phase is Phase.RUNNING) == (not missing)


def test_victim_is_the_latest_of_the_lowest_priority_and_may_be_the_asker() -> None:
    world = World(num_blocks=9, block_size=4, budget=32)
    seqs = [world.add(prompt(7, i), max_tokens=20, priority=p) for i, p in enumerate((0, 1, 1))]
    world.now += 1
    while not world.scheduler.num_preemptions:
        world.step()
    assert [s.num_preemptions for s in seqs] == [0, 0, 1]
    world.drain()
    assert seqs[0].num_preemptions == 0


def test_no_thrash_with_a_pool_for_one_and_a_half_long_requests() -> None:
    for caching in (False, True):
        world = World(num_blocks=28, block_size=16, budget=16, caching=caching)
        seqs = [world.add(prompt(200, i), max_tokens=100) for i in range(2)]
        world.drain()
        assert max(s.num_preemptions for s in seqs) <= 3
        prefill = world.ranks.num_tokens - 2 * 99
        assert prefill < 3 * 400


def test_a_crowd_does_not_thrash_either() -> None:
    world = World(num_blocks=60, block_size=16, budget=64, max_num_seqs=16)
    seqs = [world.add(prompt(30 + 20 * (i % 5), i), max_tokens=60 + 30 * (i % 7)) for i in range(24)]
    world.drain()
    assert max(s.num_preemptions for s in seqs) <= 3
    assert world.ranks.num_tokens < 1.5 * sum(len(s.tokens) for s in seqs)


def test_drafts_are_given_up_before_anyone_is_preempted() -> None:
    world = World(num_blocks=4, block_size=4, num_drafts=4, budget=32)
    world.add(prompt(3, 1), max_tokens=5), world.add(prompt(3, 2), max_tokens=5)
    world.drain()
    assert world.scheduler.num_preemptions == 0


# -------------------------------------------------------------------------------------------------- endings


def test_stop_token_is_kept_and_counted() -> None:
    world = World()
    free = world.add(prompt(5), max_tokens=40)
    answer = run_to_end(world, free)
    stop = answer[6]
    first = answer.index(stop)
    seq = world.add(prompt(5), max_tokens=40, stop_token_ids=frozenset({stop}))
    assert run_to_end(world, seq) == answer[: first + 1]
    assert seq.finish_reason is FinishReason.STOP and seq.num_output == first + 1


@pytest.mark.parametrize("min_tokens", [0, 3])
def test_eos_ends_a_sequence_only_after_min_tokens_and_not_when_ignored(min_tokens: int) -> None:
    world = World(budget=64)
    plain = world.add(prompt(5), ignore_eos=False, min_tokens=min_tokens, max_tokens=8)
    deaf = world.add(prompt(5), ignore_eos=True, max_tokens=8)
    plan = world.schedule()
    for _ in range(8):
        assert plan is not None
        slices = tuple(SliceResult((EOS,)) for _ in plan.slices)
        world.scheduler.update(plan, StepResult(plan.step_id, slices), world.now)
        plan = world.scheduler.schedule(world.now)
    assert (plain.num_output, plain.finish_reason) == (min_tokens + 1, FinishReason.STOP)
    assert (deaf.num_output, deaf.finish_reason) == (8, FinishReason.LENGTH)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 7])
def test_no_token_past_the_end_of_an_accepted_block(max_tokens: int) -> None:
    plain, drafted = World(), World(num_drafts=5)
    for world in (plain, drafted):
        for i in range(4):
            world.add(prompt(6, i), max_tokens=max_tokens, ignore_eos=False)
            world.add(prompt(6, i), max_tokens=30, stop_token_ids=frozenset({3, 5, 8}))
        world.drain()
    assert plain.outputs == drafted.outputs and plain.reasons == drafted.reasons
    assert len(drafted.plans) <= len(plain.plans)


def test_blocks_with_dropped_tokens_are_not_published() -> None:
    """Three right drafts come after the stop token; only the tokens before the end may be shared."""
    world = World(block_size=2, num_drafts=0, budget=64)
    seq = world.add(prompt(3), max_tokens=20, stop_token_ids=frozenset({9}))
    plan = world.scheduler.schedule(1.0)
    assert plan is not None
    world.scheduler.update(plan, StepResult(0, (SliceResult((1,), drafts=(9, 4, 5, 6)),)), 1.0)
    plan = world.scheduler.schedule(2.0)
    assert plan is not None and plan.slices[0].token_ids == (1, 9, 4, 5, 6) and plan.slices[0].num_drafts == 4
    world.scheduler.update(plan, StepResult(1, (SliceResult((9, 4, 5, 6, 7)),)), 2.0)
    assert seq.tokens == [*prompt(3), 1, 9] and seq.finish_reason is FinishReason.STOP
    reader = world.add([*prompt(3), 1, 9, 4, 5, 6, 7, 8])
    assert world.kv.lookup(reader).num_tokens == 4


def test_scoring_request_ends_without_a_token() -> None:
    world = World(budget=8)
    seq = world.add(prompt(20), max_tokens=0, prompt_logprobs=0)
    world.drain()
    assert (seq.num_output, seq.finish_reason, seq.first_token_s) == (0, FinishReason.LENGTH, None)
    assert not any(piece.sample for plan in world.plans for piece in plan.slices)


def test_finish_while_waiting_running_preempted_and_in_flight() -> None:
    world = World(num_blocks=8, block_size=4, budget=32, max_num_seqs=2)
    running, victim, waiting = (world.add(prompt(8, i), max_tokens=20) for i in range(3))
    world.finish(waiting.seq_id)
    while victim.phase is not Phase.PREEMPTED:
        world.step()
    world.finish(victim.seq_id, FinishReason.ERROR)
    plan = world.schedule()
    assert plan is not None and plan.finished == (victim.seq_id,), "the one never announced is not reported"
    world.finish(running.seq_id)
    assert world.kv.num_used == 0, "free at once"
    assert world.update(plan) == []
    assert world.schedule() is None and world.scheduler.finish(running.seq_id, FinishReason.ABORT) is None
    world.add(prompt(3), max_tokens=1)
    plan = world.schedule()
    assert plan is not None and plan.finished == (running.seq_id,), "kept until there was a plan to carry it"
    world.update(plan)


def test_a_failed_step_is_given_up_by_ending_its_sequences() -> None:
    world = World()
    seq = world.add(prompt(4))
    assert world.schedule() is not None
    with pytest.raises(AssertionError, match="not updated"):
        world.scheduler.schedule(9.0)
    world.finish(seq.seq_id, FinishReason.ERROR)
    assert world.scheduler.schedule(9.0) is None


def test_times_are_taken_once_whatever_the_preemptions() -> None:
    world = World(num_blocks=10, block_size=4, budget=32)
    seqs = [world.add(prompt(8, i), max_tokens=24) for i in range(3)]
    world.step()
    first = [(s.first_scheduled_s, s.first_token_s) for s in seqs[:2]]
    world.drain()
    assert world.scheduler.num_preemptions > 0 and None not in first[0]
    assert [(s.first_scheduled_s, s.first_token_s) for s in seqs[:2]] == first
    late = seqs[2]
    assert late.first_scheduled_s is not None and late.first_token_s is not None
    assert late.arrival_s < late.first_scheduled_s <= late.first_token_s


def test_oracle_reference_is_not_the_scheduler() -> None:
    world = World()
    seq = world.add(prompt(5), max_tokens=12, ignore_eos=False)
    run_to_end(world, seq)
    assert (world.outputs[0], world.reasons[0]) == oracle(seq, prompt(5), world.max_model_len)
