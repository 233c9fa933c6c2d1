"""What the limits check counts."""

from __future__ import annotations

from load_tests.limits_check import Answered, most_in_a_minute, share_used


def test_a_minute_holds_what_was_surely_counted_in_it() -> None:
    answered = [
        Answered(0.0, 1.0, 400),
        Answered(30.0, 31.0, 300),
        Answered(59.0, 60.5, 200),
        Answered(60.2, 61.0, 500),
    ]
    assert most_in_a_minute(answered) == 300 + 200 + 500
    assert most_in_a_minute([]) == 0


def test_the_share_is_of_all_that_was_to_be_had() -> None:
    answered = [Answered(0.0, 1.0, 500), Answered(60.05, 61.0, 500), Answered(60.2, 62.0, 500)]
    assert share_used(answered, 1000, 1) == 1.0
    assert share_used(answered, 1000, 2) == 0.75
