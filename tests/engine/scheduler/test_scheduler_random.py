"""Random requests, aborts and preemptions against the brute-force oracle of helpers_scheduler."""

from __future__ import annotations

from random import Random

import pytest
from helpers_scheduler import VOCAB, World

from engine.errors import CapacityError, ContextLengthError, QueueFullError


def random_world(rng: Random) -> World:
    block_size = rng.choice([1, 2, 4])
    return World(
        num_blocks=rng.choice([12, 36, 48, 60, 160]) // block_size,
        block_size=block_size,
        budget=rng.choice([1, 5, 12, 32]),
        max_num_seqs=rng.choice([1, 4, 8, 8]),
        caching=rng.random() < 0.7,
        max_model_len=rng.choice([20, 60]),
        num_drafts=rng.choice([0, 0, 1, 4]),
        max_num_waiting=rng.choice([0, 10, 100]),
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
            max_tokens=max_tokens,
            min_tokens=rng.choice([0, 0, 3]),
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=frozenset({rng.randrange(VOCAB)} if rng.random() < 0.3 else ()),
            logprobs=rng.choice([None, 2]),
            prompt_logprobs=0 if rng.random() < 0.1 else None,
        )
    except (CapacityError, ContextLengthError, QueueFullError):
        world.check()


def random_trace(seed: int) -> World:
    rng = Random(seed)
    world = random_world(rng)
    stems = [[rng.randrange(VOCAB) for _ in range(rng.choice([3, 6, 20]))] for _ in range(2)]
    p_add, p_abort = rng.choice([0.2, 0.5]), rng.choice([0.0, 0.1])
    for _ in range(rng.choice([20, 60])):
        while rng.random() < p_add:
            add_random(world, rng, stems)
        plan = world.schedule()
        if plan is None:
            continue
        while world.seqs and rng.random() < p_abort:  # also of ended ones, and of those in the plan
            world.finish(rng.choice(list(world.seqs)))
        world.update(plan)
    world.drain()
    return world


@pytest.mark.parametrize("chunk", range(10))
def test_random_traces_keep_all_invariants_and_end_with_every_block_free(chunk: int) -> None:
    worlds = [random_trace(seed) for seed in range(chunk * 52, (chunk + 1) * 52)]
    assert sum(world.scheduler.num_preemptions for world in worlds) > 5, "the traces must preempt"
    assert sum(world.kv.prefix_hits for world in worlds) > 20, "the traces must share"
