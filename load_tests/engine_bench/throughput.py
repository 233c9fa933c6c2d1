"""Whole requests through the engine, beside transformers' generate on the same weights."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from engine.engine import Engine
from engine.models.locate import resolve
from engine.types import GenerateRequest, SamplingParams
from load_tests.convert import convert
from load_tests.engine_bench.bench import Bench
from load_tests.engine_bench.figures import Figures, MeasuredRow, ratio
from load_tests.errors import LoadError

_COLUMNS = {
    "engine": "engine",
    "prompt": "prompt",
    "concurrency": "concurrency",
    "tokens_per_s": "output tokens/s",
    "prefill_s": "all prefilled s",
    "itl_ms": "ITL ms",
    "over_transformers": "times transformers",
}
_PEER = "transformers bf16"
Generate = Callable[[list[int], int], None]


class Throughput(NamedTuple):
    """`tokens_per_s` counts output tokens over the whole run. `prefill_s`: until every request has its first."""

    tokens_per_s: float
    prefill_s: float | None
    itl_ms: float


def run(bench: Bench) -> list[Figures]:
    prompts, output = ((32,), 16) if bench.quick else ((32, 256), 64)
    concurrencies = (1, 8) if bench.quick else (1, 8, 32)
    runs: dict[tuple[str, int, int], list[Throughput]] = {}
    notes = [f"{output} tokens out, greedy; medians of {bench.rounds} alternating rounds"]
    with bench.subject.engine() as engine, transformers_of(bench.model) as generate:
        if isinstance(generate, LoadError):
            notes.append(f"no transformers: {generate}")
        for number in range(bench.rounds + 1):  # round 0 warms up
            bench.say(f"throughput, round {number} of {bench.rounds}" if number else "throughput, warming up")
            for prompt in prompts:
                if not isinstance(generate, LoadError):
                    ids = random_prompts(1, prompt, engine.capacity.vocab_size, number)[0]
                    got = run_transformers(generate, ids, output if number else 2)
                    runs.setdefault((_PEER, prompt, 1), []).append(got)
                for concurrency in concurrencies if number else (1,):
                    batch = random_prompts(concurrency, prompt, engine.capacity.vocab_size, number)
                    runs.setdefault(("sluicegate", prompt, concurrency), []).append(run_engine(engine, batch, output))
                    if number:
                        rate = runs["sluicegate", prompt, concurrency][-1].tokens_per_s
                        bench.say(f"throughput, prompt {prompt}, concurrency {concurrency}: {rate:.1f} tokens/s")
            if not number:
                runs.clear()
    return [Figures("throughput", "Output tokens per second of whole requests", _COLUMNS, list(_rows(runs)), notes)]


def random_prompts(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(length)] for _ in range(count)]


def run_engine(engine: Engine, batch: list[list[int]], output_tokens: int) -> Throughput:
    """All prompts at once, to the end."""
    params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    start = time.perf_counter()
    for i, prompt in enumerate(batch):
        engine.add(GenerateRequest(str(i), tuple(prompt), params))
    waiting = {str(i) for i in range(len(batch))}
    prefill = 0.0
    produced = 0
    while engine.has_work:
        for delta in engine.step():
            produced += len(delta.token_ids)
            waiting.discard(delta.request_id)
        if not waiting and not prefill:
            prefill = time.perf_counter() - start
    total = time.perf_counter() - start
    return Throughput(produced / total, prefill, (total - prefill) / max(1, output_tokens - 1) * 1e3)


@contextmanager
def transformers_of(model: str) -> Iterator[Generate | LoadError]:
    """The model in bfloat16, or why there is none. Converted for as long as the block runs if it must be."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    path = resolve(model)
    with tempfile.TemporaryDirectory() as folder:
        try:
            directory = path if path.is_dir() else convert(model, Path(folder) / "model")
        except LoadError as error:
            yield error
            return
        loaded: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)  # in eval mode

        @torch.inference_mode()
        def generate(prompt: list[int], output_tokens: int) -> None:
            limits = {"max_new_tokens": output_tokens, "min_new_tokens": output_tokens}
            ids = torch.tensor([prompt])
            loaded.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **limits)

        yield generate


def run_transformers(generate: Generate, prompt: list[int], output_tokens: int) -> Throughput:
    start = time.perf_counter()
    generate(prompt, output_tokens)
    total = time.perf_counter() - start
    return Throughput(output_tokens / total, None, total / output_tokens * 1e3)


def _rows(runs: dict[tuple[str, int, int], list[Throughput]]) -> Iterator[MeasuredRow]:
    rates = {key: median(r.tokens_per_s for r in own) for key, own in runs.items()}
    for (engine, prompt, concurrency), own in runs.items():
        prefills = [r.prefill_s for r in own if r.prefill_s is not None]
        yield {
            "engine": engine,
            "prompt": prompt,
            "concurrency": concurrency,
            "tokens_per_s": rates[engine, prompt, concurrency],
            "prefill_s": median(prefills) if prefills else None,
            "itl_ms": median(r.itl_ms for r in own),
            "over_transformers": ratio(rates[engine, prompt, concurrency], rates.get((_PEER, prompt, 1))),
        }
