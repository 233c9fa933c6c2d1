"""The request that everything is asked with: a chat of about 256 tokens, for an answer of 32."""

from __future__ import annotations

import json

MODEL = "demo"
KEY = "sk-gateways-0123456789"
PATH = "/v1/chat/completions"
HEADERS = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}


def body(stream: bool) -> bytes:
    return json.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Tell me about the sea, the sky and the mountains. " * 19}],
            "max_tokens": 32,
            "temperature": 0,
            "stream": stream,
        }
    ).encode()


def http(port: int, stream: bool) -> bytes:
    """All of it, for one's own HTTP."""
    data = body(stream)
    lines = [f"POST {PATH} HTTP/1.1", f"host: 127.0.0.1:{port}", f"content-length: {len(data)}"]
    lines += [f"{name}: {value}" for name, value in HEADERS.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data
