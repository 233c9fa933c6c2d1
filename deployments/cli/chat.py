"""`sluice chat`: a conversation in the terminal with any OpenAI-compatible server."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from deployments.upstream.events import DONE, EventParser

if TYPE_CHECKING:
    import httpx

_HELP = "/reset forgets the conversation, /quit leaves, Ctrl-C stops an answer."
_INDENT = "> "


def add(commands: Any) -> None:
    """Declares `sluice chat`."""
    p = commands.add_parser("chat", help="talk to a running server", description=_HELP)
    p.add_argument("--base-url", default="http://127.0.0.1:8000", help="with or without /v1 (default: %(default)s)")
    p.add_argument("--model", help="default: the first the server lists")
    p.add_argument("--api-key", default=os.environ.get("SLUICE_API_KEY"), help="default: $SLUICE_API_KEY")
    p.set_defaults(run=run)


class ChatError(Exception):
    """The server refused or broke off. The message is for the user."""


def run(args: argparse.Namespace) -> int:
    """Runs the command. Returns the exit status."""
    import httpx

    base = args.base_url.rstrip("/")
    base = base if base.endswith("/v1") else f"{base}/v1"
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    timeout = httpx.Timeout(10.0, read=None)  # an answer may take as long as it likes
    with httpx.Client(base_url=base, headers=headers, timeout=timeout) as client:
        try:
            model = args.model or _first_model(client)
        except ChatError as error:
            print(f"sluice chat: {error}", file=sys.stderr)
            return 1
        if sys.stdin.isatty():
            import_module("readline")  # gives input() line editing and history
        print(f"{model} at {base}. {_HELP}")
        return _converse(client, model)


def _converse(client: httpx.Client, model: str) -> int:
    messages: list[dict[str, str]] = []
    while True:
        try:
            said = input(_INDENT if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if said == "/quit":
            return 0
        if said == "/reset":
            messages.clear()
            print("(forgotten)")
        elif said.startswith("/"):
            print(_HELP)
        elif said:
            messages.append({"role": "user", "content": said})
            answer = _answer(client, model, messages)
            if answer is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})


def _answer(client: httpx.Client, model: str, messages: list[dict[str, str]]) -> str | None:
    """Prints an answer as it comes. What was said of it stays in the conversation even if it was stopped; None when
    it failed."""
    parts: list[str] = []
    try:
        for text in _stream(client, model, messages):
            parts.append(text)
            print(text, end="", flush=True)
        print()
    except KeyboardInterrupt:
        print(" (stopped)")
    except ChatError as error:
        print(f"{'' if not parts else chr(10)}error: {error}", file=sys.stderr)
        return None
    return "".join(parts)


def _stream(client: httpx.Client, model: str, messages: list[dict[str, str]]) -> Iterator[str]:
    """Leaving the iterator early closes the connection, which makes the server stop. Raises ChatError."""
    import httpx

    body = {"model": model, "messages": messages, "stream": True}
    try:
        with client.stream("POST", "/chat/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise ChatError(_message(response))
            parser = EventParser()
            for data in (data for chunk in response.iter_bytes() for data in parser.feed(chunk)):
                if data.strip() == DONE:
                    continue
                event = json.loads(data)
                if error := event.get("error"):
                    raise ChatError(error.get("message", str(error)) if isinstance(error, dict) else str(error))
                for choice in event.get("choices") or ():
                    if text := (choice.get("delta") or {}).get("content"):
                        yield text
    except httpx.HTTPError as error:
        raise ChatError(f"{client.base_url}: {error}") from None


def _first_model(client: httpx.Client) -> str:
    import httpx

    try:
        response = client.get("/models")
    except httpx.HTTPError as error:
        raise ChatError(f"no server at {client.base_url}: {error}") from None
    if response.status_code != 200:
        raise ChatError(_message(response))
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ChatError(f"{client.base_url}/models lists no model") from None


def _message(response: httpx.Response) -> str:
    try:
        return f"{response.status_code}: {response.json()['error']['message']}"
    except (ValueError, LookupError, TypeError):
        return f"{response.status_code} {response.reason_phrase}"
