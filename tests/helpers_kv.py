"""Sequences for tests of the KV accounting, and how they come in."""

from __future__ import annotations

from engine.kv.manager import PagedKVCache
from engine.types import GenerateRequest, SamplingParams, Sequence

A, B, C = list(range(100, 132)), list(range(200, 232)), list(range(300, 332))


class Maker:
    def __init__(self) -> None:
        self.num = 0

    def __call__(self, tokens: list[int], salt: str = "", **sampling: int) -> Sequence:
        self.num += 1
        request = GenerateRequest(str(self.num), tuple(tokens), SamplingParams(**sampling), cache_salt=salt)
        return Sequence(self.num, request, list(tokens), len(tokens))


def admit(kv: PagedKVCache, seq: Sequence, spare: int = 0) -> bool:
    hit = kv.lookup(seq)
    done = kv.reserve(seq, len(seq.tokens) - hit.num_tokens, hit, spare)
    seq.admitted_before |= done
    kv.check()
    return done
