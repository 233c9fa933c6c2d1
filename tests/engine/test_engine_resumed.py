"""An engine that goes on with another's output gives what that one would have given."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_executor import FakeExecutor
from helpers_gateway import demo_text

from deployments.routing.continuation import Continuation
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ContextLengthError, InvalidRequestError
from engine.types import GenerateRequest, SamplingParams, TokenDelta

PARAMS = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
PROMPT = tuple(range(10, 40))


def engine(executor: FakeExecutor | None = None) -> Engine:
    config = EngineConfig("none", max_num_batched_tokens=32)
    return Engine(config, executor=executor or FakeExecutor(), text=demo_text())


def run(e: Engine, requests: tuple[GenerateRequest, ...], steps: int = 10**6) -> list[TokenDelta]:
    for request in requests:
        e.add(request)
    got: list[TokenDelta] = []
    while e.has_work and steps:
        got += e.step()
        steps -= 1
    return got


def whole(request: GenerateRequest, cut: int) -> tuple[list[TokenDelta], list[GenerateRequest]]:
    """What a client gets when the first engine is lost after `cut` steps."""
    journey, asked = Continuation([request]), []
    seen: list[TokenDelta] = []
    for steps in (cut, 10**6):
        if not journey.complete:
            asked += journey.rest(0.0)
            fresh, fault = journey.take(run(engine(), tuple(asked[-1:]) if steps != cut else tuple(asked), steps))
            assert fault is None
            seen += fresh
    assert journey.complete
    return seen, asked


@pytest.mark.parametrize("cut", range(22))
@pytest.mark.parametrize("changes", [{}, {"logprobs": 0}, {"min_tokens": 9}, {"stop": ("ing",)}], ids=repr)
def test_text_tokens_logprobs_and_counts_are_the_same(cut: int, changes: dict[str, object]) -> None:
    request = GenerateRequest("r", PROMPT, replace(PARAMS, **changes))  # type: ignore[arg-type]
    straight = run(engine(), (request,))
    seen, _ = whole(request, cut)
    for name in ("text", "token_ids", "logprobs"):
        assert [x for d in seen for x in getattr(d, name)] == [x for d in straight for x in getattr(d, name)]
    last, expected = seen[-1], straight[-1]
    assert (last.finish_reason, last.num_prompt_tokens, last.num_completion_tokens) == (
        expected.finish_reason,
        expected.num_prompt_tokens,
        expected.num_completion_tokens,
    )


def test_the_rank_is_told_what_is_output() -> None:
    executor = FakeExecutor()
    e = engine(executor)
    e.add(GenerateRequest("r", (*PROMPT, 50, 51), PARAMS, resumed_tokens=2))
    e.step()
    [new] = executor.params.values()
    assert (new.prompt, new.output) == (PROMPT, (50, 51))  # type: ignore[attr-defined]


def test_the_first_delta_of_a_resumed_request_has_all_its_text_and_no_prompt_logprobs() -> None:
    straight = run(engine(), (GenerateRequest("r", PROMPT, PARAMS),))
    tokens = [t for d in straight for t in d.token_ids]
    resumed = run(engine(), (GenerateRequest("r", (*PROMPT, *tokens[:5]), PARAMS, resumed_tokens=5),))
    assert resumed[0].text == "".join(d.text for d in straight[:6])
    assert resumed[0].num_completion_tokens == 6 and resumed[0].num_prompt_tokens == len(PROMPT)
    assert resumed[0].prompt_logprobs == () and resumed[0].timings is None


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (GenerateRequest("r", PROMPT, PARAMS, resumed_tokens=-1), InvalidRequestError),
        (GenerateRequest("r", PROMPT, PARAMS, resumed_tokens=30), InvalidRequestError),
        (GenerateRequest("r", PROMPT, PARAMS, resumed_tokens=20), InvalidRequestError),
        (GenerateRequest("r", PROMPT, replace(PARAMS, n=2), resumed_tokens=2), InvalidRequestError),
        (GenerateRequest("r", PROMPT, replace(PARAMS, max_tokens=500), resumed_tokens=2), ContextLengthError),
    ],
)
def test_what_cannot_be_resumed(request_: GenerateRequest, error: type[Exception]) -> None:
    e = engine()
    with pytest.raises(error):
        e.add(request_)
    assert not e.has_work


def test_output_that_has_ended_already_is_refused_and_nothing_stays() -> None:
    e = engine()
    word = tuple(demo_text().tokenizer.encode("stop here"))
    with pytest.raises(InvalidRequestError):
        e.add(GenerateRequest("r", (*PROMPT, *word), replace(PARAMS, stop=("stop",)), resumed_tokens=len(word)))
    assert not e.has_work and e.stats().waiting == 0
