"""The runner against a model whose next token is always the token plus one."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from engine.kv.storage import KVLayout, KVStorage
from engine.runner.runner import Runner
from engine.runner.sampler import Sampler
from engine.spec.none import NoProposer
from engine.types import NewSequence, SamplingParams, SeqSlice, StepPlan

VOCAB = 400
CPU = torch.device("cpu")


class PlusOne:
    """Logit 5 for token + 1, 0 elsewhere. Hidden states are the token ids."""

    def __init__(self):
        self.logit_rows = []

    def forward(self, batch, kv):
        return batch.input_ids[:, None].float()

    def logits(self, hidden):
        assert torch.is_inference_mode_enabled()
        self.logit_rows.append(hidden.shape[0])
        out = torch.zeros(hidden.shape[0], VOCAB)
        return out.scatter_(1, hidden.long() + 1, 5.0)


class Recorder(Sampler):
    """The real sampler, noting what it is asked."""

    def __init__(self):
        super().__init__(VOCAB, CPU)
        self.asked = []

    def sample(self, seq_ids, positions, logits):
        self.asked.append((list(seq_ids), list(positions)))
        return super().sample(seq_ids, positions, logits)


@pytest.fixture
def rig():
    model, sampler = PlusOne(), Recorder()
    storage = KVStorage(KVLayout(1, 1, 2, 4, torch.float32), 100, CPU)
    return Runner(model, storage, sampler, NoProposer(), 4, CPU), model, sampler


def _slice(seq_id, tokens, start, sample):
    return SeqSlice(seq_id, tuple(tokens), start, tuple(range(-(-(start + len(tokens)) // 4))), sample)


def _new(seq_id, prompt, **params):
    return NewSequence(seq_id, SamplingParams(temperature=0.0, **params), 0, tuple(prompt))


def test_results_align_with_slices_and_only_sampled_rows_get_logits(rig):
    runner, model, sampler = rig
    plan = StepPlan(
        7,
        slices=(
            _slice(5, range(10, 16), 0, sample=False),  # a prompt chunk
            _slice(3, [50], 8, sample=True),  # a decode
            _slice(9, range(20, 30), 0, sample=True),  # a whole prompt
        ),
        new=(_new(5, range(10, 30)), _new(3, range(42, 50), logprobs=1), _new(9, range(20, 30))),
    )
    result = runner.run(plan)
    assert result.step_id == 7
    assert [s.token_ids for s in result.slices] == [(), (51,), (30,)]
    assert sampler.asked == [([3, 9], [9, 10])]
    assert model.logit_rows == [2]
    assert [len(s.logprobs) for s in result.slices] == [0, 1, 0]
    assert result.slices[1].logprobs[0].token_id == 51
    assert not any(s.prompt_logprobs or s.drafts for s in result.slices)


@pytest.mark.parametrize("chunk", [1, 7, 64, 65, 200])
def test_prompt_logprobs_cover_every_prompt_token_but_the_first(rig, chunk):
    runner, model, _ = rig
    prompt = [*range(10, 140), 300, 7, 8]  # 300 and 7 are surprises
    found, new = [], (_new(1, prompt, prompt_logprobs=2),)
    for at in range(0, len(prompt), chunk):
        part = prompt[at : at + chunk]
        last = at + len(part) == len(prompt)
        (result,) = runner.run(StepPlan(0, (_slice(1, part, at, sample=last),), new)).slices
        assert len(result.prompt_logprobs) == len(part) - last
        found += result.prompt_logprobs
        new = ()
    assert [x.token_id for x in found] == prompt[1:]
    likely = [x.logprob > -2 for x in found]
    assert likely == [b == a + 1 for a, b in pairwise(prompt)]
    assert found[0].top[0] == (11, found[0].logprob)
    assert max(model.logit_rows) <= 64


def test_decoding_scores_no_prompt(rig):
    runner, model, _ = rig
    runner.run(StepPlan(0, (_slice(1, [5, 6], 0, sample=True),), (_new(1, [5, 6], prompt_logprobs=0),)))
    (result,) = runner.run(StepPlan(1, (_slice(1, [7], 2, sample=True),))).slices
    assert result.prompt_logprobs == ()
    assert model.logit_rows == [1, 1, 1]


def test_finished_sequences_are_forgotten_first(rig):
    runner, _, _ = rig
    runner.run(StepPlan(0, (_slice(1, [5], 0, sample=True),), (_new(1, [5]),)))
    # The id may return in the same plan: what it was is gone, what it is now counts.
    plan = StepPlan(1, (_slice(1, [9], 0, sample=True),), (_new(1, [9], prompt_logprobs=0),), finished=(1,))
    assert runner.run(plan).slices[0].token_ids == (10,)
    assert runner.run(StepPlan(2, (), (), finished=(1,))).slices == ()
    assert runner.num_sequences == 0
