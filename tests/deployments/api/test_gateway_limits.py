"""Limits and tiers as clients meet them: what is refused, in which words, and what everything costs in the end."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import random
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from helpers_gateway import COUNT, HI, MODEL, FakeBackend, client, demo_model, error_of, events_of
from helpers_limits import Clock

from deployments.api.rate_limit_headers import duration
from deployments.api.rate_limiter import RateLimiter
from deployments.config.gateway import GatewayConfig
from deployments.config.tiers import Tier
from deployments.gateway.app import create_app
from deployments.limits.base import Grant, Limit, LimitState, LimitStoreDownError, Refusal, Reservation
from deployments.limits.memory import MemoryStore
from deployments.routing.errors import ModelUnavailableError, ReplicaLostError
from engine.errors import InvalidRequestError

CHAT, COMP = "/v1/chat/completions", "/v1/completions"
BODY = {"model": MODEL, "prompt": COUNT, "max_tokens": 16}  # 14 tokens of prompt
SIX = [f"x-ratelimit-{what}-{kind}" for kind in ("requests", "tokens") for what in ("limit", "remaining", "reset")]
FREE = {"authorization": "Bearer sk-free"}
PRO = {"authorization": "Bearer sk-pro"}
OPEN = {"authorization": "Bearer sk-open"}


def config(free: dict[str, Any] | None = None, **more: Any) -> GatewayConfig:
    settings: dict[str, Any] = {
        "tiers": {
            "free": {"priority": 20, "rpm": 20, "tpm": 1000, **(free or {})},
            "pro": {"priority": 10, "rpm": 600, "tpm": 100_000},
            "open": {},
        },
        "default_tier": "free",
        "api_keys": [
            {"key": "sk-free", "org": "acme", "tier": "free"},
            {"key": "sk-free-too", "org": "acme", "tier": "free"},
            {"key": "sk-pro", "org": "acme", "project": "web", "tier": "pro"},
            {"key": "sk-open", "tier": "open"},
        ],
    }
    return GatewayConfig.model_validate(settings | more)


@dataclass
class Desk:
    """A gateway whose store and clock the test holds."""

    config: GatewayConfig
    backend: FakeBackend = field(default_factory=FakeBackend)
    clock: Clock = field(default_factory=Clock)
    verdicts: list[tuple[Any, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = Watched(self.clock)
        told = self.verdicts.append
        self.admission = RateLimiter(self.config, self.store, lambda *v: told(v), lambda *v: told(("settled", *v)))

    def http(self) -> httpx.AsyncClient:
        return client(self.backend, self.config, limiter=self.admission)


class Watched(MemoryStore):
    """Remembers the limits it was asked about."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.limits: dict[str, Limit] = {}

    async def reserve(self, reservation: Reservation) -> Grant | Refusal:
        self.limits.update({limit.name: limit for limit in reservation.limits})
        return await super().reserve(reservation)

    async def used(self) -> dict[str, int]:
        states = await self.peek(tuple(self.limits.values()), "acme")
        return {state.limit.kind.value: state.used for state in states}


async def test_all_six_headers_on_every_answer_of_a_known_tenant() -> None:
    desk = Desk(config())
    async with desk.http() as http:
        first = await http.post(COMP, json=BODY, headers=FREE)
        assert first.status_code == 200
        shown = [first.headers[name] for name in SIX]
        assert shown == ["20", "19", "1m0.101s", "1000", "970", "1m0.101s"]
        streamed = await http.post(
            CHAT, json={"model": MODEL, "messages": HI, "stream": True, "max_tokens": 4}, headers=FREE
        )
        assert streamed.headers["x-ratelimit-remaining-requests"] == "18"
        for answer in (
            await http.post(COMP, json={**BODY, "temperature": 9}, headers=FREE),
            await http.post(COMP, json={**BODY, "model": "nope"}, headers=FREE),
            await http.post(COMP, content=b"{", headers=FREE),
            await http.get("/v1/models", headers=FREE),
            await http.get("/v1/models/nope", headers=FREE),
            await http.post("/tokenize", json={"model": MODEL, "prompt": "hi"}, headers=FREE),
            await http.post("/v1/embeddings", json={"model": MODEL, "input": "hi"}, headers=FREE),
        ):
            assert all(name in answer.headers for name in SIX), answer.text
        desk.backend.fail = ReplicaLostError()
        broken = await http.post(COMP, json=BODY, headers=FREE)
        assert broken.status_code == 503 and all(name in broken.headers for name in SIX)
        unknown = await http.post(COMP, json=BODY, headers={"authorization": "Bearer wrong"})
        unlimited = await http.post(COMP, json=BODY, headers=OPEN)
        assert not any(name in answer.headers for name in SIX for answer in (unknown, unlimited))


