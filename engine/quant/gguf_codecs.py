"""What the bytes of each ggml block type mean. Pure; bit layouts as in ggml's quantization types.

Data is uint8 [..., n_blocks, block_bytes]; results are [..., n_blocks * block]. Types whose weights are
`d * code + m` over groups of 32 decode to Codes, which the packed CPU kernel multiplies directly; the others
only convert to float.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import gguf
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from engine.errors import ModelFileError

GROUP = 32
"""Weights that share one (d, m) pair in Codes."""


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """weight[..., i] = d[..., i // 32] * codes[..., i] + m[..., i // 32]. codes < 2**bits, bits 4 or 8."""

    codes: Tensor  # uint8 [..., in]
    d: Tensor  # float32 [..., in / 32]
    m: Tensor  # float32 [..., in / 32]
    bits: int

    def to_float(self) -> Tensor:
        """The weights, float32 [..., in]."""
        grouped: Tensor = _split(self.codes, -1, GROUP).float()
        return grouped.mul_(self.d.unsqueeze(-1)).add_(self.m.unsqueeze(-1)).flatten(-2)


@dataclass(frozen=True, slots=True)
class Codec:
    """`block` weights per `block_bytes` bytes. `decode` None: no packed kernel for this type."""

    block: int
    block_bytes: int
    to_float: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Codes] | None = None


def codec(name: str) -> Codec:
    """`name` is a ggml type in lower case. Raises ModelFileError that lists the known ones."""
    try:
        return CODECS[name]
    except KeyError:
        raise ModelFileError(f"ggml type {name!r} is not supported; known: {', '.join(CODECS)}") from None


def decode(name: str, data: Tensor) -> Codes:
    """The codes of blocks [..., n_blocks, block_bytes]. Raises ModelFileError for a type that has none."""
    decoder = codec(name).decode
    if decoder is None:
        raise ModelFileError(f"ggml type {name!r} has no scale-and-minimum form over groups of {GROUP}")
    return decoder(data)


def to_float(name: str, data: Tensor) -> Tensor:
    """float32 [..., n_blocks * block]."""
    return codec(name).to_float(data)


def _split(x: Tensor, outer: int, inner: int) -> Tensor:
    """The last axis as two; -1 infers."""
    return x.reshape(*x.shape[:-1], outer, inner)


def _half(b: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, as float32 [..., n_blocks]."""
    return b[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1).float()


def _nibbles(q: Tensor) -> Tensor:
    """All low nibbles, then all high ones."""
    return torch.cat((q & 15, q >> 4), -1)


def _bits(b: Tensor, width: int = 1) -> Tensor:
    """uint8 [..., n] -> [..., 8 / width, n]: each byte's fields, lowest first."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=b.device).unsqueeze(-1)
    return (b.unsqueeze(-2) >> shifts) & ((1 << width) - 1)


def _q4_0(b: Tensor) -> Codes:
    d = _half(b, 0)
    return Codes(_nibbles(b[..., 2:]).flatten(-2), d, -8 * d, 4)


def _q4_1(b: Tensor) -> Codes:
    return Codes(_nibbles(b[..., 4:]).flatten(-2), _half(b, 0), _half(b, 2), 4)


def _fifth_bit(qh: Tensor) -> Tensor:
    """Bit j of the 32-bit word belongs to weight j: [..., 4] bytes -> [..., 32], worth 16 each."""
    return _bits(qh).transpose(-1, -2).flatten(-2) << 4


def _q5_0(b: Tensor) -> Codes:
    d = _half(b, 0)
    return Codes((_nibbles(b[..., 6:]) | _fifth_bit(b[..., 2:6])).flatten(-2), d, -16 * d, 8)


def _q5_1(b: Tensor) -> Codes:
    return Codes((_nibbles(b[..., 8:]) | _fifth_bit(b[..., 4:8])).flatten(-2), _half(b, 0), _half(b, 2), 8)


def _q8_0(b: Tensor) -> Codes:
    # Signed bytes become unsigned codes by an offset of 128, which flipping the sign bit does.
    d = _half(b, 0)
    return Codes((b[..., 2:] ^ 128).flatten(-2), d, -128 * d, 8)


def _k_scales(b: Tensor) -> tuple[Tensor, Tensor]:
    """`d` and m of the 8 groups of a K block whose header is d, dmin (float16) and 12 bytes of 6-bit pairs."""
    s = b[..., 4:16]
    low, high, extra = s[..., 0:4], s[..., 4:8], s[..., 8:12]
    scale = torch.cat((low & 63, (extra & 15) | ((low >> 6) << 4)), -1)
    minimum = torch.cat((high & 63, (extra >> 4) | ((high >> 6) << 4)), -1)
    d, dmin = _half(b, 0).unsqueeze(-1), _half(b, 2).unsqueeze(-1)
    return (d * scale).flatten(-2), -(dmin * minimum).flatten(-2)


def _k_nibbles(qs: Tensor) -> Tensor:
    """[..., 128] -> [..., 8, 32]: each run of 32 bytes holds two groups, low nibbles first."""
    return _bits(_split(qs, 4, 32), 4).flatten(-3, -2)


def _q4_k(b: Tensor) -> Codes:
    return Codes(_k_nibbles(b[..., 16:]).flatten(-3), *_k_scales(b), 4)


def _q5_k(b: Tensor) -> Codes:
    codes = _k_nibbles(b[..., 48:]) | (_bits(b[..., 16:48]) << 4)
    return Codes(codes.flatten(-3), *_k_scales(b), 8)


def _q6_k(b: Tensor) -> Tensor:
    """Groups of 16 with a signed 8-bit scale each: finer than Codes can say."""
    low = _split(_bits(_split(b[..., :128], 2, 64), 4), 2, 32).flatten(-3, -2)  # [..., 2, 4, 32]
    high = _bits(_split(b[..., 128:192], 2, 32), 2)
    q = _split((low | (high << 4)).flatten(-3), 16, 16).float() - 32
    scale = b[..., 192:208].contiguous().view(torch.int8) * _half(b, 208).unsqueeze(-1)
    return (q * scale.unsqueeze(-1)).flatten(-3)


def _by_table(kind: GGMLQuantizationType) -> Callable[[Tensor], Tensor]:
    """Rare types: gguf's own numpy tables, by way of the CPU."""

    def convert(b: Tensor) -> Tensor:
        values = gguf.quants.dequantize(b.flatten(-2).cpu().numpy(), kind)
        return torch.from_numpy(values).to(b.device)

    return convert


_DECODERS: dict[str, Callable[[Tensor], Codes]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
}
_TABLED = (
    "Q2_K",
    "Q3_K",
    "TQ1_0",
    "TQ2_0",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ2_S",
    "IQ3_XXS",
    "IQ3_S",
    "IQ1_S",
    "IQ1_M",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
)


def _coded(name: str) -> Codec:
    decoder = _DECODERS[name]
    return Codec(*GGML_QUANT_SIZES[GGMLQuantizationType[name]], lambda b: decoder(b).to_float(), decoder)


def _table() -> dict[str, Codec]:
    kinds = GGMLQuantizationType
    table = {name.lower(): _coded(name) for name in _DECODERS}
    table["q6_k"] = Codec(*GGML_QUANT_SIZES[kinds.Q6_K], _q6_k)
    for name in (n for n in _TABLED if n in kinds.__members__):  # newer types are absent from older gguf releases
        table[name.lower()] = Codec(*GGML_QUANT_SIZES[kinds[name]], _by_table(kinds[name]))
    return table


CODECS: dict[str, Codec] = _table()
