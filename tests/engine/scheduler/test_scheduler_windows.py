"""Sequences whose models have windows: random traces against the oracle, whose memory notices any block that went too
early, and bounds on what a sequence holds."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from helpers_scheduler import VOCAB, World

from engine.config import PREEMPTION_MODES
from engine.errors import CapacityError, ContextLengthError
from engine.kv.window import KVWindow
from engine.types import FinishReason


def tokens(rng: Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


def random_world(rng: Random, mode: str) -> World:
    block_size, budget = rng.choice([1, 2, 4]), rng.choice([1, 5, 12, 32])
    return World(
        num_blocks=rng.choice([8, 16, 24, 40, 80]) // block_size + 2,
        block_size=block_size,
        budget=budget,
        max_num_seqs=rng.choice([1, 3, 8]),
        caching=rng.random() < 0.7,
        max_model_len=100,
        num_drafts=rng.choice([0, 0, 3]),
        num_host_slots=rng.choice([4, 40]) if mode == "swap" else rng.choice([0, 8, 40]),
        window=KVWindow(rng.choice([1, 2, 5, 9, 16]), rng.choice([0, 0, 1, 4, 6]), budget),
        scheduling_policy=rng.choice(["fcfs", "priority"]),
        preemption_mode=mode,
        long_prefill_tokens=rng.choice([4, 1000]),
    )


def add_random(world: World, rng: Random, stems: list[list[int]]) -> None:
    stem = rng.choice(stems)
    prompt = stem[: rng.randint(1, len(stem))] + tokens(rng, rng.choice([0, 0, 1, 5]))
    try:
        world.add(
            prompt,
            priority=rng.choice([0, 1]),
            salt=rng.choice(["", "", "tenant"]),
            max_tokens=rng.choice([0, 1, 6, 20, 40]),
            ignore_eos=rng.random() < 0.7,
            prompt_logprobs=0 if rng.random() < 0.1 else None,
        )
    except (CapacityError, ContextLengthError):
        world.check()


@pytest.mark.slow
@pytest.mark.parametrize("mode", PREEMPTION_MODES)
def test_random_traces(mode: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        rng = Random(f"windows{mode}{seed}")
        world = random_world(rng, mode)
        stems = [tokens(rng, rng.choice([6, 20, 50])) for _ in range(2)]
        p_add, p_abort = rng.choice([0.2, 0.5]), rng.choice([0.0, 0.1])
        for _ in range(rng.choice([20, 60])):
            while rng.random() < p_add:
                add_random(world, rng, stems)
            plan = world.schedule()
            if plan is None:
                continue
            while world.seqs and rng.random() < p_abort:
                world.finish(rng.choice(list(world.seqs)), FinishReason.ABORT)
            world.update(plan)
        world.drain()
        seen["preempted"] += world.scheduler.num_preemptions
        seen["swapped"] += world.scheduler.num_swaps
        seen["shared"] += sum(seq.num_cached for seq in world.seqs.values())
        seen["loaded"] += world.kv.host.num_loaded
        seen["gone"] += sum(-1 in piece.block_ids for plan in world.plans for piece in plan.slices)
    wanted = {"preempted": 5, "shared": 200, "gone": 500, "loaded": 10, "swapped": 3 if mode == "swap" else 0}
    assert all(seen[name] >= least for name, least in wanted.items()), seen


@pytest.mark.parametrize(("sinks", "caching"), [(0, True), (0, False), (6, True)])
def test_a_long_sequence_holds_no_more_than_its_window(sinks: int, caching: bool) -> None:
    window = KVWindow(size=16, sinks=sinks, ahead=8)
    world = World(num_blocks=64, budget=8, caching=caching, max_model_len=2000, window=window)
    seq = world.add(tokens(Random(0), 300), max_tokens=1000)
    prefill, decode = 0, 0
    while world.scheduler.has_work:
        world.step()
        if seq.num_output > 4:  # it has entered another block since its prompt
            decode = max(decode, world.kv.num_used)
        else:
            prefill = max(prefill, world.kv.num_used)
    assert prefill <= window.most_blocks(4) and decode <= window.least_blocks(4)
    world.drain()


def test_never_fits_goes_by_what_is_held_at_once() -> None:
    need = KVWindow(size=16, sinks=6, ahead=64).least_blocks(4)
    world = World(num_blocks=need, budget=64, max_model_len=2000, window=KVWindow(16, 6, 64))
    world.add(tokens(Random(0), 300), max_tokens=100)
    world.drain()
    small = World(num_blocks=need - 1, budget=64, max_model_len=2000, window=KVWindow(16, 6, 64))
    with pytest.raises(CapacityError):
        small.add(tokens(Random(0), 300), max_tokens=100)


def test_prompts_that_all_lack_blocks_give_way_until_one_goes_on() -> None:
    world = World(num_blocks=64, budget=16, max_model_len=200, window=KVWindow(8, 0, 16))
    extend = world.kv.extend
    # As if what the window has passed were still held by the others, so that it is of no use to anyone.
    world.kv.extend = lambda seq, count: extend(seq, count) if world.scheduler.num_running == 1 else 0  # type: ignore[method-assign]
    for i in range(3):
        world.add(tokens(Random(i), 40), max_tokens=3)
    world.drain()
    assert world.scheduler.num_preemptions >= 2
