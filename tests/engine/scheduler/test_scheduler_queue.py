from __future__ import annotations

import pytest

from engine.config import EngineConfig
from engine.scheduler.queue import QUEUES, WaitingQueue
from engine.types import GenerateRequest, Sequence


def seq(seq_id: int) -> Sequence:
    return Sequence(seq_id, GenerateRequest(str(seq_id), (1,)), [1], 1, arrival_s=float(seq_id))


@pytest.fixture(params=QUEUES.names())
def queue(request: pytest.FixtureRequest) -> WaitingQueue:
    return QUEUES.get(request.param)(EngineConfig("none", fair_sharing=True))


def test_equals_leave_in_order_of_arrival(queue: WaitingQueue) -> None:
    for i in range(3):
        queue.push(seq(i))
    assert [s.seq_id for s in queue] == [0, 1, 2]
    head = queue.peek()
    assert head is not None and head.seq_id == 0 and len(queue) == 3
    assert [queue.pop().seq_id for _ in range(3)] == [0, 1, 2]
    assert queue.peek() is None and len(queue) == 0


def test_a_preempted_one_returns_before_the_waiting_ones(queue: WaitingQueue) -> None:
    for i in range(3):
        queue.push(seq(i))
    first = queue.pop()
    queue.push_front(first)
    assert [queue.pop().seq_id for _ in range(3)] == [0, 1, 2]


def test_remove_from_anywhere(queue: WaitingQueue) -> None:
    for i in range(4):
        queue.push(seq(i))
    removed = queue.remove(2)
    assert removed is not None and removed.seq_id == 2
    assert queue.remove(2) is None and queue.remove(99) is None
    assert [s.seq_id for s in queue] == [0, 1, 3]


def test_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="fcfs"):
        QUEUES.get("lottery")
