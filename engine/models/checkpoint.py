"""One face for every kind of model file: canonical tensor names, checked against the model's spec at opening."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from engine.errors import ModelFileError
from engine.kv.scales import KVScales
from engine.kv.storage import LARGEST
from engine.models.gguf_file import GgufFile, GgufTensor, read_gguf
from engine.models.safetensors_dir import SafetensorsDir, read_json, read_safetensors
from engine.models.spec import ModelSpec
from engine.models.spec_gguf import from_gguf
from engine.models.spec_hf import from_hf
from engine.quant.gguf_codecs import codec

T = TypeVar("T")

log = logging.getLogger(__name__)

_LARGEST_FP8 = LARGEST[torch.float8_e4m3fn]


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor as the file keeps it. `shape` is the logical one.

    format "none": `data` is a float tensor of that shape, in the stored dtype. Otherwise a ggml type in lower
    case: `data` is uint8 [out, n_blocks, block_bytes]. `data` may be a view of the file: do not write into it.
    """

    name: str
    format: str
    data: Tensor
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """An opened, complete model: every tensor of `spec` is there, in its shape. Weights are read on load().

    `fingerprint` changes whenever a file's name, size, modification time or metadata does: a content version
    for cache keys. `source` is the file or directory.
    """

    source: Path
    spec: ModelSpec
    fingerprint: str
    _read: Mapping[str, Callable[[], tuple[str, Tensor]]]
    _scales: Mapping[str, Callable[[], Tensor]] = field(default_factory=dict)
    _scales_largest: float = _LARGEST_FP8

    def names(self) -> tuple[str, ...]:
        """Canonical (Hugging Face) names. lm_head.weight is absent when the head is the embedding."""
        return tuple(self._read)

    @property
    def num_bytes(self) -> int:
        """The size of the weights' files."""
        files = [self.source] if self.source.is_file() else self.source.glob("*.safetensors")
        return sum(file.stat().st_size for file in files)

    def load(self, name: str) -> StoredTensor:
        """Raises ModelFileError, also for NaN or infinity in a norm weight or bias."""
        if name not in self._read:
            raise ModelFileError(f"{self.source}: no tensor {name!r}")
        fmt, data = self._read[name]()
        shape = self.spec.tensor_shapes()[name]
        if len(shape) == 1 and not torch.isfinite(data).all():
            raise ModelFileError(f"{self.source}: tensor {name!r} has NaN or infinite values")
        return StoredTensor(name, fmt, data, shape)

    def kv_scales(self) -> KVScales:
        """One for K and one for V of each layer. Raises ModelFileError naming the first that is not there or no
        scale."""
        layers = range(self.spec.num_layers)
        return KVScales(*(tuple(self._kv_scale(i, kind) * self._scales_largest for i in layers) for kind in "kv"))

    def _kv_scale(self, layer: int, kind: str) -> float:
        names = [f"model.layers.{layer}.{name.format(kind)}" for name in _SCALE_NAMES]
        name = next((name for name in names if name in self._scales), None)
        if name is None:
            raise ModelFileError(
                f"{self.source}: kv_scales 'checkpoint', but layer {layer} has no scale for {kind.upper()}: "
                f"none of {', '.join(names)} is there"
            )
        data = self._scales[name]()
        value = float(data.flatten()[0]) if data.numel() == 1 else math.nan
        if not (math.isfinite(value) and value > 0):
            raise ModelFileError(
                f"{self.source}: tensor {name!r} must be one number above 0, got {data.tolist()!r:.60}"
            )
        return value


def open_checkpoint(path: Path) -> Checkpoint:
    """A .gguf file or a Hugging Face directory. Raises ModelFileError before anything could be served."""
    if path.is_dir():
        return _open_hf(path)
    if path.suffix == ".gguf":
        return _open_gguf(read_gguf(path))
    raise ModelFileError(f"{path}: expected a .gguf file or a directory with config.json and safetensors")


