"""Logits equal transformers' in float32, however the tokens are cut into steps and laid out in blocks."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch

from engine.attention.torch_paged import TorchPaged
from engine.batch import build_batch
from engine.errors import ConfigError
from engine.kernels import cpu
from engine.kernels.cpu.ops import NativeKernels
from engine.kernels.reference import TorchKernels
from engine.kv.storage import KVLayout, KVStorage
from engine.models.base import MODELS
from engine.models.checkpoint import open_checkpoint
from engine.models.loader import check_heads, load_model
from engine.models.spec import FAMILIES
from engine.models.weights import Weights
from engine.parallel.group import SoloGroup
from engine.types import SeqSlice
from tests.helpers_models import ARCHS, hf_model, make_gguf, make_hf_dir

torch.set_num_threads(1)
CPU = torch.device("cpu")
BLOCK = 16
# float32 and two layers with weights of 0.2: logits are of size ~10, each the sum of a few hundred roundings.
ATOL = 2e-4


class Driver:
    """A loaded model, a cache, and a shuffled pool of blocks."""

    def __init__(self, path, num_blocks=64, block_size=BLOCK, max_model_len=None, group=None):
        checkpoint = open_checkpoint(path)
        group = group or SoloGroup()
        self.spec, self.block_size = checkpoint.spec, block_size
        weights = Weights(checkpoint, group, torch.float32, CPU)
        length = max_model_len or self.spec.max_position
        self.model = load_model(checkpoint, weights, TorchKernels(), TorchPaged, block_size, length)
        kv_heads = self.spec.num_kv_heads // group.size
        layout = KVLayout(self.spec.num_layers, kv_heads, self.spec.head_dim, block_size, torch.float32)
        self.kv = KVStorage(layout, num_blocks, CPU).layers
        for pair in self.kv:
            for cache in pair:
                cache.fill_(float("nan"))
        self.free = list(range(num_blocks))
        random.Random(3).shuffle(self.free)
        self.blocks = {}

    @torch.inference_mode()
    def step(self, work):
        """work: [(seq_id, tokens, start)] -> logits of every row, per sequence."""
        slices = []
        for seq_id, tokens, start in work:
            blocks = self.blocks.setdefault(seq_id, [])
            while len(blocks) * self.block_size < start + len(tokens):
                blocks.append(self.free.pop())
            slices.append(SeqSlice(seq_id, tuple(tokens), start, tuple(blocks), sample=True))
        hidden = self.model.forward(build_batch(slices, self.block_size, CPU), self.kv)
        return self.model.logits(hidden).split([len(s.token_ids) for s in slices])

    def chunked(self, tokens, size, seq_id=0):
        bounds = [*range(0, len(tokens), size), len(tokens)]
        return torch.cat([self.step([(seq_id, tokens[a:b], a)])[0] for a, b in pairwise(bounds)])


@torch.inference_mode()
def _reference(model, tokens):
    return model(torch.tensor([tokens])).logits[0].float()


def _tokens(count, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(3, 288) for _ in range(count)]


def _close(got, want, atol=ATOL):
    torch.testing.assert_close(got, want, atol=atol, rtol=0)


@pytest.fixture(scope="module", params=ARCHS)
def pair(request, tmp_path_factory):
    path = make_hf_dir(tmp_path_factory.mktemp("models"), request.param)
    return path, hf_model(request.param)


@pytest.mark.parametrize("chunk", [1, 3, 16, 1000])
def test_chunking_changes_nothing(pair, chunk):
    path, reference = pair
    tokens = _tokens(50)
    _close(Driver(path).chunked(tokens, chunk), _reference(reference, tokens))


@pytest.mark.parametrize("block_size", [1, 5, 32])
def test_block_size_changes_nothing(pair, block_size):
    path, reference = pair
    tokens = _tokens(50)
    _close(Driver(path, 64, block_size).chunked(tokens, 20), _reference(reference, tokens))


def test_mixed_batches(pair):
    """Sequences at different stages share steps: prompts, chunks, decodes, a resumed tail."""
    path, reference = pair
    driver = Driver(path)
    tokens = {i: _tokens(n, seed=i) for i, n in enumerate([40, 33, 17, 5, 64])}
    done = dict.fromkeys(tokens, 0)
    got = {i: [] for i in tokens}
    rng = random.Random(1)
    while work := [i for i in tokens if done[i] < len(tokens[i])]:
        picked = rng.sample(work, rng.randint(1, len(work)))
        sizes = [rng.choice([1, 1, 2, 7, 16, 30]) for _ in picked]
        step = [(i, tokens[i][done[i] : done[i] + n], done[i]) for i, n in zip(picked, sizes, strict=True)]
        for (i, part, _), logits in zip(step, driver.step(step), strict=True):
            got[i].append(logits)
            done[i] += len(part)
    for i in tokens:
        _close(torch.cat(got[i]), _reference(reference, tokens[i]))


@pytest.mark.parametrize("arch", ["mistral", "qwen3"])
@pytest.mark.parametrize("chunk", [1, 16, 1000])
def test_sliding_window(tmp_path, arch, chunk):
    extra = {"sliding_window": 12}
    if arch == "qwen3":
        extra |= {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}
    path = make_hf_dir(tmp_path, arch, **extra)
    reference = hf_model(arch, attn_implementation="eager", **extra)
    tokens = _tokens(60)
    _close(Driver(path).chunked(tokens, chunk), _reference(reference, tokens))


def test_window_as_long_as_the_context_is_no_window(tmp_path):
    path = make_hf_dir(tmp_path, "mistral", sliding_window=64)
    assert all(shape.window is None for shape in Driver(path, max_model_len=64).model.attention_shapes)
    assert all(shape.window == 64 for shape in Driver(path, max_model_len=65).model.attention_shapes)


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_heads(tmp_path, arch, tied):
    path = make_hf_dir(tmp_path, arch, tie_word_embeddings=tied)
    tokens = _tokens(20)
    _close(Driver(path).chunked(tokens, 20), _reference(hf_model(arch, tie_word_embeddings=tied), tokens))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        YARN,
        YARN | {"truncate": False},
        YARN | {"mscale": 2.0, "mscale_all_dim": 0.5},
    ],
    ids=["linear", "llama3", "yarn", "yarn_whole", "yarn_mscale"],
)
def test_rope_scaling(tmp_path, rope):
    parameters = {**rope, "rope_theta": 10000.0}
    path = make_hf_dir(tmp_path, rope_parameters=parameters)
    tokens = _tokens(200)
    _close(Driver(path).chunked(tokens, 64), _reference(hf_model("llama", rope_parameters=parameters), tokens))


GEMMAS = {
    "no_caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "head_cap_only": ("gemma3", {"final_logit_softcapping": 5.0}),
    "scale": ("gemma2", {"query_pre_attn_scalar": 144}),
    "pattern": ("gemma3", {"num_hidden_layers": 13, "layer_types": None, "initializer_range": 0.1}),
    "ropes": (
        "gemma3",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 20000.0},
            }
        },
    ),
}


@pytest.mark.parametrize("case", GEMMAS)
def test_what_gemmas_differ_in(tmp_path, case):
    arch, extra = GEMMAS[case]
    path = make_hf_dir(tmp_path, arch, **extra)
    tokens = _tokens(120)
    got = Driver(path).chunked(tokens, 50)
    _close(got, _reference(hf_model(arch, **extra), tokens))
    assert not torch.allclose(got, _reference(hf_model(arch), tokens), atol=0.05), "the setting shows"


def test_gemmas_in_bfloat16_scale_embeddings_by_what_that_can_hold(tmp_path):
    """And use norm weights in float32: 1 + w would lose most of w."""
    path = make_hf_dir(tmp_path, "gemma3", hidden_size=72)
    checkpoint = open_checkpoint(path)
    for dtype, scale in ((torch.bfloat16, 8.5), (torch.float32, 72**0.5)):
        weights = Weights(checkpoint, SoloGroup(), torch.float32, CPU, weight_dtype=dtype)
        assert weights.rounded_as_weights(checkpoint.spec.embedding_scale) == pytest.approx(scale, rel=1e-7)
    narrow = Weights(checkpoint, SoloGroup(), torch.bfloat16, CPU)
    assert narrow.norm("model.norm").dtype is torch.float32
    model = load_model(checkpoint, narrow, TorchKernels(), TorchPaged, BLOCK, 256)
    layout = KVLayout(2, 2, 32, BLOCK, torch.bfloat16)
    tokens = _tokens(60)
    piece = SeqSlice(0, tuple(tokens), 0, (0, 1, 2, 3), sample=True)
    with torch.inference_mode():
        batch = build_batch([piece], BLOCK, CPU)
        got = model.logits(model.forward(batch, KVStorage(layout, 4, CPU).layers))
    want = _reference(hf_model("gemma3", hidden_size=72).to(torch.bfloat16), tokens)
    exact = _reference(hf_model("gemma3", hidden_size=72), tokens)
    assert (got - exact).square().mean() <= 1.5 * (want - exact).square().mean(), "no further off than transformers"


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("quant", ["Q4_1", "Q8_0", "F16"])
def test_gguf_equals_its_dequantized_weights(tmp_path, arch, quant):
    """The reference gets the very weights the file holds: what differs is only our arithmetic."""
    import gguf

    # Qwen2 has no head_dim of its own; 64 / 2 heads keeps rows of whole blocks.
    extra = {"num_attention_heads": 2, "num_key_value_heads": 2} if arch == "qwen2" else {}
    path = make_gguf(tmp_path, arch, quant=quant, **extra)
    reference = hf_model(arch, **extra)
    with torch.no_grad():
        for name, p in reference.named_parameters():
            if p.dim() == 2:
                kind = gguf.GGMLQuantizationType["Q8_0" if "embed" in name else quant]
                p.copy_(torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(p.numpy(), kind), kind)))
    tokens = _tokens(40)
    _close(Driver(path).chunked(tokens, 13), _reference(reference, tokens))


@pytest.mark.parametrize("compiled", [False, True])
def test_parts_in_different_formats_are_run_apart(tmp_path, compiled):
    if compiled and not cpu.available():
        pytest.skip("no C++ compiler")
    path = make_gguf(tmp_path, quant="Q4_1")
    checkpoint = open_checkpoint(path)
    weights = Weights(checkpoint, SoloGroup(), torch.float32, CPU, NativeKernels() if compiled else None)
    at = "model.layers.0.self_attn"
    fused = weights.column(f"{at}.q_proj", f"{at}.k_proj", f"{at}.v_proj")
    assert len(fused.parts) == 1
    x = torch.randn(3, 64)
    mixed = weights.column(f"{at}.q_proj", "model.embed_tokens", f"{at}.v_proj")
    assert len(mixed.parts) == 3
    q, v = weights.column(f"{at}.q_proj")(x), weights.column(f"{at}.v_proj")(x)
    torch.testing.assert_close(fused(x), torch.cat([q, weights.column(f"{at}.k_proj")(x), v], 1))
    torch.testing.assert_close(mixed(x), torch.cat([q, weights.column("model.embed_tokens")(x), v], 1))


class ThreadGroup:
    """Ranks that are threads of this process."""

    def __init__(self, rank, size, barrier, table):
        self.rank, self.size, self._barrier, self._table = rank, size, barrier, table

    def _exchange(self, x):
        self._table[self.rank] = x
        self._barrier.wait(60)
        found = list(self._table)
        self._barrier.wait(60)
        return found

    def all_reduce(self, x):
        return sum(self._exchange(x))

    def all_gather(self, x, dim=-1):
        return torch.cat(self._exchange(x), dim)

    def broadcast(self, x, src=0):
        return self._exchange(x)[src]


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma2", "gemma3"])
@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_two_ranks_equal_one(tmp_path, arch, kind):
    extra = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}
    path = (make_hf_dir if kind == "hf" else make_gguf)(tmp_path, arch, **extra)
    tokens = _tokens(30)
    alone = Driver(path).chunked(tokens, 11)
    barrier, table = threading.Barrier(2), [None, None]

    def work(rank):
        return Driver(path, group=ThreadGroup(rank, 2, barrier, table)).chunked(tokens, 11)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(work, range(2))
    assert torch.equal(first, second)
    _close(first, alone)


def test_every_family_has_a_model():
    assert set(FAMILIES) <= set(MODELS.names())


def test_heads_that_do_not_divide_are_named(tmp_path):
    spec = open_checkpoint(make_hf_dir(tmp_path)).spec  # 4 heads, 2 KV heads
    check_heads(spec, 2)
    with pytest.raises(ConfigError, match=r"3 does not divide the model's 4 attention heads; possible: 1, 2"):
        check_heads(spec, 3)
    with pytest.raises(ConfigError, match=r"4 does not divide the model's 2 KV heads"):
        check_heads(spec, 4)
