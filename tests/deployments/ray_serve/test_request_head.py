"""The bounds on a request's head, at their edges."""

from __future__ import annotations

from deployments.ray_serve.request_head import (
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    request_id,
    too_large,
    with_request_id,
)


def test_as_many_headers_as_allowed_and_one_more() -> None:
    assert not too_large([(b"a", b"")] * MAX_HEADERS)
    assert too_large([(b"a", b"")] * (MAX_HEADERS + 1))


def test_one_request_id_does_not_count_but_several_do() -> None:
    identity = (b"x-request-id", b"a")
    assert not too_large([(b"a", b"")] * MAX_HEADERS + [identity])
    assert too_large([(b"a", b"")] * (MAX_HEADERS - 1) + [identity] * 2)
    assert not too_large([(b"x-request-id", b"a" * (MAX_HEADER_BYTES + 1))])  # it is replaced, not passed on


def test_as_many_bytes_as_allowed_and_one_more() -> None:
    assert not too_large([(b"ab", b"c" * (MAX_HEADER_BYTES - 2))])
    assert too_large([(b"ab", b"c" * (MAX_HEADER_BYTES - 1))])


def test_what_passed_once_passes_again() -> None:
    headers = [(b"a", b"")] * MAX_HEADERS
    passed = with_request_id(headers, request_id(headers))
    assert not too_large(passed) and request_id(passed) == passed[-1][1]
