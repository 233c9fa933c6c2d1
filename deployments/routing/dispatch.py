"""One request's way through the places that may serve it: in the plan's order, elsewhere after a failure, and on from
where it was when a replica is lost."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from deployments.channel.errors import ReplicaFaultError, StreamLostError
from deployments.config.failures import Failure
from deployments.observe.log import log
from deployments.routing.circuit import Circuit
from deployments.routing.continuation import Continuation
from deployments.routing.destinations import Ask, Deltas, Place
from deployments.routing.errors import RETRY_AFTER_S, ModelUnavailableError, OverloadedError, ReplicaLostError
from deployments.routing.hedge import hedged
from deployments.routing.mirror import Shadows
from deployments.routing.plan import RoutePlan
from deployments.routing.retry_budget import RetryBudget
from deployments.upstream.errors import UpstreamBusyError, UpstreamDownError, UpstreamFullError, UpstreamSlowError
from engine.errors import ContextLengthError, EngineDeadError, QueueFullError
from engine.types import TokenDelta

_LOOK_S = 0.1
_SUCCESSOR_S = 5.0  # at most, from a request's beginning: Serve is asked every half second
_LOST = (StreamLostError, EngineDeadError, ReplicaFaultError)

_Named = AsyncGenerator[tuple[str, list[TokenDelta]], None]  # with the place that they come from


@dataclass(frozen=True, slots=True)
class _Job:
    """A client's request, its plan, and what the client has of the answer. `began_s` by the dispatcher's clock."""

    ask: Ask
    plan: RoutePlan
    journey: Continuation
    began_s: float


class _BrokenOffError(Exception):
    """An answer that had begun goes on no more: see `why`."""

    def __init__(self, why: Exception) -> None:
        super().__init__(why)
        self.why = why


class Dispatcher:
    """One per gateway, on its event loop. `clock` gives seconds."""

    def __init__(self, places: Mapping[str, Place], clock: Callable[[], float]) -> None:
        self._places = places
        self._clock = clock
        self._circuits = {name: Circuit() for name in places}
        self._budget = RetryBudget()
        self._shadows = Shadows()

    async def generate(self, ask: Ask, plan: RoutePlan) -> Deltas:
        """Deltas under the ids of `ask`, as api.backend.Backend.generate() promises them."""
        now_s = self._clock()
        self._budget.request(now_s)
        if plan.limits.deadline_s is not None:
            ask = replace(ask, requests=tuple(replace(r, deadline_s=plan.limits.deadline_s) for r in ask.requests))
        for name in plan.shadows:
            self._shadows.send(self._places[name], ask)
        job = _Job(ask, plan, Continuation(ask.requests), now_s)
        losses, weights = 0, None
        while True:
            await self._somebody_up(job, weights)
            await self._successor_known(job)
            await self._somebody_awake(job)
            places = self._fit_to_go_on(job, weights)
            try:
                async with aclosing(self._anywhere(job, places)) as stream:
                    async for name, deltas in stream:
                        weights = self._places[name].weights
                        fresh, fault = job.journey.take(deltas)
                        if fresh:
                            yield fresh
                        if fault is not None:
                            raise _BrokenOffError(StreamLostError(f"the engine gave up: {fault.error}"))
                if job.journey.complete:
                    return
                raise _BrokenOffError(StreamLostError("the stream ended early"))
            except _BrokenOffError as broken:
                losses += 1
                lost = isinstance(broken.why, _LOST) and weights is not None
                if not lost or losses > plan.limits.max_resumptions:
                    raise _said_at_last(broken.why, begun=True) from None
                log.warning("a request has lost its replica and goes on elsewhere: %s", broken.why)
            except Exception as error:
                gone = not job.journey.started and failure_of(error) is Failure.ERROR
                if gone and (self._asleep(job) or self._succeeding(job)):
                    continue  # the last replica was just leaving
                raise _said_at_last(error, job.journey.started) from None

    async def _somebody_up(self, job: _Job, weights: str | None) -> None:
        """Waits, once the client has a part of the answer, while nobody can go on with it but soon somebody may."""
        limits = job.plan.limits
        give_up_s = self._clock() + limits.resume_within_s
        if limits.deadline_s is not None:
            give_up_s = min(give_up_s, job.began_s + limits.deadline_s)
        while job.journey.started and self._clock() < give_up_s:
            places = [self._places[name] for name in self._fit_to_go_on(job, weights)]
            if any(place.up for place in places) or not any(place.returning for place in places):
                return
            await asyncio.sleep(_LOOK_S)

    async def _successor_known(self, job: _Job) -> None:
        """Before the client has anything of the answer: waits for who takes over from a last replica that has just
        left."""
        while self._succeeding(job):
            await asyncio.sleep(_LOOK_S)

    def _succeeding(self, job: _Job) -> bool:
        if job.journey.started or self._clock() >= job.began_s + _SUCCESSOR_S:
            return False
        names = job.plan.candidates
        return not any(map(self._usable, names)) and any(self._places[name].succeeding for name in names)

    async def _somebody_awake(self, job: _Job) -> None:
        """Before the client has anything of the answer: wakes the first place that rests, unless one before it is up,
        and waits for it, and after it for the next, unless one behind it is. Raises as ColdStart.wait() does."""
        if job.journey.started:
            return
        places = [self._places[name] for name in job.plan.candidates]
        up = next((i for i, name in enumerate(job.plan.candidates) if self._usable(name)), None)
        resting = [cold for place in places[:up] if (cold := place.resting) is not None]
        if resting and up is not None:
            resting[0].begin()
            return
        refusal: ModelUnavailableError | None = None
        for cold in resting:
            waited_s = self._clock() - job.began_s
            deadline_s = job.plan.limits.deadline_s
            try:
                await cold.wait(waited_s, None if deadline_s is None else deadline_s - waited_s)
                return
            except ModelUnavailableError as error:
                refusal = refusal or error
        if refusal is not None:
            raise refusal

    def _asleep(self, job: _Job) -> bool:
        """Whether nobody would serve it before somebody is woken."""
        names = job.plan.candidates
        return not any(map(self._usable, names)) and any(self._places[n].resting is not None for n in names)

    def _usable(self, name: str) -> bool:
        return self._places[name].up and self._circuits[name].would_allow(self._clock())

    def _fit_to_go_on(self, job: _Job, weights: str | None) -> list[str]:
        """Once the client has a part of the answer, only the same weights give the rest of it."""
        return [
            name for name in job.plan.candidates if not job.journey.started or self._places[name].weights == weights
        ]

    async def _anywhere(self, job: _Job, places: Sequence[str]) -> _Named:
        """The answer of the first of `places` that begins one. If that fails later: _BrokenOffError; before, the next
        one is asked, as far as the plan, the deadline and the retry budget let it."""
        refusal: Exception = ModelUnavailableError(RETRY_AFTER_S)
        asked = 0
        for at, name in enumerate(places):
            now_s = self._clock()
            if not self._usable(name):
                continue
            if asked and (self._late(job, now_s) or not self._budget.take(now_s)):
                break
            asked += 1
            begun = False
            try:
                async with aclosing(self._hedged(job, name, places[at + 1 :])) as stream:
                    async for item in stream:
                        begun = True
                        yield item
                return
            except Exception as error:
                if begun:
                    raise _BrokenOffError(error) from None
                failure = failure_of(error)
                if failure is None:
                    raise
                log.info("%s does not serve a request (%s): %s", name, failure, error)
                refusal = _told(error, refusal)
                if failure not in job.plan.limits.retry_on:
                    break
        raise refusal

    def _hedged(self, job: _Job, name: str, others: Sequence[str]) -> _Named:
        """At `name`; beside it, if that takes long and hedging is on, at the next place or once more at this."""
        delay_s = job.plan.limits.hedge_after_s
        if delay_s is None or job.journey.started:
            return self._at(job, name)

        async def beside() -> _Named:
            second = next((n for n in (*others, name) if self._usable(n)), None)
            if second is None or not self._budget.take(self._clock()):
                raise ModelUnavailableError(RETRY_AFTER_S)
            async with aclosing(self._at(job, second)) as stream:
                async for item in stream:
                    yield item

        return hedged(lambda: self._at(job, name), beside, delay_s)

    async def _at(self, job: _Job, name: str) -> _Named:
        """One place's answer; its circuit is told how that went."""
        place, circuit, limits = self._places[name], self._circuits[name], job.plan.limits
        if not circuit.allow(self._clock()):
            raise ModelUnavailableError(circuit.retry_after_s(self._clock()))
        requests = job.journey.rest(self._clock() - job.began_s)
        share = math.inf if job.journey.started else job.plan.queue_share
        stream = place.attempt(replace(job.ask, requests=requests, queue_share=share))
        report: Callable[[float], None] | None = circuit.neither
        try:
            async with aclosing(stream):
                yield name, await _first(stream, limits.first_token_s)
                report = None
                circuit.success(self._clock())
                async for deltas in stream:
                    yield name, deltas
        except Exception as error:
            if failure_of(error) in place.suspect and not isinstance(error, UpstreamFullError):
                report = circuit.failure
            raise
        finally:
            if report is not None:
                report(self._clock())

    def _late(self, job: _Job, now_s: float) -> bool:
        deadline_s = job.plan.limits.deadline_s
        return deadline_s is not None and now_s - job.began_s >= deadline_s


