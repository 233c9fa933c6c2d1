"""How many tokens of each prompt a step computes."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.config import EngineConfig
from engine.kv.base import KVCache
from engine.scheduler.arrivals import PromptArrivals
from engine.scheduler.cost import StepCost
from engine.scheduler.plan_builder import PlanBuilder
from engine.scheduler.prefill_throttle import PrefillThrottle
from engine.scheduler.queue import WaitingQueue
from engine.types import Sequence

_FIRST_TOKEN_WEIGHT = 4.0
"""Waiting for a first token counts so many times as much as waiting for the next one, when several prompts wait: with
more prompts than a quarter of the sequences that decode, a step may become longer than `max_decode_slowdown` says
(`python -m load_tests.engine_bench scheduling`, the two tiers at twice the capacity)."""


def shortest_first(pending: Seq[int], budget: int, favoured: int | None = None, share: int = 0) -> list[int]:
    """Tokens of a budget for each of the prompts that lack `pending` tokens, the shortest first.

    Of equals the first comes first. Before all others the one at index `favoured` gets `share` tokens.
    """
    grants = [0] * len(pending)
    if favoured is not None:
        grants[favoured] = min(pending[favoured], share, budget)
        budget -= grants[favoured]
    for i in sorted(range(len(pending)), key=pending.__getitem__):
        if budget <= 0:
            break
        more = min(pending[i] - grants[i], budget)
        grants[i] += more
        budget -= more
    return grants


class ChunkPlanner:
    """Decodes have had their tokens; prompts get what the throttle leaves them of the step's budget.

    More important classes come first, and do not spare the decodes of less important ones. While such prompts keep
    arriving, less important ones take a small part of a step's time. In a class the shortest come first. Before all
    that a quarter goes to the prompt that arrived first (by the queue's score), so that it ends whatever arrives.
    """

    def __init__(self, config: EngineConfig, kv: KVCache, queue: WaitingQueue, cost: StepCost) -> None:
        self._kv = kv
        self._queue = queue
        self._cost = cost
        self._throttle = PrefillThrottle(config.max_decode_slowdown, cost)
        self._arrivals = PromptArrivals()

    def observe(self, num_decodes: int, chunks: Seq[tuple[int, int]], seconds: float) -> None:
        """One step that decoded `num_decodes` sequences; `chunks`: the context before each and its tokens."""
        self._throttle.observe(num_decodes, bool(chunks), seconds)
        self._cost.observe(num_decodes, chunks, seconds)

    def budget(self, cls: int, step: PlanBuilder) -> int:
        """Tokens that prompts of a class and of more important ones may take together in this step."""
        budget = step.prefill_budgets.get(cls)
        if budget is None:
            budget = step.prefill_budgets[cls] = self._budget(cls, step)
        return budget

    def _budget(self, cls: int, step: PlanBuilder) -> int:
        class_of = self._queue.class_of
        spared = sum(class_of(seq) <= cls for seq in step.decodes)
        prompts = [seq for seq in step.prompts if class_of(seq) <= cls]
        chunks = self._cost.chunks(sum(seq.num_computed for seq in prompts), len(prompts))
        if chunks is None:
            return step.budget
        budget = step.budget
        if (usual := self._arrivals.usual_tokens(cls - 1, step.now_s)) is not None:
            budget = self._throttle.beside_more_important(chunks, usual, budget)
        if spared:
            crowding = _FIRST_TOKEN_WEIGHT * (step.num_prompts - 1) / spared
            ahead = self._queue.tokens_ahead(cls)
            wanted = sum(seq.num_pending for seq in prompts) + ahead
            less_important_s = 0.0
            if len(prompts) < len(step.prompts) or ahead < self._queue.num_tokens:
                usual = self._arrivals.usual_tokens(cls, step.now_s)
                less_important_s = 0.0 if usual is None else self._throttle.unnoticed_s(usual)
            budget = self._throttle.beside_decodes(
                len(step.decodes), chunks, crowding, wanted, budget, less_important_s
            )
        if step.num_prompts > 1 and prompts:
            shortest = min(seq.num_pending for seq in prompts)
            budget = self._throttle.one_after_another(len(step.decodes), chunks, shortest, budget)
        return budget

    def has_budget(self, seq: Sequence, pending: int, step: PlanBuilder) -> bool:
        """Whether a newcomer that lacks `pending` tokens would get some of them in this step."""
        cls, class_of = self._queue.class_of(seq), self._queue.class_of
        budget = self.budget(cls, step)
        if step.prompt_tokens < budget or not step.prompts:
            return budget > 0
        oldest = min(step.prompts, key=self._queue.score)
        if self._queue.score(seq) < self._queue.score(oldest):
            return budget > 0  # it would be the favoured one
        ahead = [p for p in step.prompts if (class_of(p), p.num_pending) <= (cls, pending)]
        claimed = sum(p.num_pending for p in ahead)
        if oldest not in ahead:
            claimed += min(oldest.num_pending, _quarter(budget))
        return claimed < budget

    def divide(self, step: PlanBuilder) -> None:
        """Grant each prompt its chunk. One whose blocks are still being loaded waits for the next step."""
        for seq in step.admitted:
            if not seq.num_preemptions:
                self._arrivals.observe(self._queue.class_of(seq), seq.num_pending, step.now_s)
        prompts = [seq for seq in step.prompts if not self._kv.loading(seq)]
        if not prompts:
            return
        class_of = self._queue.class_of
        oldest = min(prompts, key=self._queue.score)
        if step.admitted:
            step.prefill_budgets.clear()  # found before it was known who would be admitted
        budgets = {cls: self.budget(cls, step) for cls in sorted({class_of(seq) for seq in prompts})}
        share = min(oldest.num_pending, _quarter(budgets[class_of(oldest)]))
        kept, taken = share, 0
        for cls, whole in budgets.items():
            own = [seq for seq in prompts if class_of(seq) == cls]
            favoured = own.index(oldest) if oldest in own else None
            if favoured is not None:
                budget, kept = max(share, min(whole - taken, step.budget)), 0
            else:
                budget = min(whole - taken, step.budget - kept)
            grants = shortest_first([seq.num_pending for seq in own], budget, favoured, share)
            for seq, num_tokens in zip(own, grants, strict=True):
                if num_tokens and (num_tokens := self._kv.extend(seq, num_tokens)):
                    step.grant(seq, num_tokens)
                    taken += num_tokens


def _quarter(budget: int) -> int:
    return min(budget, max(1, budget // 4))
