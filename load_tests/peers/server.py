"""A server of the demo model: ready once it has answered a known prompt right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx

from load_tests import servers
from load_tests.peers.base import PeerError
from load_tests.peers.demo import CHECK_PROMPT, CHECK_TEXT, CHECK_TOKENS
from load_tests.servers import Launch

_ANSWER_S = 120.0


@contextmanager
def running(launch: Launch, port: int, log: Path) -> Iterator[str]:
    """The base URL of a server that has answered the check prompt right. Raises LoadError. As servers.running()."""
    url = f"http://127.0.0.1:{port}"
    with servers.running(launch, log, partial(not_yet, url, launch.model)):
        yield url


def not_yet(url: str, model: str) -> str | None:
    """None: the server gives the known text. Otherwise why it may only need more time. Raises PeerError when it
    answers wrong: fast and wrong is not fast."""
    body = {"model": model, "prompt": CHECK_PROMPT, "max_tokens": CHECK_TOKENS, "temperature": 0}
    try:
        # A connection for each question: some servers drop those that are used again.
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=_ANSWER_S)
    except httpx.HTTPError as error:
        return f"{error or type(error).__name__}"
    if answer.status_code >= 500 or answer.status_code == 404:  # a proxy may be up before what it serves
        return f"http {answer.status_code}"
    if answer.status_code != 200:
        raise PeerError(f"the first completion: http {answer.status_code} {' '.join(answer.text.split())[:200]}")
    text = answer.json()["choices"][0]["text"]
    if text != CHECK_TEXT:
        raise PeerError(f"wrong text: {text!r} instead of {CHECK_TEXT!r}")
    return None
