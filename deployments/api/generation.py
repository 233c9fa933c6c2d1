"""The generation endpoints: admit, read, prepare, run, answer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import orjson
from starlette.types import Receive, Scope, Send

from deployments.accounts.accounts import Accounts
from deployments.accounts.auth import Authenticator, authorization_of, visible
from deployments.accounts.static_keys import StaticKeys
from deployments.accounts.tenant import Tenant
from deployments.api.admission import Admission, cost
from deployments.api.backend import Backend
from deployments.api.body import ClientGoneError, content_coding, decode, read_body
from deployments.api.choices import Form, Payload
from deployments.api.errors import from_exception, internal, unknown_tier
from deployments.api.middleware import send_json, trace_of
from deployments.api.progress import Tally
from deployments.api.requests import Caller, Job, Prepare
from deployments.api.sse import DONE, EventStream, events, json_event
from deployments.config.gateway import GatewayConfig
from deployments.config.tiers import Tier, resolve
from deployments.observe.request_log import Trace
from deployments.routing.errors import ModelUnavailableError, ReplicaLostError
from deployments.routing.hints import session_of
from deployments.routing.served_model import ServedModel
from engine.types import TokenDelta

log = logging.getLogger(__name__)

_INLINE_BYTES = 2048  # reading and tokenizing this much takes less than a hop to a thread and back is worth
_INLINE_LOGPROBS = 64

T = TypeVar("T")
R = TypeVar("R")


class Gate:
    """What every endpoint with a JSON body does first."""

    def __init__(
        self, config: GatewayConfig, accounts: Accounts | None, backend: Backend, admission: Admission
    ) -> None:
        """Raises ValueError when one of the config's keys is unusable."""
        self.config = config
        self.accounts = accounts
        self.backend = backend
        self.admission = admission
        self._keys = Authenticator(StaticKeys(config.api_keys), accounts.ring if accounts else None)

    async def admit(self, scope: Scope, needs: str) -> Caller:
        """For a purpose that needs this scope of a key. Raises ApiError."""
        tenant = await self._keys.admit(authorization_of(scope), needs)
        trace = trace_of(scope)
        trace.tenant, trace.org, trace.project = tenant.id, tenant.org, tenant.project
        standing = resolve(self.config.tiers, self.config.default_tier, tenant.tier)
        if standing is None:
            raise unknown_tier(tenant.tier)
        name, tier = standing
        return Caller(self.config, self._models(tenant, tier), tenant, name, tier)

    def _models(self, tenant: Tenant, tier: Tier) -> Mapping[str, ServedModel]:
        return visible(self.backend.models(), tenant.models, tier.model_names)

    async def look(self, scope: Scope, needs: str) -> Caller:
        """As admit, for a request that does not count against limits but whose answer tells of them."""
        caller = await self.admit(scope, needs)
        await self.admission.show(caller, trace_of(scope))
        return caller

    async def read(
        self, scope: Scope, receive: Receive, caller: Caller, use: Callable[[dict[str, Any], Caller], R]
    ) -> R:
        """`use` applied to the body, off the event loop when the body is not small."""
        if self.accounts is not None:
            self.accounts.check_budget(caller.tenant)
        coding = content_coding(scope["headers"])
        limit = self.config.max_body_bytes
        raw = await read_body(receive, scope["headers"], limit, self.config.body_timeout_s)
        trace = trace_of(scope)
        trace.mark("body", time.perf_counter())

        def prepare(caller: Caller) -> R:
            fields = decode(raw, coding, limit)
            if isinstance(name := fields.get("model"), str) and name in caller.models:
                trace.model = name
            return use(fields, caller)

        heavy = len(raw) > _INLINE_BYTES or coding == "gzip"
        try:
            result = await _offload(lambda: prepare(caller), heavy)
        except ModelUnavailableError:  # it has not been up since this gateway is there: perhaps it rests
            assert trace.model is not None
            await self.backend.awaken(trace.model)
            awake = replace(caller, models=self._models(caller.tenant, caller.tier))
            result = await _offload(lambda: prepare(awake), heavy)
        trace.mark("prepare", time.perf_counter())
        return result


