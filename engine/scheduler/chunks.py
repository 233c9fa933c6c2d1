"""How prompts in progress divide a step's room."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.kv.base import KVCache
from engine.scheduler.awaited import Awaited
from engine.scheduler.cost import StepCost
from engine.scheduler.pace import Pace
from engine.scheduler.queue import WaitingQueue
from engine.scheduler.step import Step
from engine.types import Sequence

_FIRST = 4.0
"""Who waits for a first token waits longer than who waits for the next: so much more it counts when there is more than
one of them."""


def shortest_first(pending: Seq[int], room: int, favoured: int | None = None, share: int = 0) -> list[int]:
    """Tokens for each of the prompts that lack `pending` tokens. Of equals the first comes first, and before all
    the one at index `favoured` gets `share` of the room."""
    grants = [0] * len(pending)
    if favoured is not None:
        grants[favoured] = min(pending[favoured], share, room)
        room -= grants[favoured]
    for i in sorted(range(len(pending)), key=pending.__getitem__):
        if room <= 0:
            break
        more = min(pending[i] - grants[i], room)
        grants[i] += more
        room -= more
    return grants


class Chunks:
    """Decodes have had their tokens; prompts get what Pace leaves them beside those.

    More important classes come first, and do not spare the decodes of less important ones. While they keep coming, less
    important prompts take a small part of a step's time. In a class the shortest come first. Before all that a quarter
    goes to the prompt that came first (by the queue's score), so that it ends whatever keeps coming.
    """

    def __init__(self, kv: KVCache, queue: WaitingQueue, cost: StepCost, pace: Pace) -> None:
        self._kv = kv
        self._queue = queue
        self._cost = cost
        self._pace = pace
        self._awaited = Awaited()

    def room(self, cls: int, step: Step) -> int:
        """Tokens that prompts of a class and of more important ones may take together in this step."""
        room = step.rooms.get(cls)
        if room is None:
            room = step.rooms[cls] = self._room(cls, step)
        return room

    def _room(self, cls: int, step: Step) -> int:
        class_of = self._queue.class_of
        spared = sum(class_of(seq) <= cls for seq in step.decodes)
        prompts = [seq for seq in step.prompts if class_of(seq) <= cls]
        chunks = self._cost.chunks(sum(seq.num_computed for seq in prompts), len(prompts))
        if chunks is None:
            return step.budget
        room = step.budget
        if (awaited := self._awaited.tokens(cls - 1, step.now_s)) is not None:
            room = self._pace.brief(chunks, awaited, room)
        if spared:
            crowding = _FIRST * (step.num_prompts - 1) / spared
            ahead = self._queue.tokens_ahead(cls)
            wanted = sum(seq.num_pending for seq in prompts) + ahead
            lesser_s = 0.0
            if len(prompts) < len(step.prompts) or ahead < self._queue.num_tokens:
                awaited = self._awaited.tokens(cls, step.now_s)
                lesser_s = 0.0 if awaited is None else self._pace.brief_s(awaited)
            room = self._pace.room(len(step.decodes), chunks, crowding, wanted, room, lesser_s)
        if step.num_prompts > 1 and prompts:
            shortest = min(seq.num_pending for seq in prompts)
            room = self._pace.enough(len(step.decodes), chunks, shortest, room)
        return room

    def has_room(self, seq: Sequence, pending: int, step: Step) -> bool:
        """Whether a newcomer that lacks `pending` tokens would get some of them in this step."""
        cls, class_of = self._queue.class_of(seq), self._queue.class_of
        room = self.room(cls, step)
        if step.lacking < room or not step.prompts:
            return room > 0
        oldest = min(step.prompts, key=self._queue.score)
        if self._queue.score(seq) < self._queue.score(oldest):
            return room > 0  # it would be the favoured one
        ahead = [p for p in step.prompts if (class_of(p), p.num_pending) <= (cls, pending)]
        claimed = sum(p.num_pending for p in ahead)
        if oldest not in ahead:
            claimed += min(oldest.num_pending, _quarter(room))
        return claimed < room

    def divide(self, step: Step) -> None:
        """Grant each prompt its chunk. One whose blocks are still being loaded waits for the next step."""
        for seq in step.fresh:
            if not seq.num_preemptions:
                self._awaited.came(self._queue.class_of(seq), seq.num_pending, step.now_s)
        prompts = [seq for seq in step.prompts if not self._kv.loading(seq)]
        if not prompts:
            return
        class_of = self._queue.class_of
        oldest = min(prompts, key=self._queue.score)
        if step.fresh:
            step.rooms.clear()  # found before it was known who would come
        rooms = {cls: self.room(cls, step) for cls in sorted({class_of(seq) for seq in prompts})}
        share = min(oldest.num_pending, _quarter(rooms[class_of(oldest)]))
        kept, taken = share, 0
        for cls, whole in rooms.items():
            own = [seq for seq in prompts if class_of(seq) == cls]
            favoured = own.index(oldest) if oldest in own else None
            if favoured is not None:
                room, kept = max(share, min(whole - taken, step.budget)), 0
            else:
                room = min(whole - taken, step.budget - kept)
            grants = shortest_first([seq.num_pending for seq in own], room, favoured, share)
            for seq, num_tokens in zip(own, grants, strict=True):
                if num_tokens and (num_tokens := self._kv.extend(seq, num_tokens)):
                    step.grant(seq, num_tokens)
                    taken += num_tokens


def _quarter(room: int) -> int:
    return min(room, max(1, room // 4))
