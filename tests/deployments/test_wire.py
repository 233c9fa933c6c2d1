from __future__ import annotations

import pickle
from dataclasses import fields

from deployments.wire import pack, unpack
from engine.types import FinishReason, Timings, TokenDelta, TokenLogprob

PLAIN = TokenDelta("chatcmpl-0123456789abcdef0123456789abcdef-0", 0, (12345,), " valley", num_completion_tokens=7)
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


def test_every_field_arrives() -> None:
    assert all(getattr(FULL, f.name) != f.default for f in fields(FULL))
    arrived = unpack(pickle.loads(pickle.dumps(pack([PLAIN, FULL]))))
    assert arrived == [PLAIN, FULL]
    assert arrived[1].finish_reason is FinishReason.STOP


def test_a_plain_delta_brings_no_class_names() -> None:
    assert b"engine" not in pickle.dumps(pack([PLAIN]))
