"""One step on one rank: from a plan to its result."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.batch import build_batch
from engine.errors import ConfigError
from engine.kv.storage import KVStorage
from engine.kv.transfer import Layers
from engine.models.base import Model
from engine.runner.copies import BlockCopies
from engine.runner.graphs import StepGraph
from engine.runner.sampler import Fault, Sampled, Sampler
from engine.runner.threads import one_torch_thread
from engine.spec.base import Proposer
from engine.types import NewSequence, SeqSlice, SliceResult, StepPlan, StepResult, TokenLogprob

_LOGIT_ROWS = 64
"""Prompt logprobs are made this many rows at a time: a row of logits is vocab_size floats."""


class Runner:
    """Runs plans in order. Remembers of a sequence only what its NewSequence said, from `new` to `finished`."""

    def __init__(
        self,
        model: Model,
        storage: KVStorage,
        sampler: Sampler,
        proposer: Proposer,
        block_size: int,
        device: torch.device,
        graph: StepGraph | None = None,
        copies: BlockCopies | None = None,
    ) -> None:
        self._model = model
        self._storage = storage
        self._sampler = sampler
        self._proposer = proposer
        self._block_size = block_size
        self._device = device
        self._graph = graph
        self._copies = copies
        self._known: dict[int, NewSequence] = {}

    @property
    def model(self) -> Model:
        """The model, with its weights."""
        return self._model

    @property
    def graph(self) -> StepGraph | None:
        """What replays captured steps; None where steps are never captured."""
        return self._graph

    @property
    def num_sequences(self) -> int:
        """Sequences that are remembered, here and by the sampler together."""
        return len(self._known.keys() | self._sampler.seq_ids)

    @property
    def storage(self) -> KVStorage:
        """The rank's KV cache."""
        return self._storage

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Run one plan. The slices of the result align with plan.slices."""
        self._register(plan)
        if self._copies is not None:
            self._copies.run(plan.stores, plan.loads, plan.moves)
        if not plan.slices:
            return StepResult(plan.step_id, ())
        hidden = None if self._graph is None else self._graph.hidden(plan.slices)
        captured = None if hidden is None else self._graph
        if hidden is None:
            batch = build_batch(plan.slices, self._block_size, self._device)
            hidden = self._model.forward(batch, self._storage.layers)
        ends = _ends(plan.slices)
        prompt_logprobs = {
            i: self._prompt_logprobs(s, hidden[end - len(s.token_ids) : end])
            for i, (s, end) in enumerate(zip(plan.slices, ends, strict=True))
            if self._known[s.seq_id].sampling.prompt_logprobs is not None
        }
        sampled = self._sample(plan.slices, ends, hidden, captured)
        results = []
        for i, s in enumerate(plan.slices):
            got = sampled.get(s.seq_id, (None, None))
            if isinstance(got, Fault):
                self._clean(s.block_ids)
                results.append(SliceResult(fault=got.reason))
                continue
            token, logprob = got
            results.append(
                SliceResult(
                    token_ids=() if token is None else (token,),
                    logprobs=() if logprob is None else (logprob,),
                    prompt_logprobs=tuple(prompt_logprobs.get(i, ())),
                )
            )
        return StepResult(plan.step_id, tuple(results))

    @torch.inference_mode()
    def read_blocks(self, block_ids: Seq[int]) -> Layers:
        """Copies of blocks, per layer its tensors."""
        self._settle()
        ids = torch.tensor(block_ids, dtype=torch.int64, device=self._device)
        return tuple(tuple(tensor[ids] for tensor in layer) for layer in self._storage.by_block)

    @torch.inference_mode()
    def write_blocks(self, block_ids: Seq[int], layers: Layers) -> None:
        """Overwrite blocks. Raises ConfigError for tensors of another shape or dtype than the cache's."""
        self._settle()
        mine = [(tuple(t.shape[1:]), t.dtype) for layer in self._storage.by_block for t in layer]
        theirs = [(tuple(t.shape[1:]), t.dtype) for layer in layers for t in layer]
        if mine != theirs:
            raise ConfigError(
                f"these blocks are {theirs[0] if theirs else 'nothing'} in {len(layers)} layers, "
                f"this cache's are {mine[0]} in {len(self._storage.by_block)}"
            )
        ids = torch.tensor(block_ids, dtype=torch.int64, device=self._device)
        for own, new in zip(self._storage.by_block, layers, strict=True):
            for tensor, rows in zip(own, new, strict=True):
                tensor[ids] = rows.to(self._device)

    def _clean(self, block_ids: Seq[int]) -> None:
        """Replaces what is not a finite number: whoever gets the blocks next multiplies what it does not see by 0."""
        ids = torch.tensor([block for block in block_ids if block >= 0], dtype=torch.int64, device=self._device)
        for tensor in (t for layer in self._storage.by_block for t in layer if t.dtype.is_floating_point):
            tensor[ids] = tensor[ids].float().nan_to_num_(0.0, 0.0, 0.0).to(tensor.dtype)

    def _settle(self) -> None:
        """Wait until the blocks that the last plan loads are complete."""
        if self._copies is not None:
            self._copies.run((), ())

    def _register(self, plan: StepPlan) -> None:
        self._sampler.forget(plan.finished)
        self._proposer.forget(plan.finished)
        for seq_id in plan.finished:
            self._known.pop(seq_id, None)
        for new in plan.new:
            self._known[new.seq_id] = new
            self._sampler.add(new)

    def _sample(
        self, slices: Seq[SeqSlice], ends: Seq[int], hidden: Tensor, captured: StepGraph | None
    ) -> dict[int, Sampled]:
        """The next token of every sampling slice, by seq_id. `captured`: what gave `hidden`, if not the model."""
        chosen = [(s, end - 1) for s, end in zip(slices, ends, strict=True) if s.sample]
        if not chosen:
            return {}
        rows = [row for _, row in chosen]
        logits = captured.logits(hidden, rows) if captured else self._model.logits(self._take(hidden, rows))
        ids = [s.seq_id for s, _ in chosen]
        positions = [s.start + len(s.token_ids) for s, _ in chosen]
        return dict(zip(ids, self._sampler.sample(ids, positions, logits), strict=True))

    def _take(self, hidden: Tensor, rows: Seq[int]) -> Tensor:
        if len(rows) == hidden.shape[0]:
            return hidden
        with one_torch_thread():
            return hidden[torch.tensor(rows, device=self._device)]

    def _prompt_logprobs(self, s: SeqSlice, hidden: Tensor) -> list[TokenLogprob]:
        """Log probabilities of the prompt tokens that follow the slice's rows."""
        known = self._known[s.seq_id]
        targets = known.prompt[s.start + 1 : s.start + 1 + len(s.token_ids)]
        k = known.sampling.prompt_logprobs or 0
        found: list[TokenLogprob] = []
        for at in range(0, len(targets), _LOGIT_ROWS):
            part = targets[at : at + _LOGIT_ROWS]
            logits = self._model.logits(hidden[at : at + len(part)])
            found += self._sampler.prompt_logprobs(logits, part, k)
        return found


def _ends(slices: Seq[SeqSlice]) -> list[int]:
    """One past each slice's last row."""
    ends, row = [], 0
    for s in slices:
        row += len(s.token_ids)
        ends.append(row)
    return ends
