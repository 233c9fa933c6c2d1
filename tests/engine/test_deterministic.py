"""`deterministic: true`: logits have the same bits alone, in batches of any size and in any chunks, with the compiled
kernels and without."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_models import make_gguf, make_hf_dir

from engine.batch import build_batch
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.executor.local import LocalExecutor
from engine.kernels import cpu, fixed
from engine.kv.storage import KVStorage
from engine.types import SeqSlice

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 6, "max_position_embeddings": 512,
}  # fmt: skip
WEIGHTS = {
    "float32": ("llama", make_hf_dir, {"dtype": "float32"}),
    "bfloat16": ("llama", make_hf_dir, {"dtype": "bfloat16"}),
    "q4": ("llama", make_gguf, {}),
    "q4_bfloat16": ("llama", make_gguf, {"dtype": "bfloat16"}),
    "gemma2": ("gemma2", make_hf_dir, {"dtype": "float32"}),
}
LENGTHS = (1, 16, 17, 40, 3, 60, 270)
MANY = 32


@pytest.fixture(params=["torch", "native"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    before = torch.get_num_threads()
    if request.param == "torch":
        monkeypatch.setattr(cpu, "available", lambda: False)
    elif not cpu.available():
        pytest.skip("no C++ compiler")
    yield request.param
    torch.set_num_threads(before)


class Rank:
    """A loaded model; every call has a cache of its own, or goes on with the last one."""

    def __init__(self, model: Path, **settings: Any) -> None:
        config = EngineConfig(model=str(model), device="cpu", num_kv_blocks=8, max_num_seqs=MANY, **settings)
        self._executor = LocalExecutor(config)
        self._executor.start()
        self._runner = self._executor.rank.runner
        self.fresh()

    def fresh(self) -> None:
        self._storage = KVStorage(self._runner.storage.layout, 32 * MANY, CPU)

    def logits(self, *slices: SeqSlice) -> tuple[torch.Tensor, ...]:
        batch = build_batch(slices, 16, CPU)
        with torch.inference_mode():
            rows = self._runner.model.logits(self._runner.model.forward(batch, self._storage.layers))
        return rows.split([len(s.token_ids) for s in slices])


def sequences(seed: int, count: int) -> list[SeqSlice]:
    rng = random.Random(seed)
    made = []
    for i in range(count):
        n = LENGTHS[i % len(LENGTHS)]
        tokens = tuple(rng.randrange(3, 288) for _ in range(n))
        made.append(SeqSlice(i, tokens, 0, tuple(range(32 * i, 32 * i + -(-n // 16))), sample=True))
    return made


def part(s: SeqSlice, start: int, stop: int) -> SeqSlice:
    return s._replace(token_ids=s.token_ids[start:stop], start=start)


@pytest.mark.slow
@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_same_bits_alone_and_in_any_batch(tmp_path: Path, path: str, weights: str) -> None:
    arch, make, settings = WEIGHTS[weights]
    rank = Rank(make(tmp_path, arch, **SHAPE), deterministic=True, num_threads=1, **settings)
    work = sequences(0, len(LENGTHS))
    alone = []
    for s in work:
        rank.fresh()
        alone += rank.logits(s)
    for count in (2, 7, MANY):
        rank.fresh()
        crowd = sequences(0, count) if count <= len(work) else [*work, *sequences(1, count)[len(work) :]]
        together = rank.logits(*random.Random(count).sample(crowd, count))
        order = random.Random(count).sample(range(count), count)
        for place, i in enumerate(order):
            if i < len(work):
                assert torch.equal(together[place], alone[i]), f"sequence {i} among {count}"
    for chunk in (1, 7, 64):
        rank.fresh()
        done: list[list[torch.Tensor]] = [[] for _ in work]
        longest = 20 if chunk == 1 else max(LENGTHS)  # token by token takes long
        for start in range(0, longest, chunk):
            live = [s for s in work if len(s.token_ids) > start]
            for s, rows in zip(live, rank.logits(*(part(s, start, start + chunk) for s in live)), strict=True):
                done[s.seq_id].append(rows)
        for got, want in zip(done, alone, strict=True):
            rows = torch.cat(got)
            assert torch.equal(rows, want[: len(rows)]), f"in chunks of {chunk}"


@pytest.mark.slow
def test_threads_share_the_work_without_changing_that(tmp_path: Path, path: str) -> None:
    rank = Rank(make_hf_dir(tmp_path, **SHAPE), deterministic=True, num_threads=2)
    one, other = sequences(0, 7)[5:]
    alone = rank.logits(one)[0]
    rank.fresh()
    assert torch.equal(rank.logits(other, one)[1], alone)


def test_a_backend_that_depends_on_the_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="its results depend on the batch, and deterministic is on"):
        Rank(make_hf_dir(tmp_path), deterministic=True, attention_backend="torch")


def test_a_tile_has_no_more_rows_than_come_out_alike() -> None:
    weight = torch.randn(24, 40)

    def by_fours(x: torch.Tensor) -> torch.Tensor:
        """As a library that takes four rows at a time and the others in another way."""
        whole = len(x) // 4 * 4
        return torch.cat([x[:whole] @ weight.T, (x[whole:] @ weight.T) * (1 + 2**-20)])

    def by_place(x: torch.Tensor) -> torch.Tensor:
        return (x @ weight.T) * (1 + torch.arange(len(x))[:, None] * 2.0**-10)

    torch.set_num_threads(1)
    assert fixed.stable_rows(by_place, 40, torch.float32, CPU) == 1
    assert fixed.stable_rows(by_fours, 40, torch.float32, CPU) > 1
    x = torch.randn(37, 40)
    torch.testing.assert_close(fixed.in_tiles(by_fours, x, 4), x @ weight.T)
