"""The generation endpoints: authenticate, read, reserve, run, answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from deployments.api.body import ClientGoneError
from deployments.api.middleware import reported, send_json, trace_of
from deployments.api.progress import GenerationProgress
from deployments.api.rate_limiter import cost
from deployments.api.requests import Prepare, PreparedRequest
from deployments.api.responses import BodyBuilder, ChunkBuilder, Payload
from deployments.api.services import Services, offload
from deployments.api.sse import DONE, EventStream, events, json_event
from deployments.observe.request_log import RequestTrace
from deployments.routing.errors import ReplicaLostError
from deployments.routing.hints import session_of
from engine.types import TokenDelta

_INLINE_LOGPROBS = 64  # tokens whose logprobs are written in less time than a hop to a thread and back takes

Deltas = AsyncIterator[list[TokenDelta]]


class GenerationEndpoint:
    """An ASGI app for one path. `prepare` makes the engine's requests from the body of a request; `chunks` and `body`
    make the answer, streamed or not."""

    def __init__(
        self, services: Services, prepare: Prepare, chunks: Callable[[PreparedRequest], ChunkBuilder], body: BodyBuilder
    ) -> None:
        self._services = services
        self._prepare = prepare
        self._chunks = chunks
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. Raises ClientGoneError and what becomes an error's answer, see errors.from_exception()."""
        caller = await self._services.authenticate(scope, "inference")
        trace = trace_of(scope)
        try:
            prepared = await self._services.read_body(scope, receive, caller, self._prepare)
        except Exception as error:
            await self._services.limiter.count_client_error(caller, error, trace)
            raise
        session = session_of(scope["headers"], prepared.hints.fields)
        prepared = replace(prepared, hints=replace(prepared.hints, session=session))
        await while_connected(self._run(prepared, trace, send), receive)

    async def _run(self, prepared: PreparedRequest, trace: RequestTrace, send: Send) -> None:
        progress = GenerationProgress(prepared)
        trace.stream, trace.prompt_tokens = prepared.stream, progress.prompt_tokens
        trace.usage = lambda: (progress.cached_tokens, progress.completion_tokens)
        settle = await self._services.limiter.reserve(prepared, trace)
        failure: BaseException | None = None
        try:
            if self._services.accounts is not None:
                self._services.accounts.began(trace, prepared.most_tokens)
            generated = self._services.backend.generate(
                prepared.model.id, prepared.requests, prepared.stream, prepared.hints
            )
            async with aclosing(generated) as deltas:
                if prepared.stream:
                    failure = await self._stream(prepared, progress, deltas, trace, send)
                else:
                    await self._complete(prepared, progress, deltas, trace, send)
        except BaseException as error:
            failure = error
            raise
        finally:
            settle(cost(progress, failure, prepared.stream))
            trace.finish_reasons, trace.timings = progress.finish_reasons, progress.timings

    async def _complete(
        self, prepared: PreparedRequest, progress: GenerationProgress, source: Deltas, trace: RequestTrace, send: Send
    ) -> None:
        """One JSON body, once all choices have ended."""
        choices: list[list[TokenDelta]] = [[] for _ in range(prepared.n * len(prepared.requests))]
        async for deltas in source:
            if trace.ttft_s is None:
                _note_first(deltas, trace)
            for delta in deltas:
                choices[progress.add(delta)].append(delta)
            if progress.complete:
                break
        if not progress.complete:
            raise ReplicaLostError
        usage = progress.usage()
        logprobs = prepared.logprobs is not None or prepared.prompt_logprobs is not None
        heavy = logprobs and usage["total_tokens"] > _INLINE_LOGPROBS
        body = await offload(lambda: orjson.dumps(self._body(prepared, choices, usage)), heavy)
        await send_json(send, 200, body)

    async def _stream(
        self, prepared: PreparedRequest, progress: GenerationProgress, source: Deltas, trace: RequestTrace, send: Send
    ) -> Exception | None:
        """Server-sent events. Returns the error that the stream broke off with, if the client was told of it by an
        event: after that one there is no [DONE]."""
        chunks = self._chunks(prepared)
        payloads: list[Payload] = []  # not yet written
        config = self._services.config
        async with EventStream(send, config.keepalive_s, config.send_timeout_s) as stream:
            try:
                async for deltas in source:
                    if trace.ttft_s is None:
                        _note_first(deltas, trace)
                    for delta in deltas:
                        payloads += chunks.add(progress.add(delta), delta)
                    if progress.complete:
                        break
                    if payloads:
                        await stream.write(events(payloads))
                        payloads = []
                if not progress.complete:
                    raise ReplicaLostError
            except ClientGoneError:
                raise
            except Exception as error:
                if not await stream.begun():
                    raise  # it still gets a status of its own
                await stream.end(events(payloads) + json_event(reported(error, trace).body()))
                return error
            if prepared.include_usage:
                payloads.append(chunks.usage(progress.usage()))
            await stream.end(events(payloads) + DONE)
        return None


async def while_connected(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Run `work`; when the client leaves, cancel it and raise ClientGoneError. The body must have been read."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _note_first(deltas: Sequence[TokenDelta], trace: RequestTrace) -> None:
    """Puts into `trace` when the first token came: now, or earlier when all deltas come late and together."""
    first_s = time.perf_counter() - _age_of_first_s(deltas)
    trace.mark("engine", first_s)
    trace.ttft_s = first_s - trace.started_s
    trace.timings = deltas[0].timings


def _age_of_first_s(deltas: Sequence[TokenDelta]) -> float:
    """Seconds between the first token and the last one of `deltas`, by the engine's own timings; 0 without any."""
    timings = [delta.timings for delta in deltas if delta.timings is not None]
    if not timings:
        return 0.0
    first_s = min(t.queue_s + t.prefill_s for t in timings)
    return max(t.queue_s + t.prefill_s + t.decode_s for t in timings) - first_s
