"""LocalExecutor and Rank: what loading reports, what it refuses, and plans that run."""

from __future__ import annotations

import pytest
import torch

from engine.batch import build_batch
from engine.config import EngineConfig
from engine.errors import ConfigError, ModelFileError
from engine.executor.base import executor_class
from engine.executor.local import LocalExecutor
from engine.executor.rank import Rank
from engine.kernels import cpu
from engine.types import NewSequence, SamplingParams, SeqSlice, StepPlan
from tests.helpers_models import hf_model, make_gguf, make_hf_dir

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return str(make_hf_dir(tmp_path_factory.mktemp("m")))


def _config(model, **settings):
    defaults = {"num_threads": 1, "num_kv_blocks": 20, "max_num_batched_tokens": 64, "attention_backend": "torch"}
    return EngineConfig(model=model, device="cpu", **{**defaults, **settings})


def test_greedy_ids_equal_transformers(llama):
    executor = executor_class("local")(_config(llama))
    capacity = executor.start()
    assert (capacity.num_blocks, capacity.max_model_len, capacity.vocab_size) == (20, 256, 288)
    assert capacity.eos_ids == frozenset({2})
    assert capacity.fingerprint
    prompt = list(range(40, 60))
    reference = hf_model("llama")
    wanted = list(prompt)
    with torch.inference_mode():
        for _ in range(10):
            wanted.append(int(reference(torch.tensor([wanted])).logits[0, -1].argmax()))

    got, new = list(prompt), (NewSequence(0, SamplingParams(temperature=0.0), 0, tuple(prompt)),)
    done = 0
    while len(got) < len(wanted):
        piece = SeqSlice(0, tuple(got[done:]), done, (11, 4, 7), sample=True)
        future = executor.submit(StepPlan(0, (piece,), new))
        assert future.done()
        done, new = len(got), ()
        got += future.result().slices[0].token_ids
    assert got == wanted
    executor.check_health()
    executor.shutdown()


def test_errors_travel_in_the_future(llama):
    executor = LocalExecutor(_config(llama))
    plan = StepPlan(0, (SeqSlice(99, (5,), 0, (0,), sample=True),))
    assert "not loaded" in str(executor.submit(plan).exception())
    executor.start()
    assert isinstance(executor.submit(plan).exception(), KeyError)  # never introduced by `new`


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 257}, "max_model_len 257 is more than the model's 256 positions"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size 2 needs an executor that starts as many ranks"),
        ({"tensor_parallel_size": 3}, "does not divide the model's 4 attention heads"),
        ({"quantization": "gguf"}, "quantization 'gguf' does not fit"),
        ({"attention_backend": "nonsense"}, "nonsense"),
        ({"num_kv_blocks": None, "kv_cache_memory": 1000}, "one sequence of max_model_len 256"),
    ],
)
def test_impossible_settings_are_refused(llama, settings, message):
    with pytest.raises(ValueError, match=message):
        LocalExecutor(_config(llama, **settings)).start()


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "meta"])
def test_unknown_device(llama, device):
    with pytest.raises(ConfigError, match="device"):
        Rank(EngineConfig(model=llama, device=device)).load()


def test_missing_model():
    with pytest.raises(ModelFileError, match="no such file"):
        Rank(_config("/nowhere/at/all")).load()


def test_a_small_explicit_pool_keeps_the_context(llama):
    capacity = LocalExecutor(_config(llama, num_kv_blocks=2)).start()
    assert (capacity.num_blocks, capacity.max_model_len) == (2, 256)


def test_a_shorter_context_makes_a_small_pool_enough(llama):
    per_token = 2 * 2 * 2 * 32 * 4
    settings = {"num_kv_blocks": None, "kv_cache_memory": 40 * per_token, "max_model_len": 32}
    assert LocalExecutor(_config(llama, **settings)).start().num_blocks == 2


@pytest.mark.parametrize(
    ("settings", "dtype", "kv_dtype"),
    [
        ({}, torch.float32, torch.float16),
        ({"kv_cache_dtype": "float32"}, torch.float32, torch.float32),
        ({"kv_cache_dtype": "bfloat16"}, torch.float32, torch.bfloat16),
        ({"dtype": "bfloat16"}, torch.bfloat16, torch.bfloat16),
        ({"dtype": "bfloat16", "kv_cache_dtype": "float32"}, torch.bfloat16, torch.float32),
    ],
)
def test_dtypes(tmp_path, settings, dtype, kv_dtype):
    path = make_gguf(tmp_path)
    rank = Rank(_config(str(path), **settings))
    rank.load()
    runner = rank.runner
    assert runner.storage.layout.dtype == kv_dtype
    # The compiled kernels keep all but float weights and what they are multiplied with in float32.
    piece = SeqSlice(0, (5, 6), 0, (3,), sample=True)
    with torch.inference_mode():
        batch = build_batch((piece,), runner.storage.layout.block_size, torch.device("cpu"))
        hidden = runner.model.forward(batch, runner.storage.layers)
    assert hidden.dtype == (torch.float32 if cpu.available() else dtype)
    new = (NewSequence(0, SamplingParams(temperature=0.0), 0, (5, 6)),)
    result = rank.run(StepPlan(0, (piece,), new))
    assert len(result.slices[0].token_ids) == 1


def test_auto_dtype_is_the_checkpoints_own(tmp_path):
    path = tmp_path / "bf16"
    hf_model("llama").bfloat16().save_pretrained(path)
    rank = Rank(_config(str(path)))
    rank.load()
    assert rank.runner.storage.layout.dtype == torch.bfloat16


def test_executors_that_are_not_shipped_are_named_by_module_and_class():
    assert executor_class("local") is executor_class("engine.executor.local:LocalExecutor") is LocalExecutor
    with pytest.raises(ConfigError, match="executor 'no_such_module:X' cannot be imported: ModuleNotFoundError"):
        executor_class("no_such_module:X")
    with pytest.raises(ConfigError, match=r"'engine.types:NoSuch' cannot be imported: AttributeError"):
        executor_class("engine.types:NoSuch")
    with pytest.raises(ValueError, match="unknown executor 'remote'; known: local"):
        executor_class("remote")
