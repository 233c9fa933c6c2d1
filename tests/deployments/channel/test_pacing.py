"""When tokens go out, and what a message says when it carries several steps' tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from deployments.channel.pacing import MAX_WAIT_S, MESSAGES_PER_S, WHOLE_WAIT_S, PacedStream, Pacer
from engine.types import FinishReason, GenerateRequest, SamplingParams, TokenDelta


@dataclass
class Loop:
    """As much of an event loop as a pacer uses, with a clock that a test moves."""

    now: float = 100.0
    timers: list[list[Any]] = field(default_factory=list)

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[[], None]) -> Any:
        timer = [when, call]
        self.timers.append(timer)
        return type("Handle", (), {"cancel": lambda _: timer in self.timers and self.timers.remove(timer)})()

    def to(self, now: float) -> None:
        self.now = now
        for timer in [t for t in self.timers if t[0] <= now]:
            self.timers.remove(timer)
            timer[1]()


class Calls:
    """`num` calls of one choice each, all stepped together. `ready`: the streams told to be, in order."""

    def __init__(self, num: int) -> None:
        self.loop = Loop()
        self.pacer = Pacer(self.loop)  # type: ignore[arg-type]
        self.ready: list[PacedStream] = []
        self.streams = [self.open(str(i)) for i in range(num)]
        self.made = 0

    def open(self, name: str, whole: bool = False, n: int = 1) -> PacedStream:
        request = GenerateRequest(name, (1,), SamplingParams(n=n))
        return self.pacer.open([request], self.ready.append, whole)

    def step(self, last: bool = False) -> None:
        self.made += 1
        reason = FinishReason.LENGTH if last else None
        self.pacer.on_step([(s.call, [delta(s.request_ids[0], self.made, finish_reason=reason)]) for s in self.streams])

    def took(self, stream: PacedStream | None = None) -> int:
        """How many tokens its caller would get now."""
        stream = stream or self.streams[0]
        if stream not in self.ready:
            return 0
        self.ready[:] = [s for s in self.ready if s is not stream]
        return sum(len(d.token_ids) for d in stream.take())


def delta(name: str, nth: int, **fields: Any) -> TokenDelta:
    return TokenDelta(name, token_ids=(nth,), text=str(nth), num_completion_tokens=nth, **fields)


@pytest.mark.parametrize("streams", [1, 2, 8, 31])
def test_few_streams_get_every_step_at_once(streams: int) -> None:
    calls = Calls(streams)
    for _ in range(20):
        calls.step()
        assert [calls.took(s) for s in calls.streams] == [1] * streams
        calls.loop.to(calls.loop.now + 0.03)
    assert not calls.loop.timers


@pytest.mark.parametrize(("streams", "step_s", "steps"), [(64, 0.03, 3), (256, 0.03, 4), (40, 0.02, 3), (32, 0.01, 4)])
def test_many_share_a_budget_of_messages(streams: int, step_s: float, steps: int) -> None:
    calls = Calls(streams)
    counts = []
    for _ in range(60):
        calls.step()
        counts.append(calls.took())
        calls.loop.to(calls.loop.now + step_s)
    assert counts[0] == 1, "a first token does not wait"
    assert [n for n in counts[steps + 1 :] if n] == [steps] * len([n for n in counts[steps + 1 :] if n])
    assert sum(counts) >= 60 - steps


def test_first_and_last_tokens_never_wait() -> None:
    calls = Calls(200)
    calls.step()
    assert calls.took() == 1
    for _ in range(3):  # the streams' turn has just been
        calls.loop.to(calls.loop.now + 0.001)
        calls.step()
    late = calls.open("late")
    calls.pacer.on_step([(late.call, [delta("late", 1)]), (calls.streams[0].call, [delta("0", 5)])])
    assert calls.took(late) == 1
    assert calls.took() == 0
    calls.step(last=True)
    assert not calls.streams[0].ended
    assert calls.took() == 5
    assert calls.streams[0].ended


def test_a_step_that_does_not_come_ends_the_wait() -> None:
    calls = Calls(200)
    for _ in range(3):
        calls.step()
        calls.took()
        calls.loop.to(calls.loop.now + 0.03)
    assert calls.took() == 0
    calls.loop.to(calls.loop.now + MAX_WAIT_S + 0.03)
    assert calls.took() == 2
    assert not calls.loop.timers


def test_the_budget_follows_the_number_of_streams() -> None:
    calls = Calls(200)
    for stream in calls.streams[2:]:
        calls.pacer.close(stream)
    calls.step()
    calls.loop.to(calls.loop.now + 2 / MESSAGES_PER_S)
    calls.step()
    assert calls.took() == 2


def test_an_error_comes_after_what_was_made() -> None:
    calls = Calls(200)
    calls.step()
    calls.took()
    calls.loop.to(calls.loop.now + 0.001)
    calls.step()
    error = RuntimeError("boom")
    calls.streams[0].fail(error)
    assert calls.took() == 1
    assert calls.streams[0].error is error and calls.streams[0].take() == []


def test_a_call_with_many_choices_ends_once() -> None:
    calls = Calls(0)
    stream = calls.open("r", n=2)
    end = TokenDelta("r", 0, (1,), "x", finish_reason=FinishReason.STOP, num_completion_tokens=1)
    calls.pacer.on_step([(stream.call, [end])])
    assert stream.take() == [end]
    assert not stream.ended
    calls.pacer.on_step([(stream.call, [replace(end, index=1)])])
    assert stream.take() == [replace(end, index=1)]
    assert stream.ended
    calls.pacer.close(stream)


def test_of_what_is_wanted_whole_most_comes_late_and_none_very_late() -> None:
    """What a client is charged when it leaves is what has been told by then."""
    calls = Calls(2)
    stream = calls.open("whole", whole=True, n=2)
    for nth in range(1, 4):
        calls.step()
        calls.pacer.on_step([(stream.call, [delta("whole", nth)])])
        assert (stream in calls.ready) == (nth == 1)
        if nth == 1:
            assert calls.took(stream) == 1
        calls.loop.to(calls.loop.now + WHOLE_WAIT_S * 0.4)
    end = delta("whole", 4, finish_reason=FinishReason.LENGTH)
    calls.pacer.on_step([(stream.call, [end])])
    assert stream not in calls.ready
    calls.pacer.on_step([(stream.call, [replace(end, index=1)])])
    assert calls.ready.count(stream) == 1
    assert [(d.index, d.token_ids) for d in stream.take()] == [(0, (2, 3, 4)), (1, (4,))]
    assert stream.ended


def test_what_is_wanted_whole_is_told_of_twice_a_second() -> None:
    calls = Calls(2)
    stream = calls.open("whole", whole=True)
    told = []
    for nth in range(1, 201):
        calls.step()
        calls.pacer.on_step([(stream.call, [delta("whole", nth)])])
        if calls.took(stream):
            told.append(nth)
        calls.loop.to(calls.loop.now + 0.01)
    assert told[0] == 1 and len(told) == 4 and told[1] - told[0] == 51


def test_first_tokens_go_before_all_others() -> None:
    calls = Calls(3)
    calls.step()
    calls.loop.to(calls.loop.now + 1.0)
    calls.ready.clear()
    late = calls.open("late")
    arrived = [(stream.call, [delta(stream.request_ids[0], 2)]) for stream in calls.streams]
    calls.pacer.on_step([*arrived, (late.call, [delta("late", 1)])])
    assert calls.ready == [late, *calls.streams]


def test_a_closed_stream_is_not_woken() -> None:
    calls = Calls(200)
    calls.step()
    calls.loop.to(calls.loop.now + 0.001)
    calls.step()
    calls.ready.clear()
    calls.pacer.close(calls.streams[0])
    calls.loop.to(calls.loop.now + 1.0)
    assert calls.streams[0] not in calls.ready and calls.streams[1] in calls.ready
