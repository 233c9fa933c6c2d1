"""python -m load_tests.gateways.mock PORT: an OpenAI API that answers every chat at once with the same 32 tokens."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, cast

TOKENS = 32
_HEAD = {"id": "chatcmpl-mock", "created": 1_700_000_000, "model": "demo"}
_USAGE = {"prompt_tokens": 256, "completion_tokens": TOKENS, "total_tokens": 256 + TOKENS}


def plain() -> bytes:
    message = {"role": "assistant", "content": " word" * TOKENS}
    choice = {"index": 0, "message": message, "finish_reason": "length", "logprobs": None}
    body = json.dumps({**_HEAD, "object": "chat.completion", "choices": [choice], "usage": _USAGE}).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def pieces() -> list[bytes]:
    """The writes of a streamed answer: the head, one for each token, one for the end."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    events = [_event({"content": " word"}, None) for _ in range(TOKENS)]
    last = _event({}, "length") + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    return [head + _event({"role": "assistant", "content": ""}, None), *events, last]


def _event(delta: dict[str, Any], finish: str | None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
    payload = {**_HEAD, "object": "chat.completion.chunk", "choices": [choice]}
    return _chunk(b"data: %s\n\n" % json.dumps(payload).encode())


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Mock(asyncio.Protocol):
    """One connection, one request at a time."""

    _PLAIN = plain()
    _PIECES = pieces()

    def __init__(self) -> None:
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (request := self._take()) is not None:
            self._answer(request)

    def _take(self) -> bytes | None:
        """The body of the next request that is complete."""
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return None
        _, _, after = head.lower().partition(b"content-length:")
        length = int(after.split(b"\r\n", 1)[0] or 0)
        if len(rest) < length:
            return None
        self._buffer = rest[length:]
        return rest[:length]

    def _answer(self, body: bytes) -> None:
        assert self._transport is not None
        if not (body and json.loads(body).get("stream")):
            self._transport.write(self._PLAIN)
            return
        for piece in self._PIECES:
            self._transport.write(piece)


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Mock, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
