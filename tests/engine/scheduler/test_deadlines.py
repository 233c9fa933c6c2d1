"""What is remembered of sequences with deadlines."""

from __future__ import annotations

import gc

from engine.scheduler.deadlines import Deadlines
from engine.types import GenerateRequest, Phase, SamplingParams, Sequence


def sequence(seq_id: int, deadline_s: float | None = 600.0) -> Sequence:
    request = GenerateRequest(str(seq_id), (1,) * 1000, SamplingParams(), deadline_s=deadline_s)
    return Sequence(seq_id, request, list(request.prompt), 1000)


def lacking(seq: Sequence) -> int:
    return len(seq.tokens)


def test_sequences_that_have_ended_are_not_kept_until_their_deadline() -> None:
    deadlines = Deadlines()
    for seq_id in range(300):
        deadlines.add(sequence(seq_id), None)
        deadlines.forget(seq_id)
    gc.collect()
    assert deadlines.num_sequences == 0
    assert not [thing for thing in gc.get_objects() if type(thing) is Sequence]
    assert deadlines.missed(1000.0, None, lacking) == []


def test_each_late_one_is_named_once() -> None:
    deadlines = Deadlines()
    late, started, patient = sequence(0), sequence(1), sequence(2, None)
    for seq in (late, started, patient):
        deadlines.add(seq, None)
    started.phase = Phase.RUNNING
    assert deadlines.missed(599.0, None, lacking) == []
    assert deadlines.missed(601.0, None, lacking) == [late]
    assert deadlines.missed(602.0, None, lacking) == []
    deadlines.forget(late.seq_id)
    assert deadlines.num_sequences == 0
