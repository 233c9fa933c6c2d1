from __future__ import annotations

from array import array

import pytest

from load_tests.outcome import RequestOutcome
from load_tests.report.summary import summary_text
from load_tests.scenario import Slo
from load_tests.stats import keeps, summarize


def outcome(due: float, events: list[float], end: float, **more: int) -> RequestOutcome:
    return RequestOutcome(due=due, sent=due, end=end, events=array("d", events), **more)


def test_latencies_count_from_when_a_request_was_due() -> None:
    late = outcome(10.0, [11.0, 11.2, 11.6], 12.0, prompt_tokens=5, output_tokens=3)
    late.sent = 10.5
    s = summarize([late])
    assert s.latency_ms["ttft"]["p50"] == 1000
    assert s.latency_ms["e2e"]["p50"] == 2000
    assert s.latency_ms["itl"]["p50"] == pytest.approx(300)
    assert s.latency_ms["tpot"]["p50"] == pytest.approx(300)
    assert (s.prompt_tokens, s.output_tokens, s.duration_s) == (5, 3, 2.0)
    assert s.output_tokens_per_s == 1.5
    assert s.send_lag_ms["max"] == 500
    assert "left late" in summary_text(s)


def test_percentiles_lie_between_the_nearest_ranks() -> None:
    s = summarize([outcome(0.0, [i / 10], 1.0) for i in range(11)])
    assert [s.latency_ms["ttft"][p] for p in ("p50", "p90", "p95", "p99", "max")] == [500, 900, 950, 990, 1000]


def test_failures_are_counted_by_kind_and_kept_out_of_latencies() -> None:
    good = outcome(0.0, [0.5], 1.0, prompt_tokens=1, output_tokens=1)
    bad = [RequestOutcome(due=0.0, end=9.0, error="timeout"), RequestOutcome(due=0.0, end=4.0, error="timeout")]
    s = summarize([good, *bad, RequestOutcome(due=0.0, end=2.0, error="http 429")])
    assert s.errors == {"timeout": 2, "http 429": 1}
    assert (s.requests, s.succeeded, s.duration_s) == (4, 1, 9.0)
    assert s.latency_ms["e2e"]["max"] == 1000
    assert "2 x timeout" in summary_text(s)


def test_nothing_succeeded() -> None:
    s = summarize([RequestOutcome(due=0.0, end=1.0, error="timeout")])
    assert s.latency_ms == {} and s.output_tokens_per_s == 0
    assert "0 ok, 1 failed" in summary_text(s)
    assert summarize([]).requests == 0


def test_without_usage_events_are_taken_for_tokens() -> None:
    assert summarize([outcome(0.0, [0.1, 0.2], 1.0)]).output_tokens == 2


def test_goodput_is_what_keeps_the_slo_of_all_that_was_asked() -> None:
    fast = outcome(0.0, [0.1, 0.2], 0.2)
    late = outcome(0.0, [0.5, 0.6], 0.6)
    slow = outcome(0.0, [0.1, 1.0], 1.0)
    failed = RequestOutcome(due=0.0, end=2.0, error="timeout")
    s = summarize([fast, late, slow, failed], Slo(ttft_ms=200, itl_ms=150))
    assert s.goodput is not None
    assert (s.goodput.requests, s.goodput.share, s.goodput.requests_per_s) == (1, 0.25, 0.5)
    assert s.goodput.output_tokens_per_s == 1.0
    assert "25.0% within the SLO" in summary_text(s)
    assert summarize([fast]).goodput is None


def test_the_itl_limit_counts_tokens_not_events() -> None:
    """Eight tokens in two events, 0.7 s apart: a tenth of a second each."""
    coalesced = outcome(0.0, [0.1, 0.8], 0.8, output_tokens=8)
    assert keeps(coalesced, Slo(itl_ms=100.1))
    assert not keeps(coalesced, Slo(itl_ms=99.9))
    assert keeps(outcome(0.0, [0.1], 0.1), Slo(itl_ms=1))  # one token has no gap
