"""Models with sliding windows through the whole engine: ids are transformers', whatever the cache lets go of."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers_models import hf_model, make_gguf, make_hf_dir

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError
from engine.executor import settings
from engine.types import SamplingParams

torch.set_num_threads(1)
WINDOW = 32
NEW = 40
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "every_layer": ("mistral", {"sliding_window": WINDOW}),
    "upper_layers": (
        "qwen2",
        {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "alternating": (
        "qwen3",
        {
            "sliding_window": WINDOW,
            "use_sliding_window": True,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "gemma2": ("gemma2", {"num_hidden_layers": 3, "layer_types": None}),
    "gemma3": ("gemma3", {"num_hidden_layers": 7, "layer_types": None}),
}
PROMPT_LENGTHS = (100, 5, 33, 64, 140)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_gguf(tmp_path_factory.mktemp("t")))


def prompts(seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 288) for _ in range(n)] for n in PROMPT_LENGTHS]


def config(path: object, tokenizer: str, **changes: Any) -> EngineConfig:
    # A slowdown without limit: what is scheduled depends on no clock.
    always = {"num_kv_blocks": 64, "num_threads": 1, "device": "cpu", "max_decode_slowdown": float("inf")}
    return EngineConfig(model=str(path), tokenizer=tokenizer, kv_cache_dtype="float32", **always | changes)


def ids(engine: Engine, work: list[list[int]], new: int = NEW) -> list[list[int]]:
    greedy = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    return [list(done.choices[0].token_ids) for done in engine.generate(work, [greedy] * len(work))]


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[object, Any]:
    arch, extra = KINDS[request.param]
    return make_hf_dir(tmp_path_factory.mktemp("m"), arch, **extra), hf_model(arch, **extra)


@torch.no_grad()
def greedy_after(model: Any, prompt: list[int], out: list[int]) -> list[int]:
    """What transformers would choose at each place of `out`: equal to it, if it is what greedy decoding gives."""
    return model(torch.tensor([prompt + out])).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()


CROWDS: list[dict[str, Any]] = [
    {"enable_prefix_caching": False},
    {"max_num_batched_tokens": 23},
    {"num_kv_blocks": 15, "preemption_mode": "recompute"},
    {"num_kv_blocks": 15, "preemption_mode": "swap", "host_kv_cache_gib": 0.01},
    {"attention_backend": "torch", "max_num_batched_tokens": 50},
]


@pytest.mark.slow
@pytest.mark.parametrize("crowd", CROWDS, ids=lambda c: "-".join(c))
def test_ids_are_those_of_transformers(case: tuple[object, Any], tokenizer: str, crowd: dict[str, Any]) -> None:
    path, model = case
    engine = Engine(config(path, tokenizer, **crowd))
    first = ids(engine, prompts())
    assert [greedy_after(model, p, out) for p, out in zip(prompts(), first, strict=True)] == first
    assert ids(engine, prompts()) == first, "with a warm cache"
    engine.close()


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> object:
    return make_hf_dir(tmp_path_factory.mktemp("m"), "mistral", sliding_window=WINDOW, max_position_embeddings=2048)


def test_a_prefix_is_found_although_its_beginning_is_gone(mistral: object, tokenizer: str) -> None:
    rng = random.Random(1)
    first = [rng.randrange(3, 288) for _ in range(100)]
    other = first[:96] + [rng.randrange(3, 288) for _ in range(7)]
    off = Engine(config(mistral, tokenizer, enable_prefix_caching=False))
    want = [ids(off, [prompt]) for prompt in (first, first, other)]
    off.close()
    # Of the prefix's six blocks only the last two are still there when the others have been used for something else.
    engine = Engine(config(mistral, tokenizer, num_kv_blocks=12, max_num_batched_tokens=16))
    assert [ids(engine, [prompt]) for prompt in (first, first, other)] == want
    assert engine.stats().cached_tokens == 96 + 96
    engine.close()


def test_a_long_answer_takes_no_more_than_the_window(mistral: object, tokenizer: str) -> None:
    pool = -(-(WINDOW - 1) // 16) + 1  # blocks, and the context is 2,048 tokens
    engine = Engine(config(mistral, tokenizer, num_kv_blocks=pool, max_num_batched_tokens=16))
    roomy = Engine(config(mistral, tokenizer, num_kv_blocks=128, max_num_batched_tokens=16))
    work = [prompts()[0]]
    assert ids(engine, work, 600) == ids(roomy, work, 600)
    engine.close()
    roomy.close()
    tight = Engine(config(mistral, tokenizer, num_kv_blocks=pool - 1))
    done = tight.generate(work, [SamplingParams(max_tokens=1)])
    assert "the cache holds" in str(done[0].error)
    tight.close()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_sequences_go_on_as_they_were(mistral: object, tokenizer: str, mode: str) -> None:
    work = [prompt[:n] for prompt, n in zip(prompts(), (5, 4, 6), strict=False)]
    roomy = Engine(config(mistral, tokenizer))
    want = ids(roomy, work, 100)
    roomy.close()
    # Two of them fit as they come in, and not as they grow from one block to three.
    tight = Engine(config(mistral, tokenizer, num_kv_blocks=5, preemption_mode=mode, host_kv_cache_gib=0.01))
    assert ids(tight, work, 100) == want
    assert tight.stats().num_preemptions > 0
    tight.close()


def unlimited(monkeypatch: pytest.MonkeyPatch, settings_of: EngineConfig) -> Engine:
    """The same model and mask, but no block is ever let go."""
    with monkeypatch.context() as patch:
        patch.setattr(settings, "kv_window", lambda *_: None)
        return Engine(settings_of)


@pytest.fixture
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    yield make_hf_dir(tmp_path_factory.mktemp("m"), "llama")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize(("window", "sinks"), [(32, 0), (40, 4), (33, 20)])
def test_window_and_sinks_by_config_equal_the_unlimited_cache(
    llama: object, tokenizer: str, monkeypatch: pytest.MonkeyPatch, window: int, sinks: int, backend: str
) -> None:
    changes: dict[str, Any] = {
        "attention_window": window,
        "attention_sinks": sinks,
        "attention_backend": backend,
        "max_num_batched_tokens": 48,
    }
    roomy = unlimited(monkeypatch, config(llama, tokenizer, num_kv_blocks=128, **changes))
    want = ids(roomy, prompts())
    roomy.close()
    full = Engine(config(llama, tokenizer, num_kv_blocks=128))
    assert ids(full, prompts()) != want, "the mask hides something"
    full.close()
    for blocks, mode in ((64, "auto"), (12, "swap")):
        tight = config(llama, tokenizer, num_kv_blocks=blocks, preemption_mode=mode, host_kv_cache_gib=0.01, **changes)
        engine = Engine(tight)
        for _ in range(2):
            assert ids(engine, prompts()) == want
        engine.close()


def test_sinks_need_a_window(llama: object, tokenizer: str) -> None:
    with pytest.raises(ConfigError, match="attention_sinks 4 needs a window"):
        Engine(config(llama, tokenizer, attention_sinks=4))


def test_a_pool_from_memory_needs_to_hold_the_window_only(mistral: object, tokenizer: str) -> None:
    size = 2 * 2 * 16 * 2 * 32 * 4  # of a block: two layers, K and V, 16 tokens, two heads of 32 floats
    engine = Engine(config(mistral, tokenizer, num_kv_blocks=None, kv_cache_memory=4 * size))
    assert engine.stats().kv_blocks_total == 4
    engine.close()
    with pytest.raises(ConfigError, match="needs 3 blocks"):
        Engine(config(mistral, tokenizer, num_kv_blocks=None, max_model_len=2048, kv_cache_memory=2 * size))
