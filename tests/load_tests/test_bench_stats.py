from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from load_tests.bench.client import Outcome
from load_tests.bench.stats import percentile, summarize, table
from load_tests.bench.workload import poisson_arrivals, prompt, words_for


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 100))
def test_percentile_is_numpys(values: list[float], p: float) -> None:
    assert percentile(sorted(values), p) == pytest.approx(float(np.percentile(values, p)), rel=1e-9, abs=1e-9)


def test_latencies_count_from_when_a_request_was_due() -> None:
    late = Outcome(due=10.0, sent=10.5, end=12.0, events=[11.0, 11.2, 11.6], prompt_tokens=5, output_tokens=3)
    s = summarize([late])
    assert s.latency_ms["ttft"]["p50"] == 1000
    assert s.latency_ms["e2e"]["p50"] == 2000
    assert s.latency_ms["itl"]["p50"] == pytest.approx(300)
    assert s.latency_ms["tpot"]["p50"] == pytest.approx(300)
    assert (s.prompt_tokens, s.output_tokens, s.duration_s) == (5, 3, 2.0)
    assert s.output_tokens_per_s == 1.5


def test_failures_are_counted_by_kind_and_kept_out_of_latencies() -> None:
    good = Outcome(due=0.0, end=1.0, events=[0.5], prompt_tokens=1, output_tokens=1)
    bad = [Outcome(due=0.0, end=9.0, error="timeout"), Outcome(due=0.0, end=4.0, error="timeout")]
    s = summarize([good, *bad, Outcome(due=0.0, end=2.0, error="http 429")])
    assert s.errors == {"timeout": 2, "http 429": 1}
    assert (s.requests, s.succeeded, s.duration_s) == (4, 1, 9.0)
    assert s.latency_ms["e2e"]["max"] == 1000
    assert "2 x timeout" in table(s)


def test_nothing_succeeded() -> None:
    s = summarize([Outcome(due=0.0, end=1.0, error="timeout")])
    assert s.latency_ms == {} and s.output_tokens_per_s == 0
    assert "0 ok, 1 failed" in table(s)


def test_without_usage_events_are_taken_for_tokens() -> None:
    assert summarize([Outcome(due=0.0, end=1.0, events=[0.1, 0.2])]).output_tokens == 2


def test_prompts_are_distinct_and_repeatable() -> None:
    first = [prompt(rng, 50) for rng in [random.Random(1)] for _ in range(100)]
    assert first == [prompt(rng, 50) for rng in [random.Random(1)] for _ in range(100)]
    assert len({" ".join(text.split()[:8]) for text in first}) == 100


def test_poisson_arrivals_have_the_rate() -> None:
    times = list(poisson_arrivals(random.Random(0), 50.0, 5000))
    assert times[0] == 0.0 and times == sorted(times)
    assert times[-1] / len(times) == pytest.approx(1 / 50, rel=0.05)


def test_words_follow_the_measured_tokens_per_word() -> None:
    assert words_for(1000, 200, 400) == 500
    assert words_for(1000, 200, None) == 1000
    assert words_for(1000, 200, 1) == 1500  # a server that counts oddly cannot blow prompts up
