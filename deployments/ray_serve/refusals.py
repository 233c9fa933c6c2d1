"""What a client is told where Serve, its proxy or HAProxy would answer in words of their own."""

from __future__ import annotations

import json

OUR_PATHS = r".*/(?:v1/.+|health(?:/\w+)?|tokenize|metrics|openapi\.json)"
"""A regular expression that the whole of a path of the OpenAI API matches, below any route_prefix."""

RETRY_S = "1"
"""For how many seconds a client should wait before it asks again: what is missing comes back in about that time."""

NOT_HERE = "The server is starting or shutting down. Please retry shortly."
NOT_NOW = "The server cannot take the request now. Please retry shortly."
CUT_SHORT = "The server stopped working on this request before it was complete."


def envelope(message: str, kind: str) -> bytes:
    """An error body in OpenAI's shape; `kind` is its type."""
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": None}}).encode()
