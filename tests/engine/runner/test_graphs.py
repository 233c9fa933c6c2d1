"""Captured steps against the same steps run eagerly, on small random models."""

from __future__ import annotations

import logging
import random

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.executor.rank import Rank
from engine.kernels import cpu
from engine.runner.runner import Runner
from engine.runner.sampler import Sampler
from engine.spec.none import NoProposer
from engine.types import NewSequence, SamplingParams, SeqSlice, StepPlan
from tests.helpers_models import make_gguf, make_hf_dir

VOCAB, BLOCK = 288, 16


@pytest.fixture(autouse=True)
def needs_kernels():
    if not cpu.available():
        pytest.skip("no C++ compiler")


def _rank(path, **settings) -> Rank:
    defaults = {"num_kv_blocks": 64, "max_num_seqs": 6, "num_threads": 1}
    rank = Rank(EngineConfig(model=str(path), **{**defaults, **settings}))
    rank.load()
    return rank


def _eager(rank: Rank) -> Runner:
    """The same model and cache without captured steps."""
    sampler = Sampler(VOCAB, torch.device("cpu"))
    return Runner(rank.runner.model, rank.runner.storage, sampler, NoProposer(), BLOCK, torch.device("cpu"))


class Sequences:
    """Random sequences that are decoded as the runner says; their blocks are scattered over the cache."""

    def __init__(self, runner: Runner, count: int, **params) -> None:
        rng = random.Random(count)
        self.runner = runner
        blocks = list(range(64))
        rng.shuffle(blocks)
        self.tokens = {i: [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 30))] for i in range(count)}
        self.blocks = {i: tuple(blocks.pop() for _ in range(8)) for i in range(count)}
        self.results = []
        new = [NewSequence(i, SamplingParams(**params), i, tuple(t)) for i, t in self.tokens.items()]
        self.step([self.slice(i, len(t)) for i, t in self.tokens.items()], new)

    def slice(self, i: int, count: int = 1) -> SeqSlice:
        """The last `count` tokens of sequence i."""
        end = len(self.tokens[i])
        blocks = self.blocks[i][: -(-end // BLOCK)]
        return SeqSlice(i, tuple(self.tokens[i][end - count :]), end - count, blocks, sample=True)

    def step(self, slices, new=()) -> None:
        result = self.runner.run(StepPlan(len(self.results), tuple(slices), tuple(new)))
        self.results.append(result.slices)
        for piece, got in zip(slices, result.slices, strict=True):
            self.tokens[piece.seq_id] += got.token_ids


def _model(folder, arch: str, kind: str):
    # Qwen2 has no head_dim of its own; 64 / 2 heads keeps rows of whole blocks.
    extra = {"num_attention_heads": 2, "num_key_value_heads": 2} if arch == "qwen2" else {}
    extra["tie_word_embeddings"] = arch in ("qwen3", "gemma2", "gemma3")
    if kind == "hf":
        return make_hf_dir(folder, arch, **extra)
    if kind == "mixed":
        return make_gguf(folder, arch, quants={"self_attn.v_proj": "Q8_0", "mlp.up_proj": "F16"}, **extra)
    return make_gguf(folder, arch, quant=kind, **extra)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("Q4_1", "auto"), ("mixed", "auto"), ("F16", "auto"), ("hf", "float32"), ("hf", "bfloat16"), ("hf", "float16")],
)
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma2", "gemma3"])
@pytest.mark.parametrize("params", [{"temperature": 0.0, "logprobs": 3}, {"temperature": 1.0, "top_p": 0.9}], ids=str)
def test_same_bits_as_eager(tmp_path, arch, params, kind, dtype):
    path = _model(tmp_path, arch, kind)
    captured, eager = _rank(path, dtype=dtype).runner, _eager(_rank(path, dtype=dtype))
    a, b = (Sequences(runner, 6, **params) for runner in (captured, eager))
    rng = random.Random(0)
    for _ in range(60):
        ids = rng.sample(range(6), rng.randint(1, 6))
        counts = [rng.choice((1, 1, 2, 9)) for _ in ids]  # more than one: as if it had been preempted
        samples = [rng.random() < 0.8 for _ in ids]
        for s in (a, b):
            slices = [s.slice(i, min(n, len(s.tokens[i]))) for i, n in zip(ids, counts, strict=True)]
            s.step([piece._replace(sample=sample) for piece, sample in zip(slices, samples, strict=True)])
    assert a.results == b.results
    assert a.tokens == b.tokens
    assert all(
        torch.equal(x, y)
        for one, other in zip(captured.storage.layers, eager.storage.layers, strict=True)
        for x, y in zip(one, other, strict=True)
    )
    assert captured.graph.captured and eager.graph is None


