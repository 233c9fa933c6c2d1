"""Takes one request through the destinations that may serve it.

They are asked in the plan's order. After a failure the next one is asked, and when a replica is lost, another one goes
on with the answer.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from deployments.channel.errors import StreamLostError
from deployments.config.failures import Failure
from deployments.observe.log import log
from deployments.routing.circuit import Circuit, State
from deployments.routing.continuation import Continuation
from deployments.routing.destinations import DeltaStream, Destination, RoutedRequest
from deployments.routing.errors import RETRY_AFTER_S, ModelUnavailableError, UnusableOutputError
from deployments.routing.failures import RESUMABLE, failure_of, final_error, refusal_after
from deployments.routing.hedge import hedged
from deployments.routing.mirror import Mirror
from deployments.routing.plan import RoutePlan
from deployments.routing.retry_budget import RetryBudget
from engine.types import FinishReason, TokenDelta

_POLL_S = 0.1  # seconds between two looks at whether a destination is up again
_MAX_SUCCESSOR_WAIT_S = 5.0  # from a request's arrival; pools ask Serve twice a second which replicas there are


@dataclass(frozen=True, slots=True)
class _Job:
    """A client's request, its plan, what the client has of the answer, and when it came by the dispatcher's clock."""

    request: RoutedRequest
    plan: RoutePlan
    continuation: Continuation
    began_s: float


@dataclass(frozen=True, slots=True)
class _Begun:
    """An answer that has begun, and the name of its destination."""

    name: str
    stream: DeltaStream

    def close(self) -> None:
        self.stream.close()


class Dispatcher:
    """Serves all requests of one gateway, on its event loop. `clock` gives seconds."""

    def __init__(self, destinations: Mapping[str, Destination], clock: Callable[[], float]) -> None:
        self._destinations = destinations
        self._clock = clock
        self._circuits = {name: Circuit() for name in destinations}
        self._budget = RetryBudget()
        self._mirror = Mirror()

    async def generate(self, request: RoutedRequest, plan: RoutePlan) -> AsyncGenerator[list[TokenDelta], None]:
        """Yields deltas under the ids of `request`, see api.backend.Backend.generate()."""
        now_s = self._clock()
        self._budget.request(now_s)
        if (deadline_s := plan.limits.deadline_s) is not None:
            request = replace(request, requests=tuple(replace(r, deadline_s=deadline_s) for r in request.requests))
        for name in plan.shadows:
            self._mirror.send(self._destinations[name], request)
        job = _Job(request, plan, Continuation(request.requests), now_s)
        num_losses, weights = 0, None
        while True:
            begun = await self._begin(job, weights)
            weights = begun.stream.weights
            num_tokens = 0
            error: Exception
            try:
                async for deltas in begun.stream:
                    fresh, fault = job.continuation.take(deltas)
                    if fresh:
                        num_tokens += sum(len(delta.token_ids) for delta in fresh)
                        yield fresh
                    if fault is not None and fault.finish_reason is FinishReason.FAULT:
                        raise UnusableOutputError(fault.error)
                    if fault is not None:
                        raise StreamLostError(f"the engine gave up: {fault.error}")
                if job.continuation.complete:
                    return
                raise StreamLostError("the stream ended early")
            except Exception as failed:
                error = failed
            finally:
                begun.close()
            if self._destinations[begun.name].suspects(error):
                self._circuits[begun.name].failure(self._clock())
            request.losses.add(error, num_tokens)
            num_losses += 1
            resumable = isinstance(error, RESUMABLE) and weights is not None
            if not resumable or num_losses > plan.limits.max_resumptions:
                raise final_error(error, started=True) from None
            log.warning("a request has lost its replica and goes on elsewhere: %s", error)

    def circuit_state(self, name: str) -> State:
        """The current state of a destination's circuit. Raises KeyError for an unknown name."""
        return self._circuits[name].state(self._clock())

    async def close(self) -> None:
        """Gives up the copies of requests that are under way."""
        await self._mirror.close()

    # ----------------------------------------------------------------------------------------- until an answer begins

    async def _begin(self, job: _Job, weights: str | None) -> _Begun:
        """Begins the answer, or the rest of it, at the first destination that does, and waits for those about to be up.

        `weights`: those that made the part of the answer that the client has; they do not matter before there is one.
        """
        while True:
            await self._wait_for_recovery(job, weights)
            await self._wait_for_successor(job)
            await self._wake(job)
            try:
                return await self._begin_at_any(job, self._candidates(job, weights), weights)
            except Exception as error:
                lost = not job.continuation.started and failure_of(error) is Failure.ERROR
                if lost and (self._asleep(job) or self._successor_expected(job)):
                    continue  # the last replica was just leaving
                raise final_error(error, job.continuation.started) from None

    async def _begin_at_any(self, job: _Job, names: Sequence[str], weights: str | None) -> _Begun:
        """Asks one destination after the other, while the plan, the deadline and the retry budget allow it."""
        refusal: Exception = ModelUnavailableError(RETRY_AFTER_S)
        num_asked = 0
        for at, name in enumerate(names):
            now_s = self._clock()
            if not self._usable(name):
                continue
            if num_asked and (self._late(job, now_s) or not self._budget.take(now_s)):
                break
            num_asked += 1
            try:
                return await self._begin_hedged(job, name, names[at + 1 :], weights)
            except Exception as error:
                failure = failure_of(error)
                if failure is None:
                    raise
                log.info("%s does not serve a request (%s): %s", name, failure, error)
                refusal = refusal_after(error, refusal)
                if failure not in job.plan.limits.retry_on:
                    break
        raise refusal

    async def _begin_hedged(self, job: _Job, name: str, others: Sequence[str], weights: str | None) -> _Begun:
        """Begins at `name`; when that takes long and hedging is on, also at the next destination or again at `name`."""
        delay_s = job.plan.limits.hedge_after_s
        if delay_s is None or job.continuation.started:
            return await self._begin_at(job, name, weights)

        async def second() -> _Begun:
            other = next((n for n in (*others, name) if self._usable(n)), None)
            if other is None or not self._budget.take(self._clock()):
                raise ModelUnavailableError(RETRY_AFTER_S)
            return await self._begin_at(job, other, weights)

        return await hedged(lambda: self._begin_at(job, name, weights), second, delay_s)

    async def _begin_at(self, job: _Job, name: str, weights: str | None) -> _Begun:
        """Begins at one destination, and reports the outcome to its circuit."""
        destination, circuit = self._destinations[name], self._circuits[name]
        if not circuit.allow(self._clock()):
            raise ModelUnavailableError(circuit.retry_after_s(self._clock()))
        request = replace(
            job.request,
            requests=job.continuation.rest(self._clock() - job.began_s),
            queue_share=math.inf if job.continuation.started else job.plan.queue_share,
            first_token_s=job.plan.limits.first_token_s,
            weights=weights if job.continuation.started else None,
        )
        report = circuit.neither
        try:
            stream = await destination.begin(request)
            report = circuit.success
        except Exception as error:
            if destination.suspects(error):
                report = circuit.failure
            raise
        finally:
            report(self._clock())
        return _Begun(name, stream)

    # ------------------------------------------------------------------------------------------------ who may be asked

    def _candidates(self, job: _Job, weights: str | None) -> list[str]:
        """The plan's destinations; once the client has a part of the answer, only those that may have its weights."""
        names = job.plan.candidates
        if not job.continuation.started:
            return list(names)
        return [name for name in names if weights is not None and self._destinations[name].may_have(weights)]

    def _usable(self, name: str) -> bool:
        return self._destinations[name].up and self._circuits[name].would_allow(self._clock())

    def _late(self, job: _Job, now_s: float) -> bool:
        deadline_s = job.plan.limits.deadline_s
        return deadline_s is not None and now_s - job.began_s >= deadline_s

    def _asleep(self, job: _Job) -> bool:
        """Whether no destination is usable, and one of them could start a replica."""
        names = job.plan.candidates
        return not any(map(self._usable, names)) and any(self._destinations[n].cold_start is not None for n in names)

    def _successor_expected(self, job: _Job) -> bool:
        if job.continuation.started or self._clock() >= job.began_s + _MAX_SUCCESSOR_WAIT_S:
            return False
        names = job.plan.candidates
        return not any(map(self._usable, names)) and any(self._destinations[n].successor_expected for n in names)

    # --------------------------------------------------------------------------------------------------------- waiting

    async def _wait_for_recovery(self, job: _Job, weights: str | None) -> None:
        """Once the client has a part of the answer: waits while no destination can go on with it but one soon may."""
        limits = job.plan.limits
        give_up_s = self._clock() + limits.resume_within_s
        if limits.deadline_s is not None:
            give_up_s = min(give_up_s, job.began_s + limits.deadline_s)
        while job.continuation.started and weights is not None and self._clock() < give_up_s:
            candidates = [self._destinations[name] for name in self._candidates(job, weights)]
            if any(d.up_with(weights) for d in candidates) or not any(d.may_recover for d in candidates):
                return
            await asyncio.sleep(_POLL_S)

    async def _wait_for_successor(self, job: _Job) -> None:
        """Before the answer has begun: waits while a new replica may be running that is not known here yet."""
        while self._successor_expected(job):
            await asyncio.sleep(_POLL_S)

    async def _wake(self, job: _Job) -> None:
        """Before the answer has begun: starts the first sleeping pool of the plan that no usable destination precedes.

        When no destination is usable, also waits for that pool, and if it does not come up, for the next sleeping one.
        Raises what ColdStart.wait() raises.
        """
        if job.continuation.started:
            return
        destinations = [self._destinations[name] for name in job.plan.candidates]
        up = next((i for i, name in enumerate(job.plan.candidates) if self._usable(name)), None)
        asleep = [cold for destination in destinations[:up] if (cold := destination.cold_start) is not None]
        if asleep and up is not None:
            asleep[0].begin()
            return
        refusal: ModelUnavailableError | None = None
        for cold in asleep:
            waited_s = self._clock() - job.began_s
            deadline_s = job.plan.limits.deadline_s
            try:
                await cold.wait(waited_s, None if deadline_s is None else deadline_s - waited_s)
                return
            except ModelUnavailableError as error:
                refusal = refusal or error
        if refusal is not None:
            raise refusal
