"""Every engine type that travels arrives as it was sent, and nothing else is let through unnoticed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import Enum, StrEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import engine.errors
from deployments.channel import frames
from deployments.channel.codec import Decoder, plain
from deployments.channel.errors import DrainingError, ReplicaFaultError, StreamLostError, from_words, to_words
from deployments.channel.frames import FrameError, Message, Reader
from deployments.channel.messages import Kind, pack_deltas, to_load, to_request, unpack_deltas
from deployments.channel.replica_info import Load
from engine.errors import ContextLengthError, EngineError, QueueFullError
from engine.types import FinishReason, GenerateRequest, SamplingParams, Timings, TokenDelta, TokenLogprob

FULL = TokenDelta(
    "r",
    3,
    (1, 2),
    "é",
    (TokenLogprob(1, -0.5, ((1, -0.5), (2, -1.0))),),
    (None, TokenLogprob(4, -2.0)),
    FinishReason.STOP,
    "why",
    11,
    12,
    13,
    Timings(0.1, 0.2, 0.3, 1),
)
PARAMS = SamplingParams(
    logit_bias=((5, -1.5), (6, 2.0)), seed=7, stop=("a", "b"), stop_token_ids=frozenset({8, 9}), logprobs=2
)
REQUEST = GenerateRequest("chatcmpl-1", (1, 2, 3), PARAMS, priority=-1, deadline_s=2.5, cache_salt="s")


def sent(message: Message) -> Message:
    (arrived,) = Reader().feed(frames.encode(message))
    return arrived


def test_every_field_of_a_delta_arrives() -> None:
    assert all(getattr(FULL, f.name) != f.default for f in fields(FULL))
    other = TokenDelta("other", 0, (3,), " valley")
    message = sent((Kind.DELTAS, [(5, pack_deltas([FULL, other], {"other": 0, "r": 1}))]))
    assert message[0] == Kind.DELTAS
    ((number, packed),) = message[1]
    assert number == 5
    arrived = unpack_deltas(packed, ["other", "r"])
    assert arrived == [FULL, other]
    assert arrived[0].finish_reason is FinishReason.STOP
    assert isinstance(arrived[0].logprobs[0], TokenLogprob) and isinstance(arrived[0].timings, Timings)


@pytest.mark.parametrize("request_", [REQUEST, GenerateRequest("r", (1,))], ids=["full", "plain"])
def test_a_request_arrives(request_: GenerateRequest) -> None:
    arrived = to_request(sent((Kind.OPEN, 0, True, (request_,)))[3][0])
    assert arrived == request_
    assert isinstance(arrived.sampling, SamplingParams) and isinstance(arrived.sampling.stop_token_ids, frozenset)
    assert hash(arrived) == hash(request_)


def test_load_arrives() -> None:
    load = Load(1, 2, 300, 0.25)
    assert to_load(sent((Kind.LOAD, load))[1]) == load


def test_a_plain_delta_is_small() -> None:
    delta = TokenDelta("chatcmpl-0123456789abcdef0123456789abcdef-0", 0, (12345,), " valley", num_completion_tokens=7)
    assert len(frames.encode((Kind.DELTAS, [(5, pack_deltas([delta], {delta.request_id: 0}))]))) < 50


class Shade(StrEnum):
    DARK = "dark"


class Odd(Enum):
    ONE = 1


@dataclass(frozen=True)
class Inner:
    value: float = 0.0


@dataclass(frozen=True)
class Kinds:
    shade: Shade | None
    some: tuple[Inner | None, ...]
    pair: tuple[int, str]
    numbers: frozenset[int]
    either: int | str | None
    inner: Inner


@pytest.mark.slow
@given(
    st.builds(
        Kinds,
        st.sampled_from([None, Shade.DARK]),
        st.lists(st.one_of(st.none(), st.builds(Inner, st.floats(allow_nan=False)))).map(tuple),
        st.tuples(st.integers(0, 2**63), st.text()),
        st.frozensets(st.integers(-5, 2**40)),
        st.one_of(st.none(), st.integers(0, 9), st.text()),
        st.builds(Inner),
    )
)
def test_all_kinds_of_fields_arrive(kinds: Kinds) -> None:
    assert Decoder(Kinds)(sent((1, kinds))[1]) == kinds


@dataclass(frozen=True)
class Mapped:
    table: dict[str, int]


@dataclass(frozen=True)
class Mixed:
    either: int | tuple[Inner, ...] | Inner


@pytest.mark.parametrize("cls", [Mapped, Mixed])
def test_a_type_that_cannot_travel_is_found_out_at_once(cls: type[Any]) -> None:
    with pytest.raises(TypeError, match=f"{cls.__name__}\\."):
        Decoder(cls)
    with pytest.raises(TypeError, match="object cannot be sent"):
        frames.encode((1, object()))


def test_a_wrong_number_of_fields_is_an_error() -> None:
    with pytest.raises(ValueError, match="Load has 5 fields, not 1"):
        to_load((1,))
    assert Decoder(Load).schema != Decoder(Timings).schema


def errors() -> Iterator[EngineError]:
    for name in vars(engine.errors):
        cls = getattr(engine.errors, name)
        if isinstance(cls, type) and issubclass(cls, EngineError):
            yield cls(f"too much: {name}")
    yield ContextLengthError("too long by 3", "prompt")


@pytest.mark.parametrize("error", list(errors()), ids=repr)
def test_the_engines_errors_keep_their_type(error: EngineError) -> None:
    arrived = from_words(*sent((Kind.ERROR, *to_words(error)))[1:])
    assert type(arrived) is type(error) and str(arrived) == str(error)
    assert getattr(arrived, "param", None) == getattr(error, "param", None)


def test_other_errors_tell_nothing_but_their_name() -> None:
    fault = from_words(*to_words(KeyError("sk-secret")))
    assert isinstance(fault, ReplicaFaultError) and str(fault) == "KeyError"
    assert isinstance(from_words(*to_words(DrainingError())), StreamLostError)
    assert isinstance(from_words("Exception", "x", None), ReplicaFaultError)
    assert isinstance(from_words("annotations", "x", None), ReplicaFaultError)
    assert type(from_words(*to_words(QueueFullError("full")))) is QueueFullError


plains = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False), st.text(), st.binary()
    ),
    lambda inner: st.lists(inner, max_size=4).map(tuple),
    max_leaves=12,
)
messages = st.lists(plains, min_size=1, max_size=5).map(tuple)


@pytest.mark.slow
@given(st.lists(messages, max_size=6), st.data())
def test_messages_survive_any_cut(sent_: list[Message], data: st.DataObject) -> None:
    stream = b"".join(map(frames.encode, sent_))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    reader, got = Reader(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += list(reader.feed(stream[start:end]))
    assert got == sent_


@given(st.binary(max_size=200))
def test_garbage_is_an_error_or_incomplete(garbage: bytes) -> None:
    reader = Reader(limit=100)
    try:
        for message in reader.feed(garbage):
            assert isinstance(message, tuple) and message
    except FrameError:
        pass


def test_what_is_too_large_is_refused_before_it_has_come() -> None:
    with pytest.raises(FrameError, match="1025 bytes is too large: at most 1024"):
        list(Reader(limit=1024).feed((1025).to_bytes(4, "big")))
    with pytest.raises(FrameError, match="too large"):
        frames.encode((1, b"x" * 100), limit=100)
    assert list(Reader(limit=1024).feed((1024).to_bytes(4, "big") + b"x" * 1000)) == []


@pytest.mark.parametrize("body", [b"\x90", b"\x01", b"\xc1", b"\x92\x01", b"\x91\x01\x01", b"", b"\x81\x01\x01"])
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(FrameError, match="not a message"):
        list(Reader().feed(len(body).to_bytes(4, "big") + body))


def test_deep_nesting_is_refused() -> None:
    body = b"\x91" * 100_000 + b"\x01"
    with pytest.raises(FrameError, match="not a message"):
        list(Reader().feed(len(body).to_bytes(4, "big") + body))


def test_plain_takes_no_class() -> None:
    with pytest.raises(TypeError):
        plain(Load)
