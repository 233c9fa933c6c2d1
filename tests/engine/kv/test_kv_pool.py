"""BlockPool against a model that keeps plain lists."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.kv.pool import BlockPool

NUM_BLOCKS = 5


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.refs = dict.fromkeys(range(NUM_BLOCKS), 0)
        self.names: dict[int, bytes] = {}
        self.freed: list[int] = []  # published and free, the one freed longest ago first

    @precondition(lambda self: self.pool.num_free)
    @rule()
    def acquire(self) -> None:
        blanks = {b for b, n in self.refs.items() if n == 0 and b not in self.names}
        block = self.pool.acquire()
        if blanks:
            assert block in blanks, "evicted while there were blank blocks"
        else:
            assert block == self.freed.pop(0), "not the one freed longest ago"
            del self.names[block]
        self.refs[block] = 1

    @rule(block=st.integers(0, NUM_BLOCKS - 1))
    def free(self, block: int) -> None:
        if self.refs[block] == 0:
            with pytest.raises(AssertionError):
                self.pool.free(block)
            return
        self.pool.free(block)
        self.refs[block] -= 1
        if self.refs[block] == 0 and block in self.names:
            self.freed.append(block)

    @rule(name=st.sampled_from([b"a", b"b", b"c"]), block=st.integers(0, NUM_BLOCKS - 1))
    def publish(self, name: bytes, block: int) -> None:
        if self.refs[block] and block not in self.names:
            self.pool.publish(block, name)
            if name not in self.names.values():
                self.names[block] = name

    @rule(name=st.sampled_from([b"a", b"b", b"c"]))
    def find_and_touch(self, name: bytes) -> None:
        block = self.pool.find(name)
        assert block == next((b for b, n in self.names.items() if n == name), None)
        if block is not None:
            self.pool.touch(block)
            self.refs[block] += 1
            if block in self.freed:
                self.freed.remove(block)

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        assert {b: self.pool.refs(b) for b in self.refs} == self.refs
        assert self.pool.num_free == sum(n == 0 for n in self.refs.values())


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_check_notices_a_lost_block() -> None:
    pool = BlockPool(2)
    pool.num_blocks = 3  # of which the third was never anywhere
    with pytest.raises(AssertionError, match="lost"):
        pool.check()
