"""Server-sent events, cut anywhere."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.upstream.events import DONE, EventParser, EventTooLargeError


def parsed(chunks: Iterable[bytes], parser: EventParser | None = None) -> list[bytes]:
    parser = parser or EventParser()
    return [data for chunk in chunks for data in parser.feed(chunk)]


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"", []),
        (b"data: one\n\n", [b"one"]),
        (b"data:one\n\ndata: two\n\n", [b"one", b"two"]),
        (b"data:  one \n\n", [b" one "]),
        (b"data: one\ndata: two\n\n", [b"one\ntwo"]),
        (b"data\n\ndata:\n\n", [b"", b""]),
        (b"\n\n: comment\n\nevent: x\nid: 3\nretry: 5\ndata: one\n\n", [b"one"]),
        (b"data: one\r\n\r\ndata: [DONE]\r\n\r\n", [b"one", DONE]),
        (b"data: one\r\rdata: two\rdata: three\r\r", [b"one", b"two\nthree"]),
        (b"\xef\xbb\xbfdata: one\n\n", [b"one"]),
        (b"data: one\n\ndata: two\n", [b"one"]),
        (b"data: one\n\ndata: two", [b"one"]),
    ],
)
def test_events(stream: bytes, events: list[bytes]) -> None:
    assert parsed([stream]) == events


@given(st.lists(st.integers(1, 9), max_size=30), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_events_however_they_are_cut(sizes: list[int], newline: bytes) -> None:
    rest = b": hello\n\ndata: one\n\ndata: two\ndata: three\n\ndata: [DONE]\n\n".replace(b"\n", newline)
    chunks = []
    for size in sizes:
        chunks.append(rest[:size])
        rest = rest[size:]
    assert parsed([*chunks, rest]) == [b"one", b"two\nthree", DONE]


@pytest.mark.parametrize("chunks", [[b"data: " + b"x" * 20], [b"data: 0123456\n", b"data: 0123456\n"], [b"x" * 6] * 3])
def test_an_event_without_an_end(chunks: list[bytes]) -> None:
    with pytest.raises(EventTooLargeError):
        parsed(chunks, EventParser(max_event_bytes=12))


def test_the_limit_is_of_one_event() -> None:
    assert parsed([b"data: 0123456789\n\n" * 100], EventParser(max_event_bytes=12)) == [b"0123456789"] * 100