async def test_requests_run_out_and_come_back_when_said() -> None:
    desk = Desk(config({"rpm": 3}))
    async with desk.http() as http:
        for left in ("2", "1", "0"):
            desk.clock.now_s += 10
            answer = await http.post(COMP, json=BODY, headers=FREE)
            assert (answer.status_code, answer.headers["x-ratelimit-remaining-requests"]) == (200, left)
        desk.clock.now_s += 5.123
        refused = await http.post(COMP, json=BODY, headers=FREE)
        error = error_of(refused, 429)
        ms = int(refused.headers["retry-after-ms"])
        assert refused.headers["retry-after"] == str(-(-ms // 1000)) and 34_000 < ms < 36_000
        assert "x-should-retry" not in refused.headers
        assert (error["type"], error["code"], error["param"]) == ("requests", "rate_limit_exceeded", None)
        assert error["message"].startswith(f"Rate limit reached for {MODEL} in organization acme (key key-")
        end = f" on requests per min (RPM): Limit 3, Used 3, Requested 1. Please try again in {duration(ms / 1000)}."
        assert error["message"].endswith(end)
        desk.clock.now_s += ms / 1000 - 0.2
        assert (await http.post(COMP, json=BODY, headers=FREE)).status_code == 429
        desk.clock.now_s += 0.2
        assert (await http.post(COMP, json=BODY, headers=FREE)).status_code == 200
    assert [v[1] for v in desk.verdicts if v[0] == "free"].count("requests") == 2


async def test_tokens_run_out_in_openais_words() -> None:
    desk = Desk(config({"tpm": 100}))
    async with desk.http() as http:
        await http.post(COMP, json={**BODY, "max_tokens": 40}, headers=FREE)
        refused = await http.post(COMP, json={**BODY, "max_tokens": 40}, headers=FREE)
        error = error_of(refused, 429)
        assert (error["type"], error["code"]) == ("tokens", "rate_limit_exceeded")
        assert "on tokens per min (TPM): Limit 100, Used 54, Requested 54. Please try again in 1m0." in error["message"]
        assert (refused.headers["retry-after"], refused.headers["x-ratelimit-remaining-tokens"]) == ("61", "46")
        assert (await http.post(COMP, json={**BODY, "max_tokens": 30}, headers=FREE)).status_code == 200
    assert (await desk.store.used())["requests"] == 2  # the refused one cost nothing


async def test_what_never_fits_is_not_worth_a_retry() -> None:
    desk = Desk(config({"tpm": 100}))
    async with desk.http() as http:
        refused = await http.post(COMP, json={**BODY, "max_tokens": 90}, headers=FREE)
    error = error_of(refused, 429)
    assert error["message"].startswith("Request too large for ") and "Limit 100, Requested 104." in error["message"]
    assert refused.headers["x-should-retry"] == "false"
    assert "retry-after" not in refused.headers and "retry-after-ms" not in refused.headers
    assert ("free", "too_large", 0) in desk.verdicts


async def test_all_choices_of_all_prompts_are_reserved() -> None:
    desk = Desk(config())
    seen: list[int] = []

    async def look(step: int) -> None:
        if step == 0:
            seen.append((await desk.store.used())["tokens"])

    desk.backend.gate = look
    async with desk.http() as http:
        body = {**BODY, "prompt": [COUNT, COUNT], "n": 3, "max_tokens": 10}
        answer = (await http.post(COMP, json=body, headers=FREE)).json()
    assert seen == [2 * (14 + 3 * 10)]
    assert (await desk.store.used())["tokens"] == answer["usage"]["total_tokens"] == 2 * 14 + 60


async def test_an_answer_that_says_nothing_of_its_length_fits_the_tier() -> None:
    desk = Desk(config({"tpm": 200}))
    async with desk.http() as http:
        answer = await http.post(CHAT, json={"model": MODEL, "messages": HI}, headers=FREE)
        usage = answer.json()["usage"]
        assert answer.status_code == 200 and usage["total_tokens"] == 200
    desk = Desk(config({"max_tokens": 7}))
    async with desk.http() as http:
        answer = await http.post(CHAT, json={"model": MODEL, "messages": HI}, headers=FREE)
        assert answer.json()["usage"]["completion_tokens"] == 7


@pytest.mark.parametrize("param", ["max_tokens", "max_completion_tokens"])
async def test_more_than_the_tiers_ceiling_is_refused_by_name(param: str) -> None:
    desk = Desk(config({"max_tokens": 7, "max_context": 60}))
    async with desk.http() as http:
        error = error_of(await http.post(CHAT, json={"model": MODEL, "messages": HI, param: 8}, headers=FREE), 400)
        assert (error["param"], error["code"]) == (param, "integer_above_max_value")
        assert "allows a value <= 7, but got 8" in error["message"]
        long = error_of(await http.post(COMP, json={**BODY, "prompt": COUNT * 5, "max_tokens": 5}, headers=FREE), 400)
        assert long["code"] == "context_length_exceeded" and "context length is 60 tokens" in long["message"]
        assert (await http.post(COMP, json=BODY, headers=PRO)).status_code == 200


async def test_models_of_other_tiers_do_not_exist() -> None:
    backend = FakeBackend({MODEL: demo_model(), "demo/pro": demo_model(id="demo/pro")})
    desk = Desk(config({"models": [MODEL]}), backend)
    async with desk.http() as http:
        assert [m["id"] for m in (await http.get("/v1/models", headers=FREE)).json()["data"]] == [MODEL]
        error = error_of(await http.post(COMP, json={**BODY, "model": "demo/pro"}, headers=FREE), 404)
        assert error["code"] == "model_not_found"
        assert (await http.get("/v1/models/demo/pro", headers=FREE)).status_code == 404
        assert (await http.post(COMP, json={**BODY, "model": "demo/pro"}, headers=PRO)).status_code == 200


@pytest.mark.parametrize("asked", [None, "auto", "default", "pro"])
async def test_the_service_tier_used_is_told(asked: str | None) -> None:
    desk = Desk(config())
    body = {"model": MODEL, "messages": HI, "max_tokens": 2, "service_tier": asked}
    async with desk.http() as http:
        assert (await http.post(CHAT, json=body, headers=PRO)).json()["service_tier"] == "pro"
        streamed = await http.post(CHAT, json={**body, "stream": True}, headers=PRO)
        assert {event["service_tier"] for event in events_of(streamed.content)[:-1]} == {"pro"}


@pytest.mark.parametrize("asked", ["flex", "free", "priority", "x" * 500])
async def test_another_service_tier_is_refused(asked: str) -> None:
    desk = Desk(config())
    async with desk.http() as http:
        answer = await http.post(CHAT, json={"model": MODEL, "messages": HI, "service_tier": asked}, headers=PRO)
    error = error_of(answer, 400)
    assert error["param"] == "service_tier" and "'auto', 'default', 'pro'" in error["message"]


@pytest.mark.parametrize(("asked", "expected"), [(None, 20), (0, 20), (5, 25)])
async def test_priority_can_only_fall_below_the_tiers(asked: int | None, expected: int) -> None:
    desk = Desk(config())
    async with desk.http() as http:
        await http.post(COMP, json={**BODY, "priority": asked}, headers=FREE)
        assert desk.backend.calls[0][0].priority == expected
        error_of(await http.post(COMP, json={**BODY, "priority": -1}, headers=FREE), 400)


async def test_choices_count_as_running_sequences() -> None:
    desk = Desk(config({"rpm": 5, "tpm": 10_000, "max_concurrent": 4}))
    async with desk.http() as http:
        refused = await http.post(COMP, json=BODY | {"prompt": [COUNT, COUNT], "n": 3}, headers=FREE)
        assert refused.headers["x-should-retry"] == "false"
        message = error_of(refused, 429)["message"]
        assert "on concurrent sequences: Limit 4, Requested 6." in message and "choices" in message
        assert (await http.post(COMP, json=BODY | {"prompt": [COUNT, COUNT], "n": 2}, headers=FREE)).status_code == 200


@pytest.mark.parametrize(
    ("path", "status"), [("/tokenize", 200), ("/v1/embeddings", 400)], ids=["tokenize", "embeddings"]
)
async def test_what_generates_nothing_counts_as_a_request_too(path: str, status: int) -> None:
    desk = Desk(config({"rpm": 2}))
    body = {"model": MODEL, "prompt": COUNT, "input": COUNT}
    async with desk.http() as http:
        got = [(await http.post(path, json=body, headers=FREE)).status_code for _ in range(3)]
    assert got == [status, status, 429]


async def test_a_key_of_a_tier_that_is_gone_is_turned_away() -> None:
    desk = Desk(config())
    kept = desk.config.model_copy(update={"tiers": {"pro": Tier()}, "default_tier": "pro"})
    async with client(desk.backend, kept) as http:
        assert "'free'" in error_of(await http.post(COMP, json=BODY, headers=FREE), 403)["message"]
        assert (await http.post(COMP, json=BODY, headers=PRO)).status_code == 200


async def test_levels_are_taken_together() -> None:
    limits = {"orgs": {"acme": {"rpm": 3}}, "projects": {"acme/web": {"tpm": 100}}}
    desk = Desk(config(limits=limits))
    async with desk.http() as http:
        first = await http.post(COMP, json={**BODY, "max_tokens": 20}, headers=PRO)
        assert [first.headers[name] for name in (SIX[0], SIX[1], SIX[3], SIX[4])] == ["3", "2", "100", "66"]
        refused = error_of(await http.post(COMP, json={**BODY, "max_tokens": 60}, headers=PRO), 429)
        assert "(project web) on tokens per min (TPM): Limit 100" in refused["message"]
        for key in ("sk-free", "sk-free-too"):
            answer = await http.post(COMP, json=BODY, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200
        refused = error_of(await http.post(COMP, json=BODY, headers=FREE), 429)
        assert "in organization acme on requests per min (RPM): Limit 3, Used 3" in refused["message"]


async def test_concurrent_requests_are_limited_and_the_refused_one_is_free() -> None:
    desk = Desk(config({"rpm": 2, "max_concurrent": 1}))
    go, begun = asyncio.Event(), asyncio.Event()

    async def wait(step: int) -> None:
        begun.set()
        await go.wait()

    desk.backend.gate = wait
    async with desk.http() as http:
        running = asyncio.create_task(http.post(COMP, json=BODY, headers=FREE))
        await begun.wait()
        refused = await http.post(COMP, json=BODY, headers=FREE)
        message = error_of(refused, 429)["message"]
        assert "on concurrent sequences: Limit 1, Used 1, Requested 1. Please try again in 1s." in message
        assert (refused.headers["retry-after"], refused.headers["retry-after-ms"]) == ("1", "1000")
        go.set()
        assert (await running).status_code == 200
        assert (await http.post(COMP, json=BODY, headers=FREE)).status_code == 200
    assert await desk.store.used() == {"requests": 2, "tokens": 60, "concurrent": 0}


ENDINGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, int]]] = {
    # backend, body, what it costs
    "done": ({}, {}, {"requests": 1, "tokens": 30}),
    "stopped early": ({}, {"stop": " 6"}, {"requests": 1, "tokens": 14 + 5}),
    "replica lost before": ({"fail": ReplicaLostError()}, {}, {"requests": 0, "tokens": 0}),
    "replica lost in the middle": ({"fail": ReplicaLostError(), "fail_at": 5}, {}, {"requests": 0, "tokens": 0}),
    "no replica": ({"fail": ModelUnavailableError()}, {}, {"requests": 0, "tokens": 0}),
    "bug": ({"fail": RuntimeError("bug")}, {}, {"requests": 0, "tokens": 0}),
    "refused by the engine": ({"fail": InvalidRequestError("no")}, {}, {"requests": 1, "tokens": 0}),
    "ended short": ({"end_at": 3}, {}, {"requests": 0, "tokens": 0}),
    "stream done": ({}, {"stream": True}, {"requests": 1, "tokens": 30}),
    "stream lost before": ({"fail": ReplicaLostError()}, {"stream": True}, {"requests": 0, "tokens": 0}),
    "stream lost": ({"fail": ReplicaLostError(), "fail_at": 5}, {"stream": True}, {"requests": 1, "tokens": 14 + 5}),
    "wrong field": ({}, {"temperature": 9}, {"requests": 1, "tokens": 0}),
    "wrong model": ({}, {"model": "nope"}, {"requests": 1, "tokens": 0}),
}


