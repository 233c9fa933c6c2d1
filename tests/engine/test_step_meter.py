"""What steps took, told apart by whether prompts were in them."""

from __future__ import annotations

from engine.stats import StepMeter
from engine.types import SeqSlice, StepPlan


def plan(*lengths: int, drafts: int = 0) -> StepPlan:
    slices = (SeqSlice(i, (0,) * n, 0, (), sample=True, num_drafts=drafts) for i, n in enumerate(lengths))
    return StepPlan(0, tuple(slices))


def test_only_steps_without_prompts_show_the_shortest() -> None:
    meter = StepMeter()
    meter.add(plan(64, 1), 0.001, 0)
    assert meter.shortest_step_s is None
    for took_s in (0.03, 0.02, 0.05):
        meter.add(plan(1, 1), took_s, 0)
    assert meter.shortest_step_s == 0.02
    assert meter.num_steps == 4 and abs(meter.step_s - 0.101) < 1e-9


def test_prompt_tokens_and_those_who_wait() -> None:
    meter = StepMeter()
    meter.add(plan(64, 1, 16), 0.1, 0)
    meter.add(plan(1, 1), 0.2, 3)  # decodes alone while prompts wait
    meter.add(plan(1, 1), 0.4, 0)
    meter.add(plan(4, 4, drafts=3), 0.8, 0)  # drafts are no prompt
    assert (meter.num_prompt_steps, meter.prompt_step_tokens) == (2, 80)
    assert abs(meter.prompt_step_s - 0.3) < 1e-9


def test_a_plan_of_copies_is_no_step() -> None:
    meter = StepMeter()
    meter.add(plan(), 0.1, 0)
    assert meter.num_steps == 0
