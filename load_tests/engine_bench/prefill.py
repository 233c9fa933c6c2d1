"""Prefill speed by length of the chunk and of the context before it."""

from __future__ import annotations

from engine.types import NewSequence, SamplingParams, SeqSlice, StepPlan
from load_tests.engine_bench.bench import Bench
from load_tests.engine_bench.figures import Figures, MeasuredRow
from load_tests.engine_bench.timing import seconds

_COLUMNS = {"chunk": "chunk", "context": "context before", "ms": "ms", "tokens_per_s": "tokens/s"}
_SEQ_ID = 0


def run(bench: Bench) -> list[Figures]:
    subject = bench.subject
    subject.run(StepPlan(0, (), new=(NewSequence(_SEQ_ID, SamplingParams(), 0, (1,)),)))
    rows: list[MeasuredRow] = []
    for context in (0, 1024) if bench.quick else (0, 4096):
        rows += [_case(bench, chunk, context) for chunk in ((64, 256) if bench.quick else (64, 256, 512, 2048))]
    subject.run(StepPlan(0, (), finished=(_SEQ_ID,)))
    return [Figures("prefill", "Prefill, one chunk of one prompt per step, without its logits", _COLUMNS, rows)]


def _case(bench: Bench, chunk: int, context: int) -> MeasuredRow:
    subject = bench.subject
    end = context + chunk
    num_blocks = -(-end // subject.config.block_size)
    if end > subject.capacity.max_model_len or num_blocks > subject.capacity.num_blocks:
        bench.say(f"prefill of {chunk} after {context}: beyond the model's context or the cache")
        return {"chunk": chunk, "context": context}
    vocab = subject.capacity.vocab_size
    ids = tuple(i * 7919 % vocab for i in range(chunk))
    plan = StepPlan(0, (SeqSlice(_SEQ_ID, ids, context, tuple(range(num_blocks)), sample=False),))
    taken = seconds(lambda: subject.run(plan), bench.budget_s)
    bench.say(f"prefill of {chunk} after {context}: {chunk / taken:.0f} tokens/s")
    return {"chunk": chunk, "context": context, "ms": taken * 1e3, "tokens_per_s": chunk / taken}
