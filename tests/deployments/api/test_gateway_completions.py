"""/v1/completions: prompts of every shape, echo, logprobs, scoring."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

import pytest
from helpers_gateway import COUNT, COUNT_24, COUNT_24_IDS, MODEL, OWL_IDS, FakeBackend, client, demo_text, events_of

COMP = "/v1/completions"
OWL = "\U0001f989"


async def post(backend: FakeBackend, **fields: Any) -> Any:
    async with client(backend) as http:
        response = await http.post(COMP, json={"model": MODEL, "prompt": COUNT, **fields})
    assert response.status_code == 200, response.text
    return events_of(response.content) if fields.get("stream") else response.json()


def merged(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    """One choice put together from its chunks, in the shape of the plain body's."""
    whole: dict[str, Any] = {"index": index, "text": "", "logprobs": None, "finish_reason": None}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            assert whole["finish_reason"] is None
            whole["text"] += choice["text"]
            whole["finish_reason"] = choice["finish_reason"]
            if choice["logprobs"] is not None:
                whole["logprobs"] = whole["logprobs"] or {key: [] for key in choice["logprobs"]}
                for key, values in choice["logprobs"].items():
                    whole["logprobs"][key] += values
    return whole


async def test_whole_body_and_default_length() -> None:
    body = await post(FakeBackend())
    assert body["id"].startswith("cmpl-") and body["object"] == "text_completion" and body["model"] == MODEL
    assert body["usage"]["completion_tokens"] == 16
    assert body["choices"] == [{"index": 0, "text": COUNT_24[:16], "logprobs": None, "finish_reason": "length"}]


async def test_stream_is_the_same_answer() -> None:
    events = await post(FakeBackend(), max_tokens=24, stream=True)
    assert events[-1] == "[DONE]" and {chunk["object"] for chunk in events[:-1]} == {"text_completion"}
    assert merged(events[:-1]) == {"index": 0, "text": COUNT_24, "logprobs": None, "finish_reason": "length"}
    assert all("usage" not in chunk for chunk in events[:-1])


async def test_prompt_shapes() -> None:
    ids = demo_text().tokenizer.encode(COUNT)
    shapes: list[tuple[Any, list[list[int]]]] = [
        (COUNT, [ids]),
        ([COUNT], [ids]),
        (ids, [ids]),
        ([ids], [ids]),
        ([COUNT, "hi"], [ids, demo_text().tokenizer.encode("hi")]),
        ([[9825, 42], [9825]], [[9825, 42], [9825]]),
    ]
    for prompt, want in shapes:
        backend = FakeBackend()
        body = await post(backend, prompt=prompt, max_tokens=2)
        assert len(backend.calls) == 1
        assert [list(request.prompt) for request in backend.calls[0]] == want
        assert [c["index"] for c in body["choices"]] == list(range(len(want)))
        assert body["usage"]["prompt_tokens"] == sum(map(len, want))


async def test_index_is_prompt_times_n_plus_choice() -> None:
    backend = FakeBackend(script=lambda r, i: [r.prompt[0] + i])
    body = await post(backend, prompt=[[1000], [2000]], n=2, max_tokens=1)
    shown = [demo_text().tokenizer.token_text(i) for i in (1000, 1001, 2000, 2001)]
    assert [c["text"] for c in body["choices"]] == shown
    events = await post(backend, prompt=[[1000], [2000]], n=2, max_tokens=1, stream=True)
    assert [merged(events[:-1], i)["text"] for i in range(4)] == shown


