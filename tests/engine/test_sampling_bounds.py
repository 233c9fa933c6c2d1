"""Settings that no sampler can follow are refused before they reach a step, where they would end everybody's."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from helpers_models import make_gguf

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import InvalidRequestError
from engine.types import GenerateRequest, SamplingParams


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = make_gguf(tmp_path_factory.mktemp("model"))
    return Engine(EngineConfig(model=str(path), device="cpu", num_kv_blocks=9, max_model_len=64))


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": math.nan},
        {"temperature": math.inf, "min_tokens": 1},
        {"temperature": -0.1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_p": math.nan},
        {"top_k": -1},
        {"min_p": 2.0},
        {"presence_penalty": math.nan},
        {"frequency_penalty": math.inf},
        {"repetition_penalty": 0.0},
        {"n": 0},
        {"max_tokens": -1},
        {"min_tokens": -1},
        {"logprobs": -1},
        {"prompt_logprobs": -1},
        {"logit_bias": ((5, math.nan),)},
        {"logit_bias": ((10**6, 1.0),)},
        {"stop_token_ids": frozenset({-1})},
        {"stop": ("",)},
    ],
    ids=lambda wrong: "-".join(map(str, wrong.items())),
)
def test_it_is_named_and_disturbs_nobody(engine: Engine, wrong: dict[str, Any]) -> None:
    right = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    engine.add(GenerateRequest("good", (5, 6, 7), right))
    with pytest.raises(InvalidRequestError) as refused:
        engine.add(GenerateRequest("bad", (5, 6, 7), replace(right, **wrong)))
    assert refused.value.param == next(iter(wrong))
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    assert sum(len(delta.token_ids) for delta in deltas) == 3 and {delta.request_id for delta in deltas} == {"good"}
