"""One rank: it loads its share of the model, sizes its cache, and runs plans. Knows no Ray and no processes."""

from __future__ import annotations

import torch

from engine.attention.base import BACKENDS
from engine.batch import build_batch
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineError
from engine.executor import settings
from engine.executor.base import Capacity
from engine.kernels import cpu, select_kernels
from engine.kernels.cpu.ops import NativeKernels
from engine.kernels.cpu.pages import prefer_large_pages
from engine.kv.storage import KVLayout, KVStorage, size_cache
from engine.models.base import Model
from engine.models.checkpoint import Checkpoint, open_checkpoint
from engine.models.loader import check_heads, load_model
from engine.models.locate import resolve
from engine.models.weights import Weights
from engine.parallel.group import SoloGroup, TPGroup
from engine.runner.copies import BlockCopies, make_copies, seconds_per_block
from engine.runner.graphs import StepGraph
from engine.runner.runner import Runner
from engine.runner.sampler import Sampler
from engine.select import Machine, choose
from engine.spec.none import NoProposer
from engine.types import NewSequence, SamplingParams, SeqSlice, StepPlan, StepResult


class Rank:
    """load() once, then run() in order, from one thread at a time. Every rank of a group gets the same plans."""

    def __init__(self, config: EngineConfig, group: TPGroup | None = None) -> None:
        self._config = config
        self._group = group or SoloGroup()
        self._runner: Runner | None = None

    def load(self) -> Capacity:
        """Load, warm up, size the cache. Sets the process's thread count.

        Raises ModelFileError for the model's files, ConfigError for settings that do not fit them.
        """
        config = self._config
        checkpoint = settings.with_attention(config, open_checkpoint(resolve(config.model)))
        spec = checkpoint.spec
        self._check(checkpoint)
        torch.set_num_threads(settings.num_threads(config))
        device = settings.resolve_device(config)
        dtype = settings.resolve_dtype(config, checkpoint, device)
        kv_dtype = settings.resolve_kv_dtype(config, checkpoint, device, dtype)
        scales = settings.resolve_kv_scales(config, checkpoint, kv_dtype)
        longest = settings.resolve_max_model_len(config, checkpoint)
        window = settings.kv_window(config, spec, longest)
        native = device.type == "cpu" and cpu.available()
        between = torch.float32 if native else dtype  # the layers, whose products may take a narrower type
        machine = Machine(
            device.type,
            settings.dtype_name(between),
            settings.dtype_name(kv_dtype),
            spec.head_dim,
            native,
            config.deterministic,
        )
        attention = choose(BACKENDS, machine, config.attention_backend)
        layout = KVLayout(
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads // self._group.size,
            head_dim=spec.head_dim,
            block_size=config.block_size,
            dtype=kv_dtype,
            keys_by_feature=attention.keys_by_feature(config.block_size),
            scales=scales,
        )
        if device.type == "cpu":  # refuse before the long part, with what the weights will take
            cache = size_cache(config, layout, longest, device, window, checkpoint.num_bytes)
        kernels = select_kernels(device, between, deterministic=config.deterministic)
        ours = kernels if isinstance(kernels, NativeKernels) else None
        weights = Weights(checkpoint, self._group, between, device, ours, dtype, config.deterministic)
        with torch.inference_mode():
            model = load_model(checkpoint, weights, kernels, attention, config.block_size, longest)
            if ours is None:  # our kernels are ready once they are loaded, and the first steps size their buffers
                _warm_up(model, layout, _widest_step(config, longest), config.max_num_seqs, device)
        if device.type != "cpu":
            cache = size_cache(config, layout, longest, device, window)
        max_model_len = cache.max_model_len
        window = settings.kv_window(config, spec, max_model_len)
        storage = KVStorage(layout, cache.num_blocks, device)
        if device.type == "cpu":
            for tensor in (t for layer in storage.by_block for t in layer):
                prefer_large_pages(tensor)
        num_host_slots = settings.num_host_slots(config, layout.bytes_per_block * self._group.size)
        num_disk_slots = settings.num_disk_slots(config, layout.bytes_per_block * self._group.size)
        copies: BlockCopies | None = None
        copy_s = 0.0
        if num_host_slots:
            copies = make_copies(storage, num_host_slots, num_disk_slots, config.disk_kv_cache_dir)
            copy_s = seconds_per_block(copies, num_host_slots)
        sampler = Sampler(spec.vocab_size, device)
        graph = None
        if ours is not None and self._group.size == 1:
            widest = _widest_step(config, max_model_len)
            sizes = (config.max_num_seqs, widest, max_model_len, config.block_size)
            graph = StepGraph(model, storage.layers, ours, *sizes)
        self._runner = Runner(model, storage, sampler, NoProposer(), config.block_size, device, graph, copies)
        _first_steps(self._runner, min(config.max_num_batched_tokens, config.block_size, max_model_len))
        return Capacity(
            storage.num_blocks,
            max_model_len,
            spec.vocab_size,
            frozenset(spec.eos_ids),
            checkpoint.fingerprint + (f"-{scales.fingerprint}" if scales else ""),
            num_host_slots,
            copy_s,
            window,
            num_disk_slots,
        )

    @property
    def runner(self) -> Runner:
        """Raises EngineError before load()."""
        if self._runner is None:
            raise EngineError("this rank has not loaded a model")
        return self._runner

    def run(self, plan: StepPlan) -> StepResult:
        """Run one plan. Raises EngineError before load()."""
        return self.runner.run(plan)

    def _check(self, checkpoint: Checkpoint) -> None:
        config = self._config
        settings.check_quantization(config, checkpoint)
        check_heads(checkpoint.spec, config.tensor_parallel_size)
        if config.tensor_parallel_size != self._group.size:
            raise ConfigError(
                f"tensor_parallel_size {config.tensor_parallel_size} needs an executor that starts as many ranks; "
                f"{config.executor!r} has {self._group.size}"
            )


def _widest_step(config: EngineConfig, max_model_len: int) -> int:
    """Tokens of the longest chunk that a step can hold."""
    return min(config.max_num_batched_tokens, max_model_len)


def _first_steps(runner: Runner, num_tokens: int) -> None:
    """What only the first steps of a process pay for, through the sampler to the token, is paid now."""
    prompt = (0,) * num_tokens
    new = NewSequence(0, SamplingParams(max_tokens=1, temperature=0.0), seed=0, prompt=prompt)
    runner.run(StepPlan(0, (SeqSlice(0, prompt, 0, (0,), sample=True),), (new,)))
    runner.run(StepPlan(0, (SeqSlice(0, (0,), num_tokens - 1, (0,), sample=True),)))
    runner.run(StepPlan(0, (), finished=(0,)))


def _warm_up(model: Model, layout: KVLayout, num_tokens: int, max_num_seqs: int, device: torch.device) -> None:
    """Run the widest chunk and decodes of one and of many, on a throw-away cache: kernels are compiled and
    buffers sized before the first request would pay for it."""
    size = layout.block_size
    decodes = min(max_num_seqs, 32)
    storage = KVStorage(layout, max(-(-num_tokens // size), decodes), device)
    chunk = SeqSlice(0, (0,) * num_tokens, 0, tuple(range(-(-num_tokens // size))), sample=True)
    steps = [[chunk], *([SeqSlice(i, (0,), 0, (i,), sample=True) for i in range(n)] for n in {1, decodes})]
    for slices in steps:
        batch = build_batch(slices, size, device)
        model.logits(model.forward(batch, storage.layers)[-len(slices) :])
