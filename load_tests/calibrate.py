"""Finds out, with a few short requests, what an endpoint accepts and how long its prompts are in tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

import orjson

from load_tests.client import Endpoint
from load_tests.errors import LoadError
from load_tests.outcome import RequestOutcome
from load_tests.prompts import Form, PromptWriter, Segment

# Short, so that they fit into any context.
_FEW, _MORE = 8, 72
_MAX_ID_OVERHEAD = 8
# Fewer tokens than words cannot be; a server that counts oddly must not blow prompts up.
_LEAST_TOKENS_PER_WORD = 2 / 3


async def first_model(endpoint: Endpoint) -> str:
    """The first the server lists. Raises LoadError."""
    url = f"{endpoint.base_url}/models"
    try:
        status, body = await endpoint.get("/models")
        if status != 200:
            raise LoadError(f"{url} answers {status}")
        return str(orjson.loads(body)["data"][0]["id"])
    except OSError as error:
        raise LoadError(f"{url}: {error or type(error).__name__}") from None
    except (ValueError, LookupError, TypeError):
        raise LoadError(f"{url} lists no model") from None


async def calibrate(endpoint: Endpoint, wanted: Literal["auto", "ids", "text"], ignore_eos: bool) -> Form:
    """How to write prompts for this endpoint; takes the extensions that it refuses away from it. Raises LoadError
    when not even a plain request works."""
    if not ignore_eos:
        del endpoint.extensions["ignore_eos"]
    few = await _negotiate(endpoint)
    if wanted != "text" and endpoint.kind == "completions":
        form = await _ids(endpoint)
        if form is not None:
            return form
        if wanted == "ids":
            raise LoadError(f"{endpoint.base_url}: takes no token ids as prompts, or does not report usage for them")
    return await _words(endpoint, few)


async def _negotiate(endpoint: Endpoint) -> RequestOutcome:
    for dropped in ("ignore_eos", "stream_options", None):
        outcome = await _probe(endpoint, Form("word"), _FEW)
        if dropped is None or not (outcome.error or "").startswith(("http 400", "http 422")):
            break
        endpoint.extensions.pop(dropped, None)
    if outcome.error is not None:
        raise LoadError(f"{endpoint.base_url}: the first request failed: {outcome.error}")
    return outcome


async def _ids(endpoint: Endpoint) -> Form | None:
    """None when ids are refused or counted otherwise than one by one (plus, perhaps, a BOS token)."""
    overheads = set()
    for units in (_FEW, _MORE):
        outcome = await _probe(endpoint, Form("id"), units)
        if outcome.error is not None or outcome.prompt_tokens is None:
            return None
        overheads.add(outcome.prompt_tokens - units)
    overhead = overheads.pop()
    if overheads or not 0 <= overhead <= _MAX_ID_OVERHEAD:
        return None
    return Form("id", overhead=overhead, exact=True)


async def _words(endpoint: Endpoint, few: RequestOutcome) -> Form:
    counts: Sequence[int | None] = (few.prompt_tokens, (await _probe(endpoint, Form("word"), _MORE)).prompt_tokens)
    if None in counts:
        counts = [await _tokenize(endpoint, units) for units in (_FEW, _MORE)]
    a, b = counts
    if a is None or b is None:
        return Form("word")
    slope = (b - a) / (_MORE - _FEW)
    if slope < _LEAST_TOKENS_PER_WORD:
        return Form("word")
    overhead = round(a - slope * _FEW)
    return Form("word", slope, max(0, overhead), exact=slope == 1)


async def _probe(endpoint: Endpoint, form: Form, units: int) -> RequestOutcome:
    prompt = _prompt(form, units)
    body = PromptWriter(form, 0).as_json(prompt)
    if endpoint.kind == "chat":
        body = orjson.dumps([{"role": "user", "content": prompt}])
    outcome = RequestOutcome(due=time.perf_counter())
    await endpoint.send(endpoint.prepare(body, 1), outcome)
    return outcome


async def _tokenize(endpoint: Endpoint, units: int) -> int | None:
    """By vLLM's or llama.cpp's POST /tokenize, for servers that report no usage; None without it."""
    prompt = _prompt(Form("word"), units)
    try:
        status, body = await endpoint.post("/tokenize", {"model": endpoint.model, "prompt": prompt, "content": prompt})
        answer = orjson.loads(body) if status == 200 else {}
        return int(answer["count"]) if "count" in answer else len(answer["tokens"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _prompt(form: Form, units: int) -> str:
    return PromptWriter(form, 0).text([Segment(f"probe/{units}", units)])
