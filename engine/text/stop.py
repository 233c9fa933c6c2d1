"""Finding stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Match:
    """Offsets from the beginning of the piece just fed; start is negative if the match began earlier."""

    start: int
    end: int


class StopStrings:
    """Knuth-Morris-Pratt over all stop strings at once: time per character does not depend on what came before.

    The match that completes first wins (of two that end together, the longer), so the result does not depend on how
    the text is cut into pieces. `held` is how many characters at the end may yet turn out to begin a match.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._automata = [_Automaton(stop) for stop in stops]
        self.held = 0

    def feed(self, piece: str, armed: bool = True) -> Match | None:
        """The first match that completes in `piece`; none when not `armed`. After a match, feed no more."""
        if not self._automata:
            return None
        found = [Match(end - len(a.stop), end) for a in self._automata if (end := a.feed(piece, armed))]
        self.held = max(a.state for a in self._automata)
        return min(found, key=lambda m: (m.end, m.start), default=None)


@dataclass(slots=True)
class _Automaton:
    """`state`: how many characters of `stop` the text so far ends with. `fail[i]`: the longest proper prefix of
    stop that stop[:i + 1] ends with."""

    stop: str
    fail: list[int] = field(init=False)
    state: int = 0

    def __post_init__(self) -> None:
        if not self.stop:
            raise InvalidRequestError("stop strings must not be empty", "stop")
        self.fail = [0] * len(self.stop)
        k = 0
        for i in range(1, len(self.stop)):
            while k and self.stop[i] != self.stop[k]:
                k = self.fail[k - 1]
            k += self.stop[i] == self.stop[k]
            self.fail[i] = k

    def feed(self, piece: str, armed: bool) -> int:
        """Where in `piece` the first match ends; 0 if nowhere."""
        stop, fail, state = self.stop, self.fail, self.state
        if not state and stop[0] not in piece:
            return 0
        for i, c in enumerate(piece):
            while state and c != stop[state]:
                state = fail[state - 1]
            state += c == stop[state]
            if state == len(stop):
                if armed:
                    return i + 1
                state = fail[state - 1]
        self.state = state
        return 0