@pytest.mark.parametrize("name", ENDINGS)
async def test_every_ending_costs_what_it_should(name: str) -> None:
    backend, body, expected = ENDINGS[name]
    desk = Desk(config({"max_concurrent": 1}), FakeBackend(**backend))
    async with desk.http() as http:
        for round_number in range(1, 4):
            await http.post(COMP, json=BODY | body, headers=FREE)
            used = await desk.store.used()
            assert used.pop("concurrent", 0) == 0
            assert used == {kind: amount * round_number for kind, amount in expected.items()}
    admitted = sum(v[1] == "admitted" for v in desk.verdicts)
    assert sum(v[0] == "settled" for v in desk.verdicts) == admitted


@pytest.mark.parametrize("step", [0, 3])
async def test_a_client_that_leaves_pays_for_what_was_done(step: int) -> None:
    desk = Desk(config({"max_concurrent": 1}))
    reached = asyncio.Event()

    async def hang(at: int) -> None:
        if at == step:
            reached.set()
            await asyncio.Event().wait()

    desk.backend.gate = hang
    async with desk.http() as http:
        task = asyncio.create_task(http.post(COMP, json={**BODY, "stream": True}, headers=FREE))
        await reached.wait()
        assert await desk.store.used() == {"requests": 1, "tokens": 30, "concurrent": 1}
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert await desk.store.used() == {"requests": 1, "tokens": 14 + step, "concurrent": 0}