def _open_hf(path: Path) -> Checkpoint:
    config = read_json(path / "config.json")
    generation_file = path / "generation_config.json"
    generation = read_json(generation_file) if generation_file.exists() else {}
    scheme = _named(path / "config.json", lambda: _kv_scheme(config.get("quantization_config")))
    spec = _named(path / "config.json", lambda: from_hf(config, generation))
    weights = read_safetensors(path)
    _check(path, spec, {n: (e.shape, e.file) for n, e in weights.tensors.items()})
    for name in spec.tensor_shapes():
        entry = weights.tensors[name]
        if entry.dtype not in ("F32", "F16", "BF16"):
            raise ModelFileError(f"{entry.file}: tensor {name!r} has dtype {entry.dtype}; known: F32, F16, BF16")
    files = [path / "config.json", *([generation_file] if generation_file.exists() else []), *weights.files]
    read = {name: _hf_reader(weights, name) for name in spec.tensor_shapes()}
    scales = {name: partial(weights.read, name) for name in weights.tensors if name.endswith(_SCALE_ENDS)}
    return Checkpoint(path, spec, _fingerprint(files, f"{config}{generation}"), read, scales, scheme)


# Where checkpoints keep the scales of a layer's K ("k") and V ("v").
_SCALE_NAMES = (
    "self_attn.{}_scale",
    "attn.{}_scale",
    "self_attn.attn.{}_scale",
    "self_attn.{0}_proj.{0}_scale",
    "self_attn.{}_proj.output_scale",
)
_SCALE_ENDS = tuple(name.format(kind) for name in _SCALE_NAMES for kind in "kv")


def _kv_scheme(quant: Any) -> float:
    """The largest code of the type that the checkpoint's K/V scales are for, which only compressed-tensors says (all
    others mean FP8). Raises ModelFileError if anything besides K/V is quantized."""
    if not quant:
        return _LARGEST_FP8
    method = quant.get("quant_method") if isinstance(quant, dict) else quant
    if method != "compressed-tensors" or quant.get("config_groups") or not quant.get("kv_cache_scheme"):
        raise ModelFileError(f"quantization method {method!r} is not supported")
    scheme = quant["kv_cache_scheme"]
    for key, allowed in (
        ("num_bits", (8,)),
        ("type", ("float", "int")),
        ("strategy", ("tensor",)),
        ("dynamic", (False,)),
    ):
        if scheme.get(key) not in allowed:
            raise ModelFileError(
                f"kv_cache_scheme.{key} must be {' or '.join(map(str, allowed))}, got {scheme.get(key)!r}"
            )
    return _LARGEST_FP8 if scheme["type"] == "float" else LARGEST[torch.int8]


def _hf_reader(weights: SafetensorsDir, name: str) -> Callable[[], tuple[str, Tensor]]:
    return lambda: ("none", weights.read(name))