class GenerationEndpoint:
    """An ASGI app for one path. `prepare` makes the job, `form` words the answer."""

    def __init__(self, gate: Gate, prepare: Prepare, form: Form) -> None:
        self._gate = gate
        self._prepare = prepare
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = await self._gate.admit(scope, "inference")
        trace = trace_of(scope)
        try:
            job = await self._gate.read(scope, receive, caller, self._prepare)
        except Exception as error:
            await self._gate.admission.count_mistake(caller, error, trace)
            raise
        job = replace(job, origin=replace(job.origin, session=session_of(scope["headers"], job.origin.fields)))
        await while_connected(self._run(job, trace, send), receive)

    async def _run(self, job: Job, trace: Trace, send: Send) -> None:
        tally = Tally(job)
        trace.stream, trace.prompt_tokens = job.stream, tally.prompt_tokens
        settle = await self._gate.admission.reserve(job, trace)
        failure: BaseException | None = None
        try:
            async with _closing(self._answer(job)) as deltas:
                source = _Timed(deltas, trace)
                if job.stream:
                    failure = await self._stream(job, tally, source, trace, send)
                else:
                    await self._whole(job, tally, source, send)
        except BaseException as error:
            failure = error
            raise
        finally:
            settle(cost(tally, failure, job.stream))
            trace.cached_tokens, trace.completion_tokens = tally.cached_tokens, tally.completion_tokens
            trace.finish_reasons, trace.timings = tally.finish_reasons, tally.timings

    def _answer(self, job: Job) -> AsyncIterator[list[TokenDelta]]:
        return self._gate.backend.generate(job.model.id, job.requests, job.stream, job.origin)

    async def _whole(self, job: Job, tally: Tally, source: AsyncIterator[list[TokenDelta]], send: Send) -> None:
        choices: list[list[TokenDelta]] = [[] for _ in range(job.n * len(job.requests))]
        async for deltas in source:
            for delta in deltas:
                choices[tally.add(delta)].append(delta)
            if tally.complete:
                break
        if not tally.complete:
            raise ReplicaLostError
        usage = tally.usage()
        heavy = job.logprobs is not None and tally.completion_tokens + tally.prompt_tokens > _INLINE_LOGPROBS
        body = await _offload(lambda: orjson.dumps(self._form.whole(job, choices, usage)), heavy)
        await send_json(send, 200, body)

    async def _stream(
        self, job: Job, tally: Tally, source: AsyncIterator[list[TokenDelta]], trace: Trace, send: Send
    ) -> Exception | None:
        """The error that the stream broke off with, if the client was told of it as an event."""
        chunks = self._form.stream(job)
        payloads: list[Payload] = []  # not yet written
        config = self._gate.config
        async with EventStream(send, config.keepalive_s, config.send_timeout_s) as stream:
            try:
                async for deltas in source:
                    for delta in deltas:
                        payloads += chunks.of(tally.add(delta), delta)
                    if tally.complete:
                        break
                    if payloads:
                        await stream.write(events(payloads))
                        payloads = []
                if not tally.complete:
                    raise ReplicaLostError
            except ClientGoneError:
                raise
            except Exception as error:
                if not await stream.begun():
                    raise  # it still gets a status of its own
                await stream.end(events(payloads) + json_event(_mid_stream(error, trace)))
                return error
            if job.include_usage:
                payloads.append(chunks.usage(tally.usage()))
            await stream.end(events(payloads) + DONE)
        return None


def _mid_stream(error: Exception, trace: Trace) -> bytes:
    """The error's envelope: in a stream it is an event, after which there is no [DONE]."""
    reported = from_exception(error)
    if reported is None:
        log.error("request %s failed", trace.request_id, exc_info=error)
        reported = internal()
    trace.error = reported.code or reported.type
    return reported.body()


async def while_connected(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Run `work`; when the client leaves, cancel it and raise ClientGoneError. The body must have been read."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _offload(work: Callable[[], R], heavy: bool) -> R:
    return await asyncio.to_thread(work) if heavy else work()


class _Timed:
    """`deltas`; the first is noted in the trace. Not a generator: those want closing."""

    def __init__(self, deltas: AsyncIterator[list[TokenDelta]], trace: Trace) -> None:
        self._deltas = deltas
        self._trace: Trace | None = trace

    def __aiter__(self) -> _Timed:
        return self

    async def __anext__(self) -> list[TokenDelta]:
        deltas = await anext(self._deltas)
        if self._trace is not None:
            trace, self._trace = self._trace, None
            first_s = time.perf_counter() - _since_first_s(deltas)
            trace.mark("engine", first_s)
            trace.ttft_s = first_s - trace.started_s
            trace.timings = deltas[0].timings
        return deltas


def _since_first_s(deltas: Sequence[TokenDelta]) -> float:
    """How old the first token is by now, when the last one of `deltas` is new: not at all unless they come late, all
    together."""
    timings = [delta.timings for delta in deltas if delta.timings is not None]
    if not timings:
        return 0.0
    first_s = min(t.queue_s + t.prefill_s for t in timings)
    return max(t.queue_s + t.prefill_s + t.decode_s for t in timings) - first_s


@asynccontextmanager
async def _closing(deltas: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """Backends give generators, whose aclose() aborts what still runs."""
    try:
        yield deltas
    finally:
        close = getattr(deltas, "aclose", None)
        if close is not None:
            await close()