def test_larger_steps_need_no_more_memory(tmp_path):
    rank = _rank(make_gguf(tmp_path))
    before = rank.runner.graph.buffer_bytes
    sequences = Sequences(rank.runner, 6, temperature=0.0)
    for count in range(1, 7):
        sequences.step([sequences.slice(i) for i in range(count)])
    assert rank.runner.graph.buffer_bytes == before


def test_steps_that_are_too_large_are_declined(tmp_path):
    graph = _rank(make_gguf(tmp_path), max_num_seqs=2, max_num_batched_tokens=8).runner.graph
    decode = SeqSlice(0, (5,), 3, (1,), sample=True)
    with torch.inference_mode():
        assert graph.hidden((decode, decode._replace(seq_id=1, token_ids=(5,) * 7))).shape == (8, 64)
        assert graph.hidden((decode, decode._replace(seq_id=1, token_ids=(5,) * 8))) is None
        assert graph.hidden((decode,) * 3) is None


def test_prompt_logprobs_are_not_lost(tmp_path):
    path = make_gguf(tmp_path)
    prompt, params = tuple(range(10, 22)), SamplingParams(temperature=0.0, prompt_logprobs=1)
    found = []
    for runner in (_rank(path).runner, _eager(_rank(path))):
        new = (NewSequence(0, params, 0, prompt),)
        own = []
        for at, token in enumerate(prompt):  # chunks of one token: the last looks like a decode
            last = at == len(prompt) - 1
            plan = StepPlan(at, (SeqSlice(0, (token,), at, (4,), sample=last),), new if at == 0 else ())
            own.append(runner.run(plan).slices[0])
        found.append(own)
    assert found[0] == found[1]
    assert sum(len(s.prompt_logprobs) for s in found[0]) == len(prompt) - 1


def test_a_position_beyond_the_context_is_an_error(tmp_path):
    rank = _rank(make_gguf(tmp_path), max_model_len=64)
    with pytest.raises(EngineError, match="position 64 is beyond the context of 64"):
        rank.runner.graph.hidden((SeqSlice(0, (5, 6), 63, (0, 1, 2, 3, 4), sample=True),))


def test_logits_that_are_not_finite_end_a_captured_step_too(tmp_path):
    rank = _rank(make_gguf(tmp_path))
    sequences = Sequences(rank.runner, 1, temperature=0.0)
    sequences.step([sequences.slice(0)])
    for _, values in rank.runner.storage.layers:
        values.fill_(torch.nan)
    [result] = rank.runner.run(StepPlan(99, (sequences.slice(0),))).slices
    assert result.fault is not None and "not finite" in result.fault


def test_a_model_with_other_ops_runs_eagerly_after_one_line(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "engine.runner.graphs"):
        rank = _rank(make_gguf(tmp_path), attention_backend="torch")
        sequences = Sequences(rank.runner, 2, temperature=0.0)
        for _ in range(3):
            sequences.step([sequences.slice(0), sequences.slice(1)])
    (record,) = caplog.records
    assert "not captured" in record.getMessage() and "scaled_dot_product_attention" in record.getMessage()
    assert all(len(t) > 3 for t in sequences.tokens.values())
