"""A sequence whose logits are no numbers ends alone: its neighbours and those that get its blocks notice nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_models import make_gguf, make_hf_dir
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.engine import Engine
from engine.types import FinishReason, GenerateRequest, SamplingParams, TokenDelta

POISON = 77  # the token whose embedding is not a number
GOOD = [list(range(5, 40)), list(range(100, 133))]
BAD = [*range(5, 25), *range(150, 170), POISON]


def make(tmp_path: Path, **settings: Any) -> Engine:
    path = make_hf_dir(tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    always: dict[str, Any] = {"device": "cpu", "num_kv_blocks": 9, "block_size": 16, "max_model_len": 64}
    return Engine(EngineConfig(model=str(path), tokenizer=str(make_gguf(tmp_path)), **always | settings))


def run(engine: Engine, **prompts: list[int]) -> dict[str, list[TokenDelta]]:
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    for name, prompt in prompts.items():
        engine.add(GenerateRequest(name, tuple(prompt), sampling))
    out: dict[str, list[TokenDelta]] = {name: [] for name in prompts}
    while engine.has_work:
        for delta in engine.step():
            out[delta.request_id].append(delta)
    return out


def ids(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"attention_backend": "torch"},
        {"attention_backend": "torch", "kv_cache_dtype": "fp8_e4m3"},
        {"kv_cache_dtype": "int8"},
        {"max_num_batched_tokens": 16},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())) or "default",
)
def test_one_sequence_ends_and_the_others_go_on(tmp_path: Path, settings: dict[str, Any]) -> None:
    engine = make(tmp_path, **settings)
    alone = [ids(run(engine, one=prompt)["one"]) for prompt in GOOD]
    assert all(len(got) == 8 for got in alone)
    for _ in range(3):  # the blocks of the bad one go round
        got = run(engine, a=GOOD[0], bad=BAD, b=GOOD[1])
        assert [ids(got["a"]), ids(got["b"])] == alone
        [last] = got["bad"]
        assert last.finish_reason is FinishReason.FAULT and "not finite" in (last.error or "")
    assert engine.stats().kv_blocks_used == 0


def test_nobody_finds_what_it_has_computed(tmp_path: Path) -> None:
    engine = make(tmp_path)
    [last] = run(engine, bad=BAD)["bad"]
    assert last.finish_reason is FinishReason.FAULT
    assert engine.cached_prefixes() == []
