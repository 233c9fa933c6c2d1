"""Random requests, aborts, priorities, preemptions, swaps, spills and drafts against the brute-force oracle of
helpers_scheduler; every invariant is checked after every operation."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from helpers_scheduler import VOCAB, World

from engine.config import PREEMPTION_MODES
from engine.errors import CapacityError, ContextLengthError, DeadlineError, QueueFullError
from engine.scheduler.queue import QUEUES
from engine.types import FinishReason, StepPlan

POLICIES = [(policy, fair) for policy in QUEUES.names() for fair in (False, True)]


def seconds(plan: StepPlan) -> float:
    """A machine whose steps cost as real ones do, in proportion."""
    return 0.01 + sum(0.001 if len(piece.token_ids) == 1 else 0.004 * len(piece.token_ids) for piece in plan.slices)


def random_world(rng: Random, policy: str = "fcfs", fair: bool = False, mode: str = "auto") -> World:
    block_size = rng.choice([1, 2, 4])
    return World(
        num_blocks=rng.choice([2, 12, 36, 48, 60, 60, 80, 160]) // block_size + 1,
        block_size=block_size,
        budget=rng.choice([1, 5, 12, 32, 64]),
        max_num_seqs=rng.choice([1, 2, 4, 8, 8]),
        caching=rng.random() < 0.7,
        max_model_len=rng.choice([20, 60]),
        num_drafts=rng.choice([0, 0, 1, 4]),
        num_host_slots=rng.choice([1, 4, 40]) if mode == "swap" else rng.choice([0, 2, 8, 40]),
        step_s=rng.choice([None, seconds]),
        max_num_waiting=rng.choice([0, 10, 100]),
        max_waiting_tokens=rng.choice([100, 10_000]),
        scheduling_policy=policy,
        fair_sharing=fair,
        preemption_mode=mode,
        priority_ageing_s=rng.choice([0.5, 20.0]),
        long_prefill_tokens=rng.choice([4, 16, 1000]),
        max_long_prefills=rng.choice([1, 2]),
        max_decode_slowdown=rng.choice([1.0, 2.5]),
        num_disk_slots=rng.choice([0, 2, 6, 40]),
    )


def add_random(world: World, rng: Random, stems: list[list[int]]) -> None:
    stem = rng.choice(stems)
    prompt = stem[: rng.randint(1, len(stem))] + [rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 1, 5]))]
    max_tokens = rng.choice([0, 1, 6, 20, 30, 40])
    try:
        world.add(
            prompt,
            priority=rng.choice([0, 0, 1, 2]),
            salt=rng.choice(["", "", "tenant"]),
            seed=rng.randrange(3),
            tenant=rng.choice(["a", "a", "b", "c"]),
            deadline_s=rng.choice([None, None, None, 5.0]),
            max_tokens=max_tokens,
            min_tokens=rng.choice([0, 0, 3]),
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=frozenset({rng.randrange(VOCAB)} if rng.random() < 0.3 else ()),
            logprobs=rng.choice([None, 2]),
            prompt_logprobs=0 if rng.random() < 0.1 else None,
        )
    except (CapacityError, ContextLengthError, DeadlineError, QueueFullError):
        world.check()


def random_trace(rng: Random, world: World, num_steps: int) -> None:
    stems = [[rng.randrange(VOCAB) for _ in range(rng.choice([3, 6, 20]))] for _ in range(2)]
    p_add, p_abort = rng.choice([0.2, 0.5]), rng.choice([0.0, 0.1])
    for _ in range(num_steps):
        while rng.random() < p_add:
            add_random(world, rng, stems)
        if rng.random() < 0.1:
            digests = world.kv.digests(rng.choice(stems), rng.choice(["", "tenant"]))
            rng.choice([world.kv.pin, world.kv.unpin])(digests)
        for seq in world.scheduler.missed(world.now):
            world.finish(seq.seq_id, FinishReason.ABORT)
        plan = world.schedule()
        if plan is None:
            continue
        while world.seqs and rng.random() < p_abort:  # also of ended ones, and of those in the plan
            world.finish(rng.choice(list(world.seqs)))
        world.update(plan)
    world.drain()


@pytest.mark.slow
@pytest.mark.parametrize("mode", PREEMPTION_MODES)
@pytest.mark.parametrize(("policy", "fair"), POLICIES)
def test_random_traces_keep_all_invariants_and_end_with_every_block_free(policy: str, fair: bool, mode: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        rng = Random(f"{policy}{fair}{mode}{seed}")
        world = random_world(rng, policy, fair, mode)
        random_trace(rng, world, rng.choice([20, 60]))
        seen["operations"] += 2 * len(world.plans) + 2 * len(world.seqs)
        seen["preempted"] += world.scheduler.num_preemptions
        seen["swapped"] += world.scheduler.num_swaps
        seen["shared"] += sum(seq.num_cached for seq in world.seqs.values())
        seen["spilled"] += world.kv.host.num_spilled
        seen["loaded"] += world.kv.host.num_loaded
        seen["to disk"] += world.kv.host.num_to_disk
        seen["from disk"] += world.kv.host.num_from_disk
    wanted = {"operations": 5000, "preempted": 10, "shared": 100, "spilled": 50, "loaded": 3, "to disk": 50}
    wanted["from disk"] = 1
    wanted["swapped"] = 3 if mode == "swap" else 0
    assert all(seen[name] >= least for name, least in wanted.items()), seen
