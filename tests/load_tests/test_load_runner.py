"""The runner against a server in the same process, over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from helpers_load import FakeServer, fake_server

from load_tests.errors import LoadError
from load_tests.report.result import result_of
from load_tests.runner import Run, Target, run
from load_tests.scenario import Scenario

pytestmark = pytest.mark.sockets

SHORT = {"prompt": {"kind": "fixed", "tokens": 20}, "output": {"kind": "fixed", "tokens": 3}}
FAST = {"kind": "constant", "rate": 1000}


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    async with fake_server() as fake:
        yield fake


def scenario(*phases: dict[str, Any], **settings: Any) -> Scenario:
    named = [{"name": f"p{i}", **SHORT, **phase} for i, phase in enumerate(phases)]
    return Scenario.model_validate({"name": "test", "phases": named, **settings})


async def go(server: FakeServer, *phases: dict[str, Any], keep_alive: bool = True, **settings: Any) -> Run:
    target = Target(server.url, api_key="k", keep_alive=keep_alive)
    return await run(scenario(*phases, **settings), target, lambda run: None)


async def test_latencies_count_from_the_intended_time_when_the_server_stalls(server: FakeServer) -> None:
    """No coordinated omission: requests due during a stall are sent and charged for it."""
    server.hold = asyncio.Event()
    running = asyncio.create_task(go(server, {"arrivals": FAST, "requests": 30}))
    async with asyncio.timeout(60):
        while server.running < 30:
            await asyncio.sleep(0.01)
    server.hold.set()
    done = await running
    dues = sorted(o.due for o in done.outcomes)
    assert [round((due - dues[0]) * 1000) for due in dues] == list(range(30))
    assert all(o.sent >= o.due and o.end > o.events[0] for o in done.outcomes)


async def test_phases_follow_each_other_and_only_measured_ones_count(server: FakeServer) -> None:
    warm = {"name": "warm", "arrivals": {"kind": "closed", "concurrency": 2}, "requests": 4, "measured": False}
    steady = {"name": "steady", "arrivals": FAST, "requests": 8, "drain": True}
    burst = {"name": "burst", "arrivals": {"kind": "burst", "size": 5, "every_s": 9}, "requests": 5}
    done = await go(server, warm, steady, burst)
    result = result_of(done)
    assert {name: s.succeeded for name, s in result.phases.items()} == {"warm": 4, "steady": 8, "burst": 5}
    assert (result.total.succeeded, result.total.output_tokens, result.total.cached_tokens) == (13, 39, 39)
    assert done.phases[1].start >= max(o.end for o in done.outcomes if o.phase == 0)
    assert done.phases[2].start >= max(o.end for o in done.outcomes if o.phase == 1)
    assert done.num_planned == 17 and done.num_sent == 17


async def test_an_open_phase_does_not_wait_for_the_answers_of_the_one_before(server: FakeServer) -> None:
    server.hold = asyncio.Event()
    phases = [{"arrivals": FAST, "requests": 3}, {"arrivals": FAST, "requests": 3}]
    running = asyncio.create_task(go(server, *phases))
    async with asyncio.timeout(60):
        while server.running < 6:
            await asyncio.sleep(0.01)
    server.hold.set()
    assert [o.error for o in (await running).outcomes] == [None] * 6


async def test_ids_are_exact_where_they_are_accepted(server: FakeServer) -> None:
    server.overhead = 1  # a BOS token
    done = await go(server, {"arrivals": FAST, "requests": 3})
    assert (done.form.unit, done.form.exact) == ("id", True)
    assert [o.prompt_tokens for o in done.outcomes] == [20, 20, 20]
    assert all(isinstance(token, int) for body in server.bodies for token in body["prompt"])


async def test_words_are_calibrated_by_usage(server: FakeServer) -> None:
    server.takes_ids, server.tokens_per_word, server.overhead = False, 2, 4
    done = await go(server, {"arrivals": FAST, "requests": 3})
    assert done.form.unit == "word" and not done.form.exact
    assert [o.prompt_tokens for o in done.outcomes] == [20, 20, 20]


async def test_words_are_calibrated_by_tokenize_without_usage(server: FakeServer) -> None:
    server.reports_usage, server.tokenizes, server.tokens_per_word = False, True, 2
    done = await go(server, {"arrivals": FAST, "requests": 2})
    assert (done.form.unit, done.form.tokens_per_unit) == ("word", 2)
    assert [len(body["prompt"].split()) for body in server.bodies] == [10, 10]


async def test_asking_for_ids_where_none_are_taken(server: FakeServer) -> None:
    server.takes_ids = False
    with pytest.raises(LoadError, match="takes no token ids"):
        await go(server, {"arrivals": FAST, "requests": 1}, prompt_form="ids")


@pytest.mark.parametrize("refused", [{"ignore_eos"}, {"ignore_eos", "stream_options"}])
async def test_extensions_a_server_refuses_are_given_up(server: FakeServer, refused: set[str]) -> None:
    server.refuse = refused
    done = await go(server, {"arrivals": FAST, "requests": 3})
    assert [o.tokens for o in done.outcomes] == [3, 3, 3]
    assert not refused & {key for body in server.bodies for key in body}


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_each_turn_repeats_the_conversation(server: FakeServer, endpoint: str) -> None:
    turns = {"turns": {"kind": "fixed", "tokens": 3}, "think_s": 0.001}
    done = await go(server, {"arrivals": FAST, "requests": 2, "conversations": turns}, endpoint=endpoint)
    assert sorted(o.turn for o in done.outcomes) == [0, 0, 1, 1, 2, 2]
    if endpoint == "chat":
        longest = [body["messages"] for body in server.bodies if len(body["messages"]) == 5]
        assert [m["role"] for m in longest[0]] == ["user", "assistant", "user", "assistant", "user"]
        assert longest[0][1]["content"] == " 0 1 2"
        texts = [" ".join(m["content"] for m in body["messages"]) for body in server.bodies]
    else:
        texts = [body["prompt"].replace("\n", " ") for body in server.bodies]
        assert len([text for text in texts if text.count("0 1 2") == 2]) == 2
    first, *_ = sorted(texts, key=len)
    assert any(text.startswith(first) and len(text) > len(first) for text in texts)
    assert all(o.text is None for o in done.outcomes)


async def test_an_error_ends_a_conversation(server: FakeServer) -> None:
    server.status = 503
    done = await go(server, {"arrivals": FAST, "requests": 2, "conversations": {"turns": SHORT["output"]}})
    assert [(o.turn, o.error) for o in done.outcomes] == [(0, "http 503 busy")] * 2


async def test_an_error_inside_a_stream_is_an_error(server: FakeServer) -> None:
    server.fail_after = 1
    done = await go(server, {"arrivals": FAST, "requests": 3})
    assert result_of(done).total.errors == {"error event server_error": 3}


async def test_a_closed_loop_ends_after_its_duration(server: FakeServer) -> None:
    done = await go(server, {"arrivals": {"kind": "closed", "concurrency": 3}, "duration_s": 0.2})
    assert server.peak <= 3 and len(done.outcomes) >= 3
    # One that was let out just in time may become due a moment later.
    assert sum(o.due >= done.phases[0].start + 0.2 for o in done.outcomes) <= 3
    assert done.num_planned is None


async def test_connections_can_be_made_anew_for_each_request(server: FakeServer) -> None:
    closed = {"arrivals": {"kind": "closed", "concurrency": 1}, "requests": 4}
    done = await go(server, closed, keep_alive=False)
    assert [o.error for o in done.outcomes] == [None] * 4


async def test_the_same_seed_sends_the_same_requests(server: FakeServer) -> None:
    phase = {"arrivals": {"kind": "closed", "concurrency": 1}, "requests": 4, "prefixes": {"groups": 2, "tokens": 8}}
    await go(server, phase)
    await go(server, phase)
    await go(server, phase, seed=1)
    prompts = [body["prompt"] for body in server.bodies]
    assert prompts[:4] == prompts[4:8] != prompts[8:]


async def test_interrupting_leaves_nothing_running(server: FakeServer) -> None:
    server.hold = asyncio.Event()
    seen: list[Run] = []
    running = asyncio.create_task(run(scenario({"arrivals": FAST, "requests": 5}), Target(server.url), seen.append))
    async with asyncio.timeout(60):
        while server.running < 5:
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        while server.running:
            await asyncio.sleep(0.01)
            server.hold.set()
    assert seen[0].num_sent == 5 and seen[0].phases[0].end > 0
