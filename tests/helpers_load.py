"""An OpenAI-like server in the test's own process, over real HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


class FakeServer:
    """Knobs are set by tests. Requests of one token are the generator's probes: `bodies` has all others, in order.

    `tokens_per_word`, `overhead`: how prompts are counted. `refuse`: body fields answered by 400. `hold`: each request
    waits for it after its first token. `fail_after`: an error event after so many tokens."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.num_probes = 0
        self.running = self.peak = 0
        self.tokens_per_word = 1
        self.overhead = 0
        self.takes_ids = True
        self.reports_usage = True
        self.tokenizes = False
        self.refuse: set[str] = set()
        self.fail_after: int | None = None
        self.status = 200
        self.hold: asyncio.Event | None = None
        self.url = ""

    def count(self, prompt: Any) -> int:
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            prompt = " ".join(message["content"] for message in prompt)
        units = len(prompt) if isinstance(prompt, list) else len(prompt.split()) * self.tokens_per_word
        return units + self.overhead

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m1"}]})

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response({"tokens": [0] * self.count(body["content"])}, status=200 if self.tokenizes else 404)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body.get("prompt", body.get("messages"))
        ids = "prompt" in body and isinstance(prompt, list)
        if self.refuse & set(body) or (ids and not self.takes_ids):
            return web.json_response({"error": {"message": "?", "type": "invalid_request_error"}}, status=400)
        probe = body["max_tokens"] == 1
        self.num_probes += probe
        if not probe:
            self.bodies.append(body)
            if self.status != 200:
                return web.json_response({"error": {"code": "busy", "message": "?"}}, status=self.status)
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            return await self._stream(request, body, prompt, probe)
        finally:
            self.running -= 1

    async def _stream(self, request: web.Request, body: dict[str, Any], prompt: Any, probe: bool) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        send: Callable[[dict[str, Any]], Awaitable[None]] = lambda event: response.write(  # noqa: E731
            b"data: " + json.dumps(event).encode() + b"\n\n"
        )
        for i in range(body["max_tokens"]):
            if not probe and i == self.fail_after:
                await send({"error": {"message": "lost", "type": "server_error"}})
                return response
            text = {"delta": {"content": f" {i}"}} if "messages" in body else {"text": f" {i}"}
            await send({"choices": [text | {"finish_reason": "length" if i == body["max_tokens"] - 1 else None}]})
            if not probe and self.hold is not None:
                await self.hold.wait()
        if self.reports_usage and body.get("stream_options", {}).get("include_usage"):
            usage = {
                "prompt_tokens": self.count(prompt),
                "completion_tokens": body["max_tokens"],
                "prompt_tokens_details": {"cached_tokens": 3},
            }
            await send({"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response


@asynccontextmanager
async def fake_server() -> AsyncIterator[FakeServer]:
    fake = FakeServer()
    app = web.Application(client_max_size=1 << 24)
    app.router.add_get("/v1/models", fake.models)
    app.router.add_post("/v1/completions", fake.complete)
    app.router.add_post("/v1/chat/completions", fake.complete)
    app.router.add_post("/tokenize", fake.tokenize)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield fake
    finally:
        if fake.hold is not None:
            fake.hold.set()  # the server waits for its handlers
        await runner.cleanup()
