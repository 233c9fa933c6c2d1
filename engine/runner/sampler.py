"""Logits become tokens: the order of the edits, who is greedy, and each sequence's own history."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from collections.abc import Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.runner.draw import DrawRows, draw_ranked, draw_unranked
from engine.runner.logprobs import token_logprobs
from engine.runner.penalties import Ids, Penalised, TokenHistory, add_bias, ban, has_penalties, penalise, valid_ids
from engine.runner.random import uniform
from engine.runner.rows import row_argmax, take_rows
from engine.runner.threads import one_torch_thread
from engine.types import NewSequence, SamplingParams, TokenLogprob

GREEDY_BELOW = 1e-5  # temperatures so low are greedy: the draw could only differ between exact ties
_MAX_BIAS = 1e30  # keeps a biased logit finite whatever the request says


@dataclass(frozen=True, slots=True)
class Fault:
    """Why there is no next token for a sequence."""

    reason: str


Sampled = tuple[int, TokenLogprob | None] | Fault
"""A token, with its logprob where that is asked for."""


@dataclass(frozen=True, slots=True)
class _State:
    """What add() works out once per sequence. Only `history` changes."""

    params: SamplingParams
    seed: int
    num_prompt: int
    greedy: bool
    top_k: int  # 0: off
    bias_ids: Ids
    bias: npt.NDArray[np.float32]
    banned: Ids  # while the output is shorter than min_tokens
    history: TokenHistory | None  # None: no penalty needs it
    plain: bool  # just the most likely token, of logits as they are

    @property
    def ranked(self) -> bool:
        return self.top_k > 0 or self.params.top_p < 1.0 or self.params.min_p > 0.0


class Sampler:
    """Chooses the next token of each row, all rows at once. Not thread-safe.

    A row goes through: logit_bias; the min_tokens ban (eos ids and stop_token_ids impossible while fewer than
    min_tokens output tokens exist); repetition penalty (prompt and output); presence and frequency penalties
    (output); then the most likely token if greedy (temperature < 1e-5, top_k 1 or top_p <= 0), lowest id
    among equals; else temperature, top_k, top_p, min_p and one draw from (seed, position). Logprobs are those
    of the logits as they came. A token depends on its own row, parameters, seed and position alone.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._states: dict[int, _State] = {}

    @property
    def seq_ids(self) -> Set[int]:
        """The sequences that are remembered."""
        return self._states.keys()

    def add(self, new: NewSequence) -> None:
        """Register a sequence, before its first sample(). Adding a known id starts it afresh.

        Ids in logit_bias and end_ids outside the vocabulary are ignored: refusing them is up to
        whoever validates the request.
        """
        p = new.sampling
        bias = {i: b for i, b in p.logit_bias if 0 <= i < self._vocab_size}
        counts_prompt = p.repetition_penalty != 1.0
        history = TokenHistory(new.prompt if counts_prompt else (), self._vocab_size) if has_penalties(p) else None
        if history is not None:
            for token in new.output:
                history.append(token)
        greedy = p.temperature < GREEDY_BELOW or p.top_k == 1 or p.top_p <= 0.0
        self._states[new.seq_id] = _State(
            params=p,
            seed=new.seed,
            num_prompt=len(new.prompt),
            greedy=greedy,
            top_k=p.top_k if 0 < p.top_k < self._vocab_size else 0,
            bias_ids=np.fromiter(bias, np.int64, len(bias)),
            bias=np.clip(np.fromiter(bias.values(), np.float64, len(bias)), -_MAX_BIAS, _MAX_BIAS).astype(np.float32),
            banned=valid_ids(new.end_ids, self._vocab_size),
            history=history,
            plain=greedy and not (bias or new.end_ids or history or p.logprobs is not None),
        )

    def forget(self, seq_ids: Seq[int]) -> None:
        """Drop sequences; unknown ids are ignored."""
        for seq_id in seq_ids:
            self._states.pop(seq_id, None)

    @one_torch_thread()
    def sample(self, seq_ids: Seq[int], positions: Seq[int], logits: Tensor) -> list[Sampled]:
        """The next token of each row of logits [R, vocab] (fp32, contiguous; may be overwritten).

        positions[i] is the absolute index of the token to choose: len(prompt) for the first output token.
        Sampling a position again (a step run twice) forgets the output from there on. A sequence with
        penalties may be in a call only once, since its second row depends on the first. A row whose logits have NaN
        or infinity, or whose position needs a history that is not known, has a Fault in place of a token.
        """
        if not seq_ids:
            return []
        assert logits.dtype == torch.float32 and logits.is_contiguous(), (logits.dtype, logits.stride())
        assert logits.shape == (len(seq_ids), self._vocab_size), (logits.shape, len(seq_ids), self._vocab_size)
        states = [self._states[s] for s in seq_ids]
        faults = {row: why for row, (s, p) in enumerate(zip(states, positions, strict=True)) if (why := _rewind(s, p))}
        peaks, best = row_argmax(logits)
        for row, peak in enumerate(peaks.tolist()):
            if not math.isfinite(peak):  # NaN if any logit is, and minus infinity only if all are
                faults[row] = "the model gave logits that are not finite numbers"
        if faults:  # any numbers will do for these rows, so that the others are not disturbed
            rows = torch.tensor(sorted(faults), device=logits.device)
            logits[rows], peaks[rows], best[rows] = 0.0, 0.0, 0
        sampled = self._sampled(states, positions, logits, peaks, best)
        for row, why in faults.items():
            sampled[row] = Fault(why)
        return sampled

    def _sampled(
        self, states: Seq[_State], positions: Seq[int], logits: Tensor, peaks: Tensor, best: Tensor
    ) -> list[Sampled]:
        if all(s.plain for s in states):
            return [(token, None) for token in best.tolist()]

        scored = [i for i, s in enumerate(states) if s.params.logprobs is not None]
        raw = logits[scored] if scored else None  # a copy, before the edits
        dead = self._edit(states, positions, logits, peaks, best)
        tokens = self._choose(states, positions, logits, peaks, best, dead)
        for state, token in zip(states, tokens, strict=True):
            if state.history is not None:
                state.history.append(token)

        result: list[Sampled] = [(t, None) for t in tokens]
        if raw is not None:
            ks = [states[i].params.logprobs or 0 for i in scored]
            for i, entry in zip(scored, token_logprobs(raw, [tokens[i] for i in scored], ks), strict=True):
                result[i] = (tokens[i], entry)
        return result

    @one_torch_thread()
    def prompt_logprobs(self, logits: Tensor, targets: Seq[int], k: int) -> list[TokenLogprob]:
        """Logprob of targets[i] under row i of logits [r, vocab], with its k best alternatives."""
        return token_logprobs(logits, targets, [k] * len(targets))

    def _edit(self, states: Seq[_State], positions: Seq[int], logits: Tensor, peaks: Tensor, best: Tensor) -> set[int]:
        """Bias, ban and penalise in place, and bring peaks and best of the edited rows up to date.

        Returns the rows in which nothing is possible any more; they keep the best token of the raw logits.
        """
        biased = [(i, s.bias_ids, s.bias) for i, s in enumerate(states) if len(s.bias_ids)]
        banned = [
            (i, s.banned)
            for i, (s, p) in enumerate(zip(states, positions, strict=True))
            if len(s.banned) and p - s.num_prompt < s.params.min_tokens
        ]
        penalised = [
            Penalised(i, s.params, s.history) for i, s in enumerate(states) if s.history and len(s.history.ids)
        ]
        if biased:
            add_bias(logits, biased)
        if banned:
            ban(logits, banned)
        if penalised:
            penalise(logits, penalised)
        edited = sorted({i for i, *_ in biased} | {i for i, _ in banned} | {r.row for r in penalised})
        if not edited:
            return set()
        rows = torch.tensor(edited, device=logits.device)
        new_peaks, new_best = row_argmax(take_rows(logits, rows))
        alive = torch.isfinite(new_peaks)
        peaks[rows[alive]], best[rows[alive]] = new_peaks[alive], new_best[alive]
        return set(rows[~alive].tolist())

    def _choose(
        self, states: Seq[_State], positions: Seq[int], logits: Tensor, peaks: Tensor, best: Tensor, dead: set[int]
    ) -> list[int]:
        drawn = [i for i, s in enumerate(states) if not s.greedy and i not in dead]
        if drawn:
            u = uniform([states[i].seed for i in drawn], [positions[i] for i in drawn])
            for draw, ranked in ((draw_ranked, True), (draw_unranked, False)):
                at = [j for j, i in enumerate(drawn) if states[i].ranked is ranked]
                if at:
                    rows = torch.tensor([drawn[j] for j in at], device=logits.device)
                    filters = self._filters([states[drawn[j]] for j in at], u[at])
                    best[rows] = draw(take_rows(logits, rows), peaks[rows], filters)
        tokens: list[int] = best.tolist()
        return tokens

    def _filters(self, states: Seq[_State], u: npt.NDArray[np.float64]) -> DrawRows:
        def put(values: list[float], dtype: npt.DTypeLike) -> Tensor:
            return torch.from_numpy(np.array(values, dtype)).to(self._device)

        return DrawRows(
            temperature=put([s.params.temperature for s in states], np.float32),
            top_k=put([s.top_k for s in states], np.int64),
            top_p=put([s.params.top_p for s in states], np.float64),
            # The best token's weight is 1 whatever happens, so that a larger min_p means the best alone.
            min_p=put([min(s.params.min_p, 1.0) for s in states], np.float32),
            u=torch.from_numpy(u).to(self._device),
        )


def _rewind(state: _State, position: int) -> str | None:
    """Forgets the output from `position` on. Returns what is wrong if penalties need output that is not known."""
    if state.history is None:
        return None
    num_output = position - state.num_prompt
    state.history.rewind(num_output)
    if num_output == len(state.history.output):
        return None
    return (
        f"asked to sample position {position}, but only the output up to position "
        f"{state.num_prompt + len(state.history.output)} is known, and its penalties need all of it"
    )