@pytest.mark.parametrize("k", [0, 1, 3])
async def test_logprobs(k: int) -> None:
    body = await post(FakeBackend(), max_tokens=3, logprobs=k)
    got = body["choices"][0]["logprobs"]
    assert got["tokens"] == [" ", "5", ","]
    assert got["token_logprobs"] == [-0.25] * 3
    assert got["text_offset"] == [0, 1, 2]
    assert [len(top) for top in got["top_logprobs"]] == [max(1, k)] * 3
    assert all(top[token] == -0.25 for token, top in zip(got["tokens"], got["top_logprobs"], strict=True))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("prompt", "count", "whole"),
    [("\n3. Lena owns 41", 9, True), ("  two spaces", 3, True), (f"say {OWL} now", 5, False)],
)
async def test_echo(prompt: str, count: int, whole: bool, n: int, stream: bool) -> None:
    got = await post(FakeBackend(), prompt=prompt, echo=True, logprobs=1, max_tokens=5, n=n, stream=stream)
    for index in range(n):
        choice = merged(got[:-1], index) if stream else got["choices"][index]
        logprobs, text = choice["logprobs"], choice["text"]
        assert text == prompt + " 5, 6"
        assert len(logprobs["tokens"]) == count + 5
        assert {len(values) for values in logprobs.values()} == {count + 5}
        assert logprobs["token_logprobs"] == [None] + [-0.25] * (count + 4)
        assert logprobs["top_logprobs"][0] is None
        offsets = logprobs["text_offset"]
        assert offsets == sorted(offsets)
        if whole:
            assert "".join(logprobs["tokens"]) == text
            for token, offset in zip(logprobs["tokens"], offsets, strict=True):
                assert text[offset:].startswith(token)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize(
    ("prompt", "made"),
    [
        (OWL_IDS[:1], [*OWL_IDS[1:], 28]),
        (OWL_IDS[:2], [*OWL_IDS[2:], 28]),
        ([28, *OWL_IDS[:2]], [28, 28]),  # it stays broken
        (OWL_IDS[:2], []),
        ([28], OWL_IDS[:2]),
        ([28, *OWL_IDS], [28]),
    ],
)
async def test_echo_across_a_broken_character(
    prompt: Sequence[int], made: Sequence[int], logprobs: int | None, n: int, stream: bool
) -> None:
    backend = FakeBackend(script=lambda *_: made)
    asked: dict[str, Any] = {"logprobs": logprobs} if logprobs is not None else {}
    got = await post(
        backend, prompt=prompt, echo=True, max_tokens=len(made), n=n, stream=stream, ignore_eos=True, **asked
    )
    tokenizer = demo_text().tokenizer
    for index in range(n):
        choice = merged(got[:-1], index) if stream else got["choices"][index]
        assert choice["text"] == tokenizer.decode([*prompt, *made])
        if logprobs is not None:
            offsets = choice["logprobs"]["text_offset"]
            assert offsets == [whole_characters([*prompt, *made][:i]) for i in range(len(offsets))]
            assert len(offsets) == len(prompt) + len(made)


def whole_characters(ids: Sequence[int]) -> int:
    """How many characters these tokens complete."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return len(decoder.decode(b"".join(map(demo_text().tokenizer.token_bytes, ids))))


async def test_echo_without_logprobs_asks_for_no_scores() -> None:
    backend = FakeBackend()
    events = await post(backend, echo=True, max_tokens=2, stream=True)
    assert events[0]["choices"][0]["text"] == COUNT
    assert merged(events[:-1])["text"] == COUNT + " 5"
    assert backend.calls[0][0].sampling.prompt_logprobs is None


@pytest.mark.parametrize("stream", [False, True])
async def test_scoring_without_generating(stream: bool) -> None:
    backend = FakeBackend()
    options = {"include_usage": True} if stream else None
    got = await post(backend, echo=True, logprobs=1, max_tokens=0, stream=stream, stream_options=options)
    choice = merged(got[:-1]) if stream else got["choices"][0]
    usage = got[-2]["usage"] if stream else got["usage"]
    assert choice["text"] == COUNT and choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"] == [None] + [-0.25] * 13
    assert usage["completion_tokens"] == 0 and usage["prompt_tokens"] == 14
    assert backend.calls[0][0].sampling.prompt_logprobs == 1


async def test_nothing_at_all_is_a_valid_answer() -> None:
    body = await post(FakeBackend(), max_tokens=0)
    assert body["choices"][0]["text"] == "" and body["usage"]["completion_tokens"] == 0


async def test_stop_ids_and_special_tokens() -> None:
    backend = FakeBackend(script=lambda r, i: [*COUNT_24_IDS[:5], 2])
    body = await post(backend, max_tokens=24)
    assert body["choices"][0]["text"] == " 5, 6" and body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 6


async def test_usage_chunk_counts_all_choices() -> None:
    events = await post(FakeBackend(), n=2, max_tokens=24, stream=True, stream_options={"include_usage": True})
    usage = events[-2]["usage"]
    assert events[-2]["choices"] == []
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (14, 48, 62)
    assert all(chunk["usage"] is None for chunk in events[:-2])


async def test_tenants_do_not_share_salts_and_ids_are_unique() -> None:
    backend = FakeBackend()
    await post(backend, prompt=["a", "b"], max_tokens=1, cache_salt="s")
    await post(backend, prompt=["a", "b"], max_tokens=1)
    first, second = backend.calls
    ids = [request.request_id for request in (*first, *second)]
    assert len(set(ids)) == 4
    assert first[0].cache_salt == first[1].cache_salt != second[0].cache_salt


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 20}, {"logprobs": 5}, {"logprobs": 1, "echo": True}, {}])
async def test_scores_are_worded_off_the_event_loop(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """8000 scored tokens take a quarter of a second."""
    worked: list[bool] = []

    async def watched(work: Any, heavy: bool) -> Any:
        worked.append(heavy)
        return work()

    monkeypatch.setattr("deployments.api.generation.offload", watched)
    await post(FakeBackend(), prompt=[28] * 100, max_tokens=2, **fields)
    assert worked == [bool(fields)]


async def test_prompt_logprobs_extension() -> None:
    body = await post(FakeBackend(), max_tokens=1, prompt_logprobs=1)
    scored = body["choices"][0]["prompt_logprobs"]
    assert len(scored) == 14 and scored[0] is None and scored[1]["42"]["decoded_token"] == ":"