async def test_mistakes_use_up_requests() -> None:
    desk = Desk(config())
    async with desk.http() as http:
        statuses = [(await http.post(COMP, json={**BODY, "n": 0}, headers=FREE)).status_code for _ in range(30)]
        assert statuses == [400] * 20 + [429] * 10
        refused = await http.post(COMP, json=BODY, headers=FREE)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert (await http.get("/v1/models", headers=FREE)).status_code == 200


async def test_a_store_out_of_reach_is_a_503_with_a_time() -> None:
    class Down(MemoryStore):
        async def reserve(self, reservation: Reservation) -> Grant | Refusal:
            raise LimitStoreDownError(2.5)

        async def peek(self, limits: tuple[Limit, ...], org: str) -> tuple[LimitState, ...]:
            raise LimitStoreDownError

    settings = config()
    async with client(FakeBackend(), settings, limiter=RateLimiter(settings, Down())) as http:
        refused = await http.post(COMP, json=BODY, headers=FREE)
        assert error_of(refused, 503)["code"] == "limits_unavailable"
        assert (refused.headers["retry-after"], refused.headers["retry-after-ms"]) == ("3", "2500")
        assert (await http.post(COMP, json={**BODY, "n": 0}, headers=FREE)).status_code == 400
        assert (await http.get("/v1/models", headers=FREE)).status_code == 200
        assert (await http.post(COMP, json=BODY, headers=OPEN)).status_code == 200