def failure_of(error: BaseException) -> Failure | None:
    """None: not one that another place could do better."""
    match error:
        case (
            StreamLostError() | EngineDeadError() | ReplicaFaultError() | UpstreamDownError() | ModelUnavailableError()
        ):
            return Failure.ERROR
        case QueueFullError() | OverloadedError() | UpstreamBusyError() | UpstreamFullError():
            return Failure.OVERLOADED
        case ContextLengthError():
            return Failure.CONTEXT
        case TimeoutError() | UpstreamSlowError():
            return Failure.TIMEOUT
    return None


def _told(error: Exception, before: Exception) -> Exception:
    """What the client hears when nobody serves it: the last place's reason, unless an earlier one says more."""
    match error:
        case UpstreamBusyError(retry_after_s=seconds):
            return OverloadedError(seconds if seconds is not None else 1.0)
        case UpstreamFullError():
            return OverloadedError(1.0)
        case QueueFullError() | OverloadedError() | ContextLengthError() | ReplicaFaultError():
            return error
    return before


def _said_at_last(error: Exception, begun: bool) -> Exception:
    """What the client hears of an error that nothing more can be done about."""
    if begun and failure_of(error) is not None:
        log.warning("an answer cannot go on: %s", error)
        return ReplicaLostError()
    return error


async def _first(stream: Deltas, within_s: float | None) -> list[TokenDelta]:
    """Raises TimeoutError."""
    try:
        async with asyncio.timeout(within_s):
            return await anext(stream)
    except StopAsyncIteration:
        raise StreamLostError("the stream ended without a word") from None
