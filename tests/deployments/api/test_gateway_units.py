"""The pure parts of the gateway: salts, offsets, paths, usage of odd input."""

from __future__ import annotations

import gzip
from typing import Any

import pytest
from helpers_gateway import demo_text
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.accounts.auth import Authenticator
from deployments.accounts.errors import KeyRefusedError
from deployments.accounts.static_keys import StaticKeys
from deployments.accounts.tenant import cache_salt
from deployments.api.body import decode, gunzip
from deployments.api.errors import ApiError, clip, from_exception
from deployments.api.messages import read_messages
from deployments.api.token_text import Offsets, echo, token_bytes, token_string
from deployments.api.validation_errors import path
from deployments.config.gateway import StaticKey
from deployments.routing.errors import ModelUnavailableError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)
KEYS = st.sampled_from(["role", "content", "tool_calls", "type", "text", "function", "id", "name", "arguments"])
VALUES = JSON | st.sampled_from(["user", "assistant", "tool", "text", "function", "{}"])


SALTED = st.tuples(st.text(max_size=3), st.none() | st.text(max_size=3))


@given(SALTED, SALTED)
def test_salts_are_equal_only_for_the_same_organisation_and_salt(a: tuple[str, str | None], b: tuple[str, str]) -> None:
    same = (a[0], a[1] or "") == (b[0], b[1] or "")
    assert (cache_salt(*a) == cache_salt(*b)) == same


@given(st.binary(max_size=80))
async def test_any_authorization_header_is_refused_or_admitted(value: bytes) -> None:
    keys = StaticKeys([StaticKey(key="sk-a-key-that-is-not-drawn-by-chance")])
    with pytest.raises(KeyRefusedError) as refused:
        await Authenticator(keys, None).admit([value], "inference")
    assert not refused.value.missing


@settings(deadline=None)
@given(st.text(max_size=40))
def test_offsets_point_at_their_tokens(prompt: str) -> None:
    model = demo_text()
    ids = model.tokenizer.encode(prompt, parse_special=False)
    repeated = echo(model, ids, skip_special=True)
    text = repeated.text
    assert text == model.tokenizer.decode(ids) and not repeated.held
    offsets = Offsets(model, skip_special=True)
    last = 0
    for token_id in ids:
        raw = token_bytes(model, token_id)
        at = offsets.next(token_id)
        assert last <= at <= len(text)
        last = at
        if not token_string(raw).startswith("bytes:"):
            assert text[at:].startswith(raw.decode())


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(JSON | st.dictionaries(KEYS, VALUES | st.lists(st.dictionaries(KEYS, VALUES)), max_size=5), max_size=4))
def test_messages_are_read_or_refused_by_index(value: list[Any]) -> None:
    try:
        messages = read_messages(value)
    except ApiError as error:
        assert error.status == 400 and error.param is not None and error.param.startswith("messages")
        return
    assert all(isinstance(m["content"], str) and isinstance(m["role"], str) for m in messages)


@settings(deadline=None)
@given(st.binary(max_size=200), st.sampled_from(["identity", "gzip"]))
def test_any_bytes_are_json_or_a_400(raw: bytes, coding: str) -> None:
    try:
        assert isinstance(decode(raw, coding, 1000), dict)
    except ApiError as error:
        assert error.status == 400


@pytest.mark.parametrize(("size", "fits"), [(0, True), (1000, True), (1001, False)])
def test_gunzip_limit_is_exact(size: int, fits: bool) -> None:
    data = gzip.compress(b"x" * size)
    if fits:
        assert gunzip(data, 1000) == b"x" * size
    else:
        with pytest.raises(ApiError) as refused:
            gunzip(data, 1000)
        assert refused.value.status == 413


def test_paths() -> None:
    assert path(("messages", 0, "content", 2, "text")) == "messages[0].content[2].text"
    assert path(("metadata", "k" * 99, "[key]")) == f"metadata.{'k' * 64}..."
    assert clip("a\nb") == "a\\nb"


@pytest.mark.parametrize(("wait_s", "header"), [(0.0, "1"), (0.2, "1"), (3.2, "4"), (1e9, "120"), (1e999, "120")])
def test_retry_after_is_one_that_clients_obey(wait_s: float, header: str) -> None:
    error = from_exception(ModelUnavailableError(wait_s))
    assert error is not None and error.headers["retry-after"] == header
