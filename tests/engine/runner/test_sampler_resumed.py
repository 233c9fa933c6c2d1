"""A sampler that is told of a sequence's output draws as the one that has made it."""

from __future__ import annotations

import pytest
import torch

from engine.runner.sampler import Sampler
from engine.types import NewSequence, SamplingParams

VOCAB, PROMPT = 64, (3, 4, 5)
ENDS = frozenset({2})


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=30, temperature=0.0, frequency_penalty=1.5, presence_penalty=0.7),
        SamplingParams(max_tokens=30, temperature=1.0, repetition_penalty=1.8),
        SamplingParams(max_tokens=30, temperature=0.9, top_p=0.8, min_tokens=6, presence_penalty=2.0),
    ],
)
@pytest.mark.parametrize("cut", [1, 3, 7])
def test_history_positions_and_bans_go_on(params: SamplingParams, cut: int) -> None:
    torch.set_num_threads(1)
    logits = torch.randn(12, VOCAB, generator=torch.Generator().manual_seed(5))

    def draw(sampler: Sampler, step: int) -> int:
        [(token, _)] = sampler.sample([0], [len(PROMPT) + step], logits[step : step + 1].clone())
        return token

    first = Sampler(VOCAB, torch.device("cpu"))
    first.add(NewSequence(0, params, 11, PROMPT, end_ids=ENDS))
    tokens = [draw(first, step) for step in range(12)]
    second = Sampler(VOCAB, torch.device("cpu"))
    second.add(NewSequence(0, params, 11, PROMPT, tuple(tokens[:cut]), ENDS))
    assert [draw(second, step) for step in range(cut, 12)] == tokens[cut:]
