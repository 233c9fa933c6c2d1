"""python -m load_tests.peers.hf_server MODEL_DIR PORT: the least HTTP that can be put around generate().

Completions with `prompt`, `max_tokens`, `ignore_eos` and `stream`; greedy whatever else is asked; one at a time.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import torch
from aiohttp import web
from transformers import AutoModelForCausalLM, AutoTokenizer

Emit = Callable[[str | None], None]  # None: that was all


class _Streamer:
    """What generate() calls with each token, in the shape of transformers' BaseStreamer. Each token's text goes out
    alone: right for whole characters, and as fast as can be."""

    def __init__(self, tokenizer: Any, emit: Emit) -> None:
        self._tokenizer = tokenizer
        self._emit = emit
        self._in_prompt = True

    def put(self, ids: torch.Tensor) -> None:
        if not self._in_prompt:
            self._emit(self._tokenizer.decode(ids))
        self._in_prompt = False

    def end(self) -> None:
        self._emit(None)


class Server:
    def __init__(self, folder: str) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self._turn = asyncio.Lock()

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.completions)
        return app

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "demo", "object": "model"}]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        ids = self._tokenizer(body["prompt"], return_tensors="pt").input_ids
        limit = int(body["max_tokens"])
        usage = {"prompt_tokens": ids.shape[1], "completion_tokens": limit}
        async with self._turn:
            pieces = self._generate(ids, limit, limit if body.get("ignore_eos") else 1)
            if not body.get("stream"):
                text = "".join([piece async for piece in pieces])
                return web.json_response({"choices": [{"text": text, "finish_reason": "length"}], "usage": usage})
            answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await answer.prepare(request)
            async for piece in pieces:
                await answer.write(_event({"choices": [{"text": piece, "finish_reason": None}]}))
            last = {"choices": [{"text": "", "finish_reason": "length"}], "usage": usage}
            await answer.write(_event(last) + b"data: [DONE]\n\n")
            return answer

    async def _generate(self, ids: torch.Tensor, limit: int, least: int) -> AsyncIterator[str]:
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[str | None]()

        def emit(text: str | None) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, text)

        def work() -> None:
            try:
                with torch.inference_mode():
                    self._model.generate(
                        ids,
                        attention_mask=torch.ones_like(ids),
                        do_sample=False,
                        min_new_tokens=least,
                        max_new_tokens=limit,
                        streamer=_Streamer(self._tokenizer, emit),
                    )
            except BaseException:
                emit(None)  # so that the loop below ends, and raises this
                raise

        done = loop.run_in_executor(None, work)
        while (piece := await queue.get()) is not None:
            yield piece
        await done


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


if __name__ == "__main__":
    web.run_app(Server(sys.argv[1]).app(), host="127.0.0.1", port=int(sys.argv[2]), print=None)
