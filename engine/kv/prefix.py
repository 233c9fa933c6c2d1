"""What a block contains, as a digest: a SHA-256 chain over token ids, rooted in everything else that shapes K/V."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from hashlib import sha256
from struct import pack
from sys import byteorder

# Distinct first bytes keep a root from ever being the image of a block's input, and the other way round.
_ROOT = b"R"
_BLOCK = b"B"


def root_digest(fields: Mapping[str, str]) -> bytes:
    """32 bytes naming the empty prefix under `fields` (model version, adapter, salt, ...), in any order.

    Names and values are both hashed, each with its length, so no two different mappings share an input.
    """
    digest = sha256(_ROOT)
    for name, value in sorted(fields.items()):
        for part in (name.encode("utf-8", "surrogatepass"), value.encode("utf-8", "surrogatepass")):
            digest.update(pack("<Q", len(part)))
            digest.update(part)
    return digest.digest()


def block_digests(parent: bytes, token_ids: Seq[int], block_tokens: int) -> Iterator[bytes]:
    """The chain of block_digest() over all full blocks of `token_ids`, at half the time."""
    data, size = array("I", token_ids), 4 * block_tokens
    assert data.itemsize == 4
    if byteorder == "big":
        data.byteswap()
    packed = data.tobytes()
    for at in range(0, len(packed) - size + 1, size):
        parent = sha256(_BLOCK + parent + packed[at : at + size]).digest()
        yield parent


def block_digest(parent: bytes, token_ids: Seq[int]) -> bytes:
    """32 bytes naming the prefix `parent` followed by `token_ids`, each in 0 .. 2**32 - 1."""
    return sha256(_BLOCK + parent + pack(f"<{len(token_ids)}I", *token_ids)).digest()
