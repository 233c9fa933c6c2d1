"""The generation endpoints: admit, read, prepare, run, answer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import orjson
from starlette.types import Receive, Scope, Send

from deployments.gateway.answer import Form, Payload
from deployments.gateway.auth import ApiKeys
from deployments.gateway.backend import Backend
from deployments.gateway.body import ClientGoneError, content_coding, decode, read_body
from deployments.gateway.config import GatewayConfig
from deployments.gateway.edge import send_json, trace_of
from deployments.gateway.errors import ReplicaLostError, from_exception, internal
from deployments.gateway.request_log import Trace
from deployments.gateway.requests import Caller, Job, Prepare
from deployments.gateway.sse import DONE, EventStream, events, json_event
from deployments.gateway.tally import Tally
from engine.types import TokenDelta

log = logging.getLogger(__name__)

_INLINE_BYTES = 2048  # reading and tokenizing this much takes less than a hop to a thread and back is worth
_INLINE_LOGPROBS = 64

T = TypeVar("T")
R = TypeVar("R")


class Gate:
    """What every endpoint with a JSON body does first."""

    def __init__(self, config: GatewayConfig, keys: ApiKeys, backend: Backend) -> None:
        self.config = config
        self.keys = keys
        self.backend = backend

    def admit(self, scope: Scope) -> Caller:
        """Raises ApiError 401."""
        tenant = self.keys.admit([value for name, value in scope["headers"] if name == b"authorization"])
        trace_of(scope).tenant = tenant.id
        return Caller(self.config, self.backend.models(), tenant)

    async def read(self, scope: Scope, receive: Receive, use: Callable[[dict[str, Any], Caller], R]) -> R:
        """`use` applied to the body, off the event loop when the body is not small."""
        caller = self.admit(scope)
        coding = content_coding(scope["headers"])
        limit = self.config.max_body_bytes
        raw = await read_body(receive, scope["headers"], limit, self.config.body_timeout_s)
        trace = trace_of(scope)
        trace.mark("body", time.perf_counter())

        def prepare() -> R:
            fields = decode(raw, coding, limit)
            if isinstance(name := fields.get("model"), str) and name in caller.models:
                trace.model = name
            return use(fields, caller)

        result = await _offload(prepare, len(raw) > _INLINE_BYTES or coding == "gzip")
        trace.mark("prepare", time.perf_counter())
        return result


class GenerationEndpoint:
    """An ASGI app for one path. `prepare` makes the job, `form` words the answer."""

    def __init__(self, gate: Gate, prepare: Prepare, form: Form) -> None:
        self._gate = gate
        self._prepare = prepare
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        job = await self._gate.read(scope, receive, self._prepare)
        await while_connected(self._run(job, trace_of(scope), send), receive)

    async def _run(self, job: Job, trace: Trace, send: Send) -> None:
        tally = Tally(job)
        trace.stream, trace.prompt_tokens = job.stream, tally.prompt_tokens
        try:
            async with _closing(self._gate.backend.generate(job.model.id, job.requests)) as deltas:
                first = await anext(deltas, None)  # until here an error still gets a status of its own
                if first is None:
                    raise ReplicaLostError
                now_s = time.perf_counter()
                trace.mark("engine", now_s)
                trace.ttft_s = now_s - trace.started_s
                trace.timings = first[0].timings
                source = _Rest(first, deltas)
                if job.stream:
                    await self._stream(job, tally, source, trace, send)
                else:
                    await self._whole(job, tally, source, send)
        finally:
            trace.cached_tokens, trace.completion_tokens = tally.cached_tokens, tally.completion_tokens
            trace.finish_reasons, trace.timings = tally.finish_reasons, tally.timings

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
    ) -> None:
        chunks = self._form.stream(job)
        payloads: list[Payload] = []  # not yet written
        async with EventStream(send, self._gate.config.keepalive_s) as stream:
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
            except Exception as error:
                await stream.end(events(payloads) + json_event(_mid_stream(error, trace)))
                return
            if job.include_usage:
                payloads.append(chunks.usage(tally.usage()))
            await stream.end(events(payloads) + DONE)


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


class _Rest:
    """`first`, then what is left. Not a generator: those want closing."""

    def __init__(self, first: list[TokenDelta], deltas: AsyncIterator[list[TokenDelta]]) -> None:
        self._first: list[TokenDelta] | None = first
        self._deltas = deltas

    def __aiter__(self) -> _Rest:
        return self

    async def __anext__(self) -> list[TokenDelta]:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        return await anext(self._deltas)


@asynccontextmanager
async def _closing(deltas: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """Backends give generators, whose aclose() aborts what still runs."""
    try:
        yield deltas
    finally:
        close = getattr(deltas, "aclose", None)
        if close is not None:
            await close()
