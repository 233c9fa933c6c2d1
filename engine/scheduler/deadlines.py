"""Which waiting sequences come too late for a first token. Refuses none that could still make it."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from engine.types import Phase, Sequence

_DOUBT = 2.0  # estimates are halved, so that no request is refused that could still make it
_PERIOD_S = 2.0  # seconds over which a rate is measured at least: many steps even of a slow model
_WEIGHT = 0.3  # of the newest measurement of the rate, so that some ten seconds decide


class DrainRate:
    """Tokens per second at which a queue that has no lack of sequences gets shorter, found or computed."""

    def __init__(self) -> None:
        self._rate: float | None = None
        self._since: float | None = None
        self._tokens = 0

    def observe(self, now_s: float, num_tokens: int, backlogged: bool) -> None:
        """Once per step: tokens of the sequences admitted in it, and whether others still wait."""
        if not backlogged:
            self._since = None
            return
        if self._since is None:
            self._since, self._tokens = now_s, 0
            return
        self._tokens += num_tokens
        if (took := now_s - self._since) >= _PERIOD_S:
            rate = self._tokens / took
            self._rate = rate if self._rate is None else self._rate + _WEIGHT * (rate - self._rate)
            self._since, self._tokens = now_s, 0

    def least_wait_s(self, num_tokens: int) -> float:
        """What so many tokens ahead surely take. 0 when nothing is known."""
        return num_tokens / self._rate / _DOUBT if self._rate else 0.0


class Deadlines:
    """Waiting sequences, by the time at which to look whether they can still make it.

    Of sequences that have ended only a number stays, until their time has come.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []  # when to look, and the sequence's number
        self._sequences: dict[int, Sequence] = {}

    def add(self, seq: Sequence, token_s: float | None) -> None:
        """`token_s`: seconds that a token takes, as far as is known."""
        if seq.request.deadline_s is not None:
            self._sequences[seq.seq_id] = seq
            self._look_again(seq, seq.arrival_s + seq.request.deadline_s, len(seq.tokens), token_s)

    def forget(self, seq_id: int) -> None:
        """The sequence has ended, or has had its first token."""
        self._sequences.pop(seq_id, None)

    @property
    def num_sequences(self) -> int:
        """Sequences that are remembered."""
        return len(self._sequences)

    def missed(self, now_s: float, token_s: float | None, lacking: Callable[[Sequence], int]) -> list[Sequence]:
        """Those never admitted that cannot have their first token in time, each once. `lacking`: how many tokens
        are not in the cache."""
        late: list[Sequence] = []
        heap = self._heap
        while heap and heap[0][0] < now_s:
            _, seq_id = heappop(heap)
            seq = self._sequences.get(seq_id)
            if seq is None or seq.request.deadline_s is None:
                continue
            if seq.phase is not Phase.WAITING:
                self.forget(seq_id)
                continue
            end, num_tokens = seq.arrival_s + seq.request.deadline_s, lacking(seq)
            if end < now_s + _least_s(num_tokens, token_s):
                late.append(seq)
            else:
                self._look_again(seq, end, num_tokens, token_s)
        return late

    def _look_again(self, seq: Sequence, end_s: float, num_tokens: int, token_s: float | None) -> None:
        heappush(self._heap, (end_s - _least_s(num_tokens, token_s), seq.seq_id))


def _least_s(num_tokens: int, token_s: float | None) -> float:
    return num_tokens * token_s / _DOUBT if token_s is not None else 0.0
