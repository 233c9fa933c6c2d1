from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidRequestError
from engine.text.stop import Match, StopStrings

stops_of = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)
pieces_of = st.lists(st.tuples(st.text("abc", max_size=4), st.booleans()), max_size=12)


def slow(stops: list[str], pieces: list[tuple[str, bool]]) -> tuple[int, int, int] | None:
    """(piece, start, end) of the first match that completes in an armed piece; offsets in the whole text."""
    text, base = "".join(p for p, _ in pieces), 0
    for n, (piece, armed) in enumerate(pieces):
        for end in range(base + 1, base + len(piece) + 1):
            starts = [end - len(s) for s in stops if text[:end].endswith(s)]
            if starts and armed:
                return n, min(starts), end
        base += len(piece)
    return None


@given(stops=stops_of, pieces=pieces_of)
def test_finds_what_a_slow_search_finds(stops: list[str], pieces: list[tuple[str, bool]]) -> None:
    matcher, base, text = StopStrings(stops), 0, ""
    expected = slow(stops, pieces)
    for n, (piece, armed) in enumerate(pieces):
        match = matcher.feed(piece, armed)
        if match is not None:
            assert expected == (n, base + match.start, base + match.end)
            return
        base, text = base + len(piece), text + piece
        held = max((k for s in stops for k in range(1, len(s)) if text.endswith(s[:k])), default=0)
        assert matcher.held == held
    assert expected is None


def test_the_match_that_completes_first_wins() -> None:
    assert StopStrings(["classic", "lass"]).feed(" classic") == Match(2, 6)
    assert StopStrings(["b", "ab"]).feed("xab") == Match(1, 3)


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        StopStrings([""])


def test_long_stop_strings_cost_no_more_per_character() -> None:
    matcher = StopStrings(["a" * 20_000 + "b"])
    assert all(matcher.feed("a" * 100) is None for _ in range(2_000))
    assert matcher.held == 20_000
