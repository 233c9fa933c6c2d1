"""A pool with hardly any room: waiting, preemption, refusals, and counters that add up."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from helpers_gateway import error_of
from helpers_server import COMPLETIONS, MODEL, Metrics, Server, count, endless, events, until

pytestmark = pytest.mark.ray

POOL_TOKENS = 96 * 16
REQUESTS, HTTP = "sluicegate_requests_total", "sluicegate_http_requests_total"


TOKENS = 240


def counting(*firsts: int) -> dict[str, Any]:
    """About 300 tokens each to read, and the same numbers going on for 240 more."""
    prompts = ["Count: " + " ".join(f"{i}," for i in range(first, first + 60)) for first in firsts]
    return {"model": MODEL, "prompt": prompts, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}


def grown(before: Metrics, after: Metrics, name: str, **labels: str) -> float:
    return after.total(name, **labels) - before.total(name, **labels)


def test_what_can_never_fit_is_refused_with_the_numbers(tight: Server) -> None:
    before = tight.until_idle()
    with tight.http() as http:
        assert http.get("/v1/models").json()["data"][0]["max_model_len"] == POOL_TOKENS
        for body in (
            count(prompt=[9] * (POOL_TOKENS + 1), max_tokens=1),
            count(prompt=[9] * 1500, max_tokens=37),
            count(prompt=[9] * POOL_TOKENS, max_tokens=1),
        ):
            for stream in (False, True):
                error = error_of(http.post(COMPLETIONS, json={**body, "stream": stream}), 400)
                assert error["code"] == "context_length_exceeded"
                assert str(POOL_TOKENS) in error["message"]
        full = http.post(COMPLETIONS, json=count(prompt=[9] * 1500, max_tokens=36, ignore_eos=True)).json()
        assert full["usage"]["total_tokens"] == POOL_TOKENS
    after = tight.until_idle()
    assert grown(before, after, HTTP, status="400") == 6
    assert grown(before, after, REQUESTS) == 1


def test_preempted_requests_lose_nothing(tight: Server) -> None:
    """Four at a time outgrow the pool; each must still say what it says alone. They come in one body, so that they are
    there at once however busy the machine is."""
    starts = [100, 200, 300, 400, 500]
    before = tight.until_idle()
    first_s: list[float] = []

    def told(*firsts: int) -> tuple[list[str], dict[str, Any]]:
        began, texts, usage = time.perf_counter(), [""] * len(firsts), {}
        body = {**counting(*firsts), "stream": True, "stream_options": {"include_usage": True}}
        with tight.http() as http, http.stream("POST", COMPLETIONS, json=body) as response:
            for event in events(response):
                if event == "[DONE]":
                    return texts, usage
                chunk = json.loads(event)
                for choice in chunk["choices"]:
                    if not texts[choice["index"]]:
                        first_s.append(time.perf_counter() - began)
                    texts[choice["index"]] += choice["text"]
                usage = chunk["usage"] or usage
        raise AssertionError("the stream broke off")

    together, of_all = told(*starts)
    crowded = tight.until_idle()
    alone, of_one = told(*starts[:1])
    after = tight.until_idle()

    assert grown(before, crowded, "sluicegate_preemptions_total") > 0
    assert together[:1] == alone
    for first, text in zip(starts, together, strict=True):
        going_on = " ".join(f"{i}," for i in range(first + 60, first + 80))
        assert text.strip().startswith(going_on), text
    assert of_all["completion_tokens"] == 5 * TOKENS and of_one["completion_tokens"] == TOKENS
    assert of_all["prompt_tokens_details"]["cached_tokens"] < 16
    for name, key in (("prompt", "prompt_tokens"), ("generated", "completion_tokens")):
        assert grown(before, after, f"sluicegate_{name}_tokens_total") == of_all[key] + of_one[key]
    # One first token each, also for those that were preempted; seen by the engine before it is seen by the client.
    assert grown(before, after, "sluicegate_ttft_seconds_count") == len(first_s) == 6
    assert 0 < grown(before, after, "sluicegate_ttft_seconds_sum") <= sum(first_s)
    assert grown(before, after, "sluicegate_queue_seconds_sum") <= grown(before, after, "sluicegate_ttft_seconds_sum")


def test_every_ending_is_counted_once(tight: Server) -> None:
    before = tight.until_idle()
    with tight.http() as http:
        for _ in range(5):
            assert http.post(COMPLETIONS, json=count()).status_code == 200
        for _ in range(5):
            with http.stream("POST", COMPLETIONS, json=endless(n=4) | {"max_tokens": 1500}) as r:  # in turns: no room
                got = events(r)
                for _ in range(3):
                    next(got)
            tight.until_idle()
        assert http.post(COMPLETIONS, json=count(n=2, temperature=1, seed=1)).status_code == 200
        error_of(http.post(COMPLETIONS, json=count(temperature=-1)), 400)
        error_of(http.post(COMPLETIONS, json=count(max_tokens="x")), 400)
        error_of(http.post(COMPLETIONS, json=count(model="some-other-model")), 404)
    until(lambda: grown(before, tight.until_idle(), HTTP, status="499") >= 5, "five that left")
    after = tight.until_idle()
    assert grown(before, after, REQUESTS, finished_reason="length") == 6
    assert grown(before, after, REQUESTS, finished_reason="abort") == 5
    assert grown(before, after, REQUESTS) == 11
    for status, n in (("200", 6), ("499", 5), ("400", 2), ("404", 1)):
        assert grown(before, after, HTTP, status=status) == n, status
    for name in ("ttft", "e2e", "queue", "prefill", "decode"):
        assert grown(before, after, f"sluicegate_{name}_seconds_count") == 11, name
    proxies = [s for s in after.samples if s.name == "sluicegate_http_proxy_info"]
    assert [set(s.labels) for s in proxies] == [{"kind", "replica"}]
    processes = [s for s in after.samples if s.name.startswith("sluicegate_process_")]
    assert processes and all(set(s.labels) == {"replica"} for s in processes)
    others = [s for s in after.samples if s not in proxies and s not in processes]
    known = {"model", "replica", "finished_reason", "status", "le"}
    assert {label for s in others for label in s.labels} <= known
    assert {s.labels["model"] for s in others} <= {MODEL, "none"}


def test_histograms_are_cumulative(tight: Server) -> None:
    buckets: dict[tuple[str, str], list[tuple[float, float]]] = {}
    metrics = tight.until_idle()
    for s in metrics.samples:
        if s.name.endswith("_bucket"):
            buckets.setdefault((s.name, s.labels["replica"]), []).append((float(s.labels["le"]), s.value))
    assert buckets
    for (name, replica), steps in buckets.items():
        values = [value for _, value in sorted(steps)]
        assert values == sorted(values)
        assert values[-1] == metrics.total(name.removesuffix("bucket") + "count", replica=replica)


def test_choices_under_pressure_are_complete_and_leave_nothing(tight: Server) -> None:
    with tight.http() as http:
        done = http.post(COMPLETIONS, json=count(n=6, temperature=0.9, seed=1, max_tokens=40, ignore_eos=True)).json()
        assert [c["finish_reason"] for c in done["choices"]] == ["length"] * 6
        assert done["usage"]["completion_tokens"] == 240
        with http.stream("POST", COMPLETIONS, json=endless(n=4) | {"max_tokens": 1200}) as response:
            next(events(response))
    tight.until_idle()
