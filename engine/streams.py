"""From the step thread to event loops: one stream per call, one outlet per loop.

A message costs much the same on its way to a client whether it carries one token or ten. So an outlet gives its streams
a number of messages a second to share: while few are open every step's tokens go out at once; with many, a stream's
tokens wait for the step nearest to its turn, all streams' at the same time. A choice's first token and its end never
wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Seq

from engine.types import FinishReason, GenerateRequest, TokenDelta

MESSAGES_PER_S = 768.0  # of all streams of one loop together, but:
MAX_WAIT_S = 0.125  # no stream's turn comes later than this after its last one


class Outlet:
    """The streams of one event loop. Everything but its making runs on that loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._open: set[Stream] = set()
        self._held: dict[Stream, None] = {}  # in the order of arrival
        self._stalled: asyncio.TimerHandle | None = None  # ends the wait when the step waited for does not come
        self._stepped_s = 0.0  # loop time of the last step
        self._turn_s = 0.0  # from when on held tokens may go

    @property
    def idle(self) -> bool:
        return not self._open

    def open(self, requests: Seq[GenerateRequest], on_ready: Callable[[Stream], None], whole: bool = False) -> Stream:
        stream = Stream(self, requests, on_ready, whole)
        self._open.add(stream)
        return stream

    def close(self, stream: Stream) -> None:
        self._open.discard(stream)
        self._held.pop(stream, None)

    def deliver(self, arrived: Seq[tuple[Stream, list[TokenDelta]]]) -> None:
        """What one step gave. A stream appears once."""
        now = self.loop.time()
        half_step = (now - self._stepped_s) / 2
        self._stepped_s = now
        due = now + half_step >= self._turn_s
        for stream, deltas in arrived:
            if stream.put(deltas):
                stream.wake()  # before all that could have waited
            elif not stream.whole:
                self._held[stream] = None
        if due:
            self._release()
        elif self._held and self._stalled is None:
            self._stalled = self.loop.call_at(self._turn_s + half_step, self._release)

    def _release(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        held, self._held = self._held, {}
        for stream in held:
            stream.wake()
        streaming = sum(not stream.whole for stream in self._open)
        self._turn_s = self.loop.time() + min(MAX_WAIT_S, streaming / MESSAGES_PER_S)


class Stream:
    """One call's deltas, kept until they are taken. `on_ready` is called, on the outlet's loop, whenever there is
    something to take() that should not wait: its first deltas, and once all is complete if `whole`, else by the
    outlet's pace."""

    def __init__(
        self, outlet: Outlet, requests: Seq[GenerateRequest], on_ready: Callable[[Stream], None], whole: bool
    ) -> None:
        self.outlet = outlet
        self.request_ids = [r.request_id for r in requests]
        self.whole = whole
        self.error: BaseException | None = None  # why no more will come
        self._on_ready = on_ready
        self._unfinished = sum(r.sampling.n for r in requests)
        self._deltas: list[TokenDelta] = []
        self._begun = False

    @property
    def ended(self) -> bool:
        """Every choice has ended and all has been taken."""
        return self._unfinished <= 0 and not self._deltas

    def put(self, deltas: list[TokenDelta]) -> bool:
        """True: these must not wait. Without a wake() they do."""
        self._deltas += deltas
        ended = sum(d.finish_reason is not None for d in deltas)
        self._unfinished -= ended
        begins, self._begun = not self._begun, True
        if self.whole:
            return begins or self._unfinished <= 0
        return ended > 0 or any(d.num_completion_tokens == len(d.token_ids) for d in deltas)

    def wake(self) -> None:
        self._on_ready(self)

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.wake()

    def take(self) -> list[TokenDelta]:
        """Everything that has arrived since the last time, one delta per choice: coalesced as far as the outlet waits
        or the taker is slow. Empty when there is nothing, which after a fail() is for good."""
        taken, self._deltas = self._deltas, []
        return merged(taken) if len(taken) > 1 else taken


def merged(deltas: Seq[TokenDelta]) -> list[TokenDelta]:
    """One delta per choice that says what its deltas said one after another. A fault stays apart from the text before
    it, so that the text can be used."""
    choices: dict[tuple[str, int, bool], list[TokenDelta]] = {}
    for delta in deltas:
        fault = delta.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)
        choices.setdefault((delta.request_id, delta.index, fault), []).append(delta)
    return [_joined(parts) if len(parts) > 1 else parts[0] for parts in choices.values()]


def _joined(parts: Seq[TokenDelta]) -> TokenDelta:
    first, last = parts[0], parts[-1]
    return TokenDelta(
        request_id=last.request_id,
        index=last.index,
        token_ids=tuple([t for part in parts for t in part.token_ids]),
        text="".join([part.text for part in parts]),
        logprobs=tuple([entry for part in parts for entry in part.logprobs]),
        prompt_logprobs=first.prompt_logprobs,
        finish_reason=last.finish_reason,
        error=last.error,
        num_prompt_tokens=last.num_prompt_tokens,
        num_cached_tokens=last.num_cached_tokens,
        num_completion_tokens=last.num_completion_tokens,
        timings=last.timings or first.timings,
    )