class SlowClock(Clock):
    """Time passes only when everybody sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    async def sleep(self, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self.sleepers, (self.now_s + seconds, next(self._order), future))
        await future

    def wake_next(self) -> None:
        self.now_s, _, future = heapq.heappop(self.sleepers)
        future.set_result(None)


async def call(app: Any, body: bytes) -> tuple[int, dict[str, str], Any]:
    """A POST without an HTTP client, which would be slower than the gateway."""
    sent: list[Any] = []
    unread = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return unread.pop() if unread else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    head = [(b"authorization", b"Bearer sk-free"), (b"content-type", b"application/json")]
    head += [(b"content-length", str(len(body)).encode())]
    scope = {
        "type": "http",
        "method": "POST",
        "path": COMP,
        "raw_path": COMP.encode(),
        "query_string": b"",
        "headers": head,
    }
    await app(scope, receive, send)
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, json.loads(b"".join(m.get("body", b"") for m in sent))


@pytest.mark.slow
async def test_two_hundred_clients_never_exceed_a_thousand_tokens_a_minute_and_get_all_of_them() -> None:
    clock, draw, busy_s = SlowClock(), random.Random(3), 150.0
    backend = FakeBackend(gate=lambda step: clock.sleep(draw.uniform(0.005, 0.05)))
    settings = config({"rpm": 100_000})
    app = create_app(settings, backend, limiter=RateLimiter(settings, MemoryStore(clock)))
    begin_s, admitted = clock.now_s, list[tuple[float, int]]()

    async def one_client() -> None:
        while clock.now_s < begin_s + busy_s:
            at_s = clock.now_s
            body = {**BODY, "max_tokens": draw.randrange(1, 40), "stop": f" {draw.randrange(6, 9)}"}
            status, headers, answer = await call(app, json.dumps(body).encode())
            if status == 200:
                admitted.append((at_s, answer["usage"]["total_tokens"]))
            else:
                assert status == 429
                await clock.sleep(int(headers["retry-after-ms"]) / 1000 + draw.uniform(0, 10))

    clients = [asyncio.create_task(one_client()) for _ in range(200)]
    while not all(task.done() for task in clients):
        for _ in range(20):
            await asyncio.sleep(0)
        if clock.sleepers:
            clock.wake_next()
    for task in clients:
        task.result()
    most = max(sum(n for t, n in admitted if end - 60 < t <= end) for end, _ in admitted)
    two_minutes = sum(n for t, n in admitted if t < begin_s + 120.2)
    assert most <= 1000
    assert two_minutes >= 0.95 * 2000


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0ms"),
        (0.0201, "21ms"),
        (0.02, "20ms"),
        (1.0, "1s"),
        (47.152, "47.152s"),
        (360.0, "6m0s"),
        (432.5, "7m12.5s"),
        (59.9999, "1m0s"),
    ],
)
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