_GGUF_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ROPE_FACTORS = "rope_freqs.weight"
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def canonical_name(gguf_name: str, sandwich_norms: bool = False) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; unknown names come back unchanged."""
    parts = gguf_name.split(".")
    layer = _GGUF_LAYER | _GGUF_SANDWICH if sandwich_norms else _GGUF_LAYER
    if len(parts) == 2 and parts[0] in _GGUF_TOP:
        return f"{_GGUF_TOP[parts[0]]}.{parts[1]}"
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in layer:
        return f"model.layers.{parts[1]}.{layer[parts[2]]}.{parts[3]}"
    return gguf_name


def _open_gguf(file: GgufFile) -> Checkpoint:
    factors: tuple[float, ...] = ()
    if (t := file.tensors.get(_ROPE_FACTORS)) is not None:
        if t.type.name != "F32":
            raise ModelFileError(f"{file.path}: tensor {_ROPE_FACTORS!r} must be F32, is {t.type.name}")
        factors = tuple(file.read(_ROPE_FACTORS).view(torch.float32).tolist())
    spec = _named(file.path, lambda: from_gguf(file.metadata, file.tensors, factors))
    named = {canonical_name(name, spec.sandwich_norms): t for name, t in file.tensors.items()}
    by_name = {name: t for name, t in named.items() if name != _ROPE_FACTORS}
    _check(file.path, spec, {n: (t.shape, file.path) for n, t in by_name.items()})
    read = {}
    for name, shape in spec.tensor_shapes().items():
        t = by_name[name]
        if t.type.name not in _FLOATS:
            if len(shape) != 2:
                raise ModelFileError(f"{file.path}: tensor {t.name!r} is {t.type.name}, expected a float type")
            _named(f"{file.path}: tensor {t.name!r}", partial(codec, t.type.name.lower()))
        read[name] = _gguf_reader(file, t, _row_order(spec, name))
    return Checkpoint(file.path, spec, _fingerprint([file.path], repr(file.metadata)), read)


def _gguf_reader(file: GgufFile, t: GgufTensor, order: Tensor | None) -> Callable[[], tuple[str, Tensor]]:
    def read() -> tuple[str, Tensor]:
        raw = file.read(t.name)
        if t.type.name in _FLOATS:
            fmt, data = "none", raw.view(_FLOATS[t.type.name]).view(t.shape)
        else:
            fmt = t.type.name.lower()
            data = raw.view(t.shape[0], -1, codec(fmt).block_bytes)
        return fmt, data if order is None else data[order]

    return read


def _row_order(spec: ModelSpec, name: str) -> Tensor | None:
    """Which stored row is each canonical row, for q and k of arch llama; None: the same.

    Converters of that arch put the two features that turn together next to each other, so that within a head
    row 2i + j is canonical row i + j * head_dim / 2. Rows are whole numbers of blocks: they move as they are.
    """
    heads = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads}.get(name.split(".")[-2])
    if spec.architecture != "llama" or heads is None:
        return None
    rows = torch.arange(heads * spec.head_dim).view(heads, spec.head_dim // 2, 2)
    return rows.transpose(1, 2).flatten()


def _check(source: Path, spec: ModelSpec, found: Mapping[str, tuple[tuple[int, ...], Path]]) -> None:
    """Refuse what is missing or of another shape, and what belongs to a layer of another model; warn of what is not
    needed."""
    wanted = spec.tensor_shapes()
    for name, shape in wanted.items():
        if name not in found:
            raise ModelFileError(f"{source}: tensor {name!r} is missing")
        got, file = found[name]
        if got != shape:
            raise ModelFileError(f"{file}: tensor {name!r} has shape {list(got)}, expected {list(shape)}")
    for name in sorted(found.keys() - wanted.keys()):
        if name.endswith("_proj.bias"):  # leaving out a term of the sum would change every output
            raise ModelFileError(f"{found[name][1]}: tensor {name!r}: {spec.architecture} has no such bias")
        if _matters(name):
            raise ModelFileError(
                f"{found[name][1]}: tensor {name!r} is not part of {spec.architecture}: this is another model"
            )
        if not (name == "lm_head.weight" or name.endswith(("rotary_emb.inv_freq", *_SCALE_ENDS))):
            log.warning("%s: tensor %r is not part of the model and is ignored", found[name][1], name)


def _matters(name: str) -> bool:
    """Whether a tensor that is not wanted belongs to a layer, so that leaving it out changes the outputs."""
    layer = name.startswith(("model.layers.", "blk.")) or ".lora_" in name
    return layer and not name.endswith(("rotary_emb.inv_freq", "attn_rot_embd.weight", *_SCALE_ENDS))


def _named(what: Path | str, make: Callable[[], T]) -> T:
    """make(), with `what` put before its ModelFileError's message."""
    try:
        return make()
    except ModelFileError as e:
        raise ModelFileError(f"{what}: {e}") from e


def _fingerprint(files: Iterable[Path], metadata: str) -> str:
    digest = hashlib.sha256(metadata.encode(errors="surrogatepass"))
    for file in files:
        stat = file.stat()
        digest.update(f"{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return digest.hexdigest()
