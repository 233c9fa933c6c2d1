"""When a stream's tokens go out: few messages a second for each stream while many are open.

A message costs much the same on its way to a client whether it carries one token or ten. So all streams of a replica
share a number of messages a second: while few are open every step's tokens go out at once; with many, a stream's
tokens wait for the step nearest to its turn, all streams' at the same time. A choice's first token and its end never
wait.

Answers that are wanted whole are told of too, only less often: what a client is charged when it leaves is what its
gateway knows by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import count

from deployments.channel.merging import merged
from engine.types import GenerateRequest, TokenDelta

# 24 streams that step every 31 ms get each token at once; what more messages cost, load_tests.graph_cost measures.
MESSAGES_PER_S = 768.0  # of all streams together, but:
MAX_WAIT_S = 0.125  # no stream's turn comes later than this after its last one: text still seems to flow
WHOLE_WAIT_S = 0.5  # the same for answers that are wanted whole


class Pacer:
    """The engine's DeltaSink for all streams of one event loop, on which all methods are to be called."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._open: dict[int, PacedStream] = {}
        self._numbers = count()
        self._held: dict[PacedStream, None] = {}  # streams whose tokens wait, in the order of arrival
        self._stalled: asyncio.TimerHandle | None = None  # ends the wait when the step waited for does not come
        self._stepped_s = 0.0  # loop time of the last step
        self._turn_s = 0.0  # loop time from when on held tokens may go
        self._held_whole: dict[PacedStream, None] = {}  # the same of answers that are wanted whole
        self._whole_turn_s = 0.0  # loop time from when on those may go

    def open(
        self, requests: Sequence[GenerateRequest], on_ready: Callable[[PacedStream], None], whole: bool = False
    ) -> PacedStream:
        """Makes the stream for one call of AsyncEngine.open(), whose number is its `call`. See PacedStream."""
        stream = PacedStream(next(self._numbers), requests, on_ready, whole)
        self._open[stream.call] = stream
        return stream

    def close(self, stream: PacedStream) -> None:
        """Forgets a stream: its `on_ready` is not called any more."""
        self._open.pop(stream.call, None)
        self._held.pop(stream, None)
        self._held_whole.pop(stream, None)

    def on_step(self, arrived: Sequence[tuple[int, list[TokenDelta]]]) -> None:
        """See DeltaSink."""
        now = self.loop.time()
        half_step = (now - self._stepped_s) / 2
        self._stepped_s = now
        due = now + half_step >= self._turn_s
        for call, deltas in arrived:
            if (stream := self._open.get(call)) is None:
                continue
            if stream.put(deltas):
                stream.wake()  # before all that could have waited
            elif stream.whole:
                if not self._held_whole:
                    self._whole_turn_s = now + WHOLE_WAIT_S
                self._held_whole[stream] = None
            else:
                self._held[stream] = None
        if self._held_whole and now >= self._whole_turn_s:
            self._release_whole()
        if due:
            self._release()
        elif self._held and self._stalled is None:
            self._stalled = self.loop.call_at(self._turn_s + half_step, self._release)

    def on_error(self, call: int, error: Exception) -> None:
        """See DeltaSink."""
        if (stream := self._open.get(call)) is not None:
            stream.fail(error)

    def _release_whole(self) -> None:
        held, self._held_whole = self._held_whole, {}
        for stream in held:
            stream.wake()

    def _release(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        held, self._held = self._held, {}
        for stream in held:
            stream.wake()
        streaming = sum(not stream.whole for stream in self._open.values())
        self._turn_s = self.loop.time() + min(MAX_WAIT_S, streaming / MESSAGES_PER_S)


class PacedStream:
    """One call's deltas, kept until they are taken.

    `on_ready` is called when deltas should be taken: for the call's first deltas at once; then whenever it is the
    stream's turn, which comes seldom if it is `whole`; and at once when a choice has ended, or, if `whole`, every one.
    """

    def __init__(
        self, call: int, requests: Sequence[GenerateRequest], on_ready: Callable[[PacedStream], None], whole: bool
    ) -> None:
        self.call = call
        self.request_ids = [r.request_id for r in requests]
        self.whole = whole
        self.error: Exception | None = None  # why no more will come
        self._on_ready = on_ready
        self._unfinished = sum(r.sampling.n for r in requests)
        self._deltas: list[TokenDelta] = []
        self._begun = False

    @property
    def ended(self) -> bool:
        """Whether every choice has ended and all deltas have been taken."""
        return self._unfinished <= 0 and not self._deltas

    def put(self, deltas: list[TokenDelta]) -> bool:
        """Adds deltas. Returns whether they must not wait for the stream's turn; the caller then calls wake()."""
        self._deltas += deltas
        ended = sum(d.finish_reason is not None for d in deltas)
        self._unfinished -= ended
        begins, self._begun = not self._begun, True
        if self.whole:
            return begins or self._unfinished <= 0
        return ended > 0 or any(d.num_completion_tokens == len(d.token_ids) for d in deltas)

    def wake(self) -> None:
        """Calls `on_ready`."""
        self._on_ready(self)

    def fail(self, error: Exception) -> None:
        """Notes that no more deltas will come, and calls `on_ready`."""
        self.error = error
        self.wake()

    def take(self) -> list[TokenDelta]:
        """All deltas that have arrived since the last call, merged to one per choice. Empty when there are none."""
        taken, self._deltas = self._deltas, []
        return merged(taken) if len(taken) > 1 else taken
