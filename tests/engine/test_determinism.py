"""With the compiled kernels and float32 weights: what a request gets depends on nothing but the request."""

from __future__ import annotations

import random

import pytest
import torch
from helpers_models import ARCHS, make_gguf, make_hf_dir

from engine.batch import build_batch
from engine.config import EngineConfig
from engine.engine import Engine
from engine.executor.local import LocalExecutor
from engine.kernels import cpu
from engine.kv.storage import KVStorage
from engine.types import SamplingParams, SeqSlice

pytestmark = [pytest.mark.skipif(not cpu.available(), reason="no C++ compiler"), pytest.mark.slow]

PROMPTS_EACH = 34  # of each of six architectures
NEW = 28


def prompts(seed: int) -> list[list[int]]:
    """Of 1 to 60 tokens; some begin as others do, so that there is something to find in the prefix cache."""
    rng = random.Random(seed)
    shared = [[rng.randrange(3, 288) for _ in range(40)] for _ in range(3)]
    return [
        rng.choice([[], *shared])[: rng.randrange(41)] + [rng.randrange(3, 288) for _ in range(rng.randrange(1, 21))]
        for _ in range(PROMPTS_EACH)
    ]


def sampling(i: int) -> SamplingParams:
    if i % 2 == 0:
        return SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    return SamplingParams(max_tokens=NEW, temperature=0.9, top_p=0.95, seed=i, ignore_eos=True)


def config(path: str, **settings) -> EngineConfig:
    # A slowdown without limit: what is scheduled, and so whether anything is preempted, depends on no clock.
    defaults = {"num_kv_blocks": 64, "num_threads": 1, "device": "cpu", "max_decode_slowdown": float("inf")}
    return EngineConfig(model=path, **defaults | settings)


@pytest.fixture(scope="module", params=ARCHS)
def model(request, tmp_path_factory) -> tuple[str, str]:
    window = {"sliding_window": 48} if request.param == "mistral" else {}
    path = tmp_path_factory.mktemp("m")
    return str(make_hf_dir(path, request.param, **window)), str(make_gguf(path))  # the latter for its tokenizer


def test_ids_do_not_depend_on_neighbours_chunks_preemption_or_cache(model):
    path, tokenizer = model
    work = prompts(seed=0)
    params = [sampling(i) for i in range(len(work))]
    alone = Engine(config(path, tokenizer=tokenizer, enable_prefix_caching=False))
    want = [alone.generate([p], [s])[0].choices[0].token_ids for p, s in zip(work, params, strict=True)]
    alone.close()
    crowds = [
        {"max_num_batched_tokens": 23, "max_num_seqs": 9},
        {"num_kv_blocks": 9, "preemption_mode": "recompute"},
        {"num_kv_blocks": 9, "preemption_mode": "swap", "host_kv_cache_gib": 0.01},
    ]
    for crowd in crowds:
        engine = Engine(config(path, tokenizer=tokenizer, **crowd))
        for _ in range(2):  # the second time with a warm cache
            done = engine.generate(work, params)
            assert [d.choices[0].token_ids for d in done] == want, crowd
        assert "num_kv_blocks" not in crowd or engine.stats().num_preemptions > 0
        engine.close()


@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "int8", "fp8_e4m3"])
@pytest.mark.parametrize("kind", ["float", "gguf"])
def test_logits_have_the_same_bits_alone_and_in_any_batch(tmp_path, kind, kv_dtype):
    path = make_gguf(tmp_path) if kind == "gguf" else make_hf_dir(tmp_path)
    executor = LocalExecutor(config(str(path), kv_cache_dtype=kv_dtype))
    executor.start()
    runner = executor.rank.runner
    rng = random.Random(0)
    texts = [tuple(rng.randrange(3, 288) for _ in range(n)) for n in (1, 16, 17, 40, 3, 90)]
    blocks = [tuple(range(8 * i, 8 * i + -(-len(t) // 16))) for i, t in enumerate(texts)]

    def rows(slices: list[SeqSlice], storage: KVStorage) -> torch.Tensor:
        batch = build_batch(slices, 16, torch.device("cpu"))
        with torch.inference_mode():
            return runner.model.logits(runner.model.forward(batch, storage.layers))

    def fresh() -> KVStorage:
        return KVStorage(runner.storage.layout, 64, torch.device("cpu"))

    whole = [SeqSlice(i, t, 0, b, sample=True) for i, (t, b) in enumerate(zip(texts, blocks, strict=True))]
    together = rows(whole, fresh()).split([len(t) for t in texts])
    for one, want in zip(whole, together, strict=True):
        assert torch.equal(rows([one], fresh()), want)
        storage = fresh()
        single = [rows([one._replace(token_ids=(token,), start=i)], storage) for i, token in enumerate(one.token_ids)]
        assert torch.equal(torch.cat(single), want)
    executor.shutdown()
