"""The real quantized model, from hand-made plans: ids and logprobs are those of transformers in float32 on the
dequantized weights."""

from __future__ import annotations

import math

import pytest
from tokenizers import Tokenizer

from engine.config import EngineConfig
from engine.executor.local import LocalExecutor
from engine.types import NewSequence, SamplingParams, SeqSlice, StepPlan
from tests.helpers_models import demo_gguf

pytestmark = pytest.mark.slow

BLOCK = 16
COUNT = "Count: 1, 2, 3, 4,"
COUNT_IDS = [216, 37, 28, 216, 38, 28, 216, 39, 28, 216, 40, 28, 216, 41, 28, 216, 33, 32, 28, 216, 33, 33, 28, 216]
COUNT_LOGPROBS = [-0.021, -0.015, -0.159, -0.051, -0.009]
FOX = "The quick brown fox jumps over the lazy dog. " * 3 + "The end"
FOX32_LOGPROB_SUM = -68.446
OTHERS = {
    "Count: 20, 21, 22,": " 23, 24, 2",
    "Count: 50, 51, 52,": " 53, 54, 5",
    "Count down: 9, 8, 7,": " 6, 5, 4, ",
}


class Loop:
    """Just enough of a scheduler: hands out blocks, cuts prompts into chunks, feeds tokens back."""

    def __init__(self, executor: LocalExecutor, num_blocks: int):
        self.executor = executor
        self.num_blocks = num_blocks
        self.next_id = 0
        self.ended: tuple[int, ...] = ()

    def run(self, prompts, params, chunk=512):
        """Greedy choices and results per prompt; all sequences run in the same steps."""
        free = list(range(self.num_blocks))[::-2] + list(range(self.num_blocks))[::-1][1::2]
        seqs, blocks, computed, logprobs, prompt_logprobs = {}, {}, {}, {}, {}
        new = []
        for prompt in prompts:
            i = self.next_id
            self.next_id += 1
            seqs[i], blocks[i], computed[i], logprobs[i], prompt_logprobs[i] = list(prompt), [], 0, [], []
            new.append(NewSequence(i, params, seed=i, prompt=tuple(prompt)))
        ends = {i: len(tokens) + params.max_tokens for i, tokens in seqs.items()}
        while live := [i for i in seqs if len(seqs[i]) < ends[i]]:
            slices = []
            for i in live:
                part = seqs[i][computed[i] : computed[i] + chunk]
                upto = computed[i] + len(part)
                while len(blocks[i]) * BLOCK < upto:
                    blocks[i].append(free.pop())
                last = upto == len(seqs[i])
                slices.append(SeqSlice(i, tuple(part), computed[i], tuple(blocks[i]), sample=last))
                computed[i] = upto
            plan = StepPlan(0, tuple(slices), tuple(new), self.ended)
            new, self.ended = [], ()
            for s, result in zip(slices, self.executor.submit(plan).result().slices, strict=True):
                assert len(result.token_ids) == s.sample
                seqs[s.seq_id] += result.token_ids
                logprobs[s.seq_id] += result.logprobs
                prompt_logprobs[s.seq_id] += result.prompt_logprobs
        self.ended = tuple(seqs)
        return [
            (tokens[len(prompt) :], logprobs[i], prompt_logprobs[i])
            for (i, tokens), prompt in zip(seqs.items(), prompts, strict=True)
        ]


@pytest.fixture(scope="module", params=["torch", "auto"])
def loop(request):
    """torch: as on a machine without a C++ compiler. auto: what this machine would choose."""
    config = EngineConfig(
        model=str(demo_gguf()),
        max_model_len=512,
        num_kv_blocks=64,
        num_threads=1,
        max_num_batched_tokens=64,
        attention_backend=request.param,
    )
    executor = LocalExecutor(config)
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr("engine.kernels.cpu.available", lambda: False)
        capacity = executor.start()
    assert (capacity.num_blocks, capacity.max_model_len, capacity.vocab_size) == (64, 512, 49152)
    assert 2 in capacity.eos_ids
    yield Loop(executor, capacity.num_blocks)
    executor.shutdown()


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    from engine.models.gguf_file import read_gguf

    meta = read_gguf(demo_gguf()).metadata
    vocab = {t: i for i, t in enumerate(meta["tokenizer.ggml.tokens"])}
    merges = [tuple(m.split(" ")) for m in meta["tokenizer.ggml.merges"]]
    tok = Tokenizer(models.BPE(vocab, merges))
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens([AddedToken(t) for t in ("<|im_start|>", "<|im_end|>")])
    return tok


def _params(max_tokens, **kwargs):
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **kwargs)


@pytest.mark.parametrize(("chunk", "num_tokens"), [(512, 24), (5, 6)])
def test_count_alone(loop, tokenizer, chunk, num_tokens):
    prompt = tokenizer.encode(COUNT).ids
    assert len(prompt) == 14
    ((ids, logprobs, _),) = loop.run([prompt], _params(num_tokens, logprobs=2), chunk)
    assert ids == COUNT_IDS[:num_tokens]
    assert [x.logprob for x in logprobs[:5]] == pytest.approx(COUNT_LOGPROBS, abs=2e-3)
    assert all(x.top[0] == (token, x.logprob) for token, x in zip(ids, logprobs, strict=True))


def test_four_mixed(loop, tokenizer):
    """Each sequence answers its own prompt; one is also compared with its logprobs alone."""
    prompts = [tokenizer.encode(text).ids for text in (COUNT, *OTHERS)]
    together = loop.run(prompts, _params(10, logprobs=0), chunk=7)
    assert together[0][0] == COUNT_IDS[:10]
    assert [tokenizer.decode(ids) for ids, _, _ in together[1:]] == list(OTHERS.values())
    ids, logprobs, _ = together[2]
    ((alone_ids, alone, _),) = loop.run([prompts[2]], _params(10, logprobs=0))
    assert ids == alone_ids
    assert [x.logprob for x in logprobs] == pytest.approx([x.logprob for x in alone], abs=1e-3)


@pytest.mark.parametrize("chunk", [512, 16, 5])
def test_fox_prompt_logprobs(loop, tokenizer, chunk):
    prompt = tokenizer.encode(FOX).ids[:32]
    ((ids, _, scored),) = loop.run([prompt], _params(3, prompt_logprobs=0), chunk)
    assert ids == [30, 198, 198]
    assert [x.token_id for x in scored] == prompt[1:]
    assert math.fsum(x.logprob for x in scored) == pytest.approx(FOX32_LOGPROB_SUM, abs=0.02)


def test_prompt_logprobs_do_not_depend_on_neighbours(loop, tokenizer):
    fox = tokenizer.encode(FOX).ids[:32]
    other = fox[:16] + tokenizer.encode(COUNT).ids
    runs = {
        "fox, other": loop.run([fox, other], _params(1, prompt_logprobs=0), chunk=9),
        "other, fox": loop.run([other, fox], _params(1, prompt_logprobs=0), chunk=9)[::-1],
        "apart": [loop.run([p], _params(1, prompt_logprobs=0))[0] for p in (fox, other)],
    }
    for i in range(2):
        first, *rest = ([x.logprob for x in run[i][2]] for run in runs.values())
        assert all(got == pytest.approx(first, abs=1e-2) for got in rest)
