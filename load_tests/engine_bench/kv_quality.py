"""What a narrower cache costs in quality, and what it holds: each format beside float32.

Perplexity is the model's, of a chapter of prose, in one go. Agreement is with the ids that greedy decoding gives over
a float32 cache, from prompts cut out of the same text: once two texts differ in a token they are two texts, so what
counts is how long they stay one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.config import EngineConfig
from engine.engine import Engine
from engine.types import SamplingParams
from load_tests.engine_bench.bench import Bench
from load_tests.engine_bench.figures import Figures, MeasuredRow
from load_tests.engine_bench.kv_calibrate import calibrate

TEXT = Path(__file__).with_name("prose.txt")
FORMATS = ("float32", "float16", "bfloat16", "int8", "fp8_e4m3", "fp8_e5m2")
_CALIBRATED = ("int8", "fp8_e4m3", "fp8_e5m2")
_PROMPTS, _PROMPT_TOKENS, _NEW = 32, 24, 48
_MEMORY = 1 << 27


@dataclass(frozen=True, slots=True)
class _CacheQuality:
    perplexity: float
    continuations: list[tuple[int, ...]]
    num_blocks: int


def run(bench: Bench) -> list[Figures]:
    text = TEXT.read_text(encoding="utf-8")
    outcomes = {}
    for name in FORMATS:
        bench.say(f"cache {name}")
        outcomes[name] = _measure(bench, name, text)
    with TemporaryDirectory() as folder:
        scales = Path(folder) / "scales.json"
        calibrate(bench.model, text[len(text) // 2 :], scales)
        for name in _CALIBRATED:
            bench.say(f"cache {name}, calibrated")
            outcomes[f"{name}, calibrated"] = _measure(bench, name, text, str(scales))
    base = outcomes["float32"]
    rows: list[MeasuredRow] = []
    for name, got in outcomes.items():
        pairs = list(zip(base.continuations, got.continuations, strict=True))
        shared = [common_prefix(a, b) for a, b in pairs]
        rows.append(
            {
                "format": name,
                "perplexity": f"{got.perplexity:.4f}",
                "more": f"{100 * (got.perplexity / base.perplexity - 1):+.3f}",
                "shared": 100 * sum(shared) / sum(len(a) for a, _ in pairs),
                "equal": f"{sum(a == b for a, b in pairs)} of {len(pairs)}",
                "blocks": got.num_blocks / outcomes["float16"].num_blocks,
            }
        )
    columns = {
        "format": "K/V cache",
        "perplexity": "perplexity",
        "more": "against float32 %",
        "shared": "greedy tokens before the first difference %",
        "equal": "equal texts",
        "blocks": "blocks / float16's",
    }
    notes = (
        f"perplexity of {TEXT.name}; {len(base.continuations)} prompts, {len(base.continuations[0])} tokens each",
        "calibrated: one scale per layer, from the second half of the same text; otherwise one per token and head",
    )
    return [Figures("kv_quality", "Formats of the K/V cache: quality and capacity", columns, rows, notes)]


def _measure(bench: Bench, name: str, text: str, scales: str = "dynamic") -> _CacheQuality:
    config = EngineConfig(
        model=bench.model,
        device="cpu",
        kv_cache_dtype=name,
        kv_scales=scales,
        kv_cache_memory=_MEMORY,
        max_model_len=min(1536, bench.subject.capacity.max_model_len),
    )
    engine = Engine(config, text=bench.subject.text)
    try:
        ids = engine.text.tokenizer.encode(text)[: engine.capacity.max_model_len - 1]
        count = 4 if bench.quick else _PROMPTS
        step = (len(ids) - _PROMPT_TOKENS) // count
        prompts = [ids[i * step : i * step + _PROMPT_TOKENS] for i in range(count)]
        greedy = SamplingParams(max_tokens=8 if bench.quick else _NEW, temperature=0.0, ignore_eos=True)
        scored, *continued = engine.generate(
            [ids, *prompts], [replace(greedy, max_tokens=1, prompt_logprobs=0), *[greedy] * count]
        )
        logprobs = [entry.logprob for entry in scored.prompt_logprobs if entry is not None]
        return _CacheQuality(
            math.exp(-sum(logprobs) / len(logprobs)),
            [done.choices[0].token_ids for done in continued],
            engine.capacity.num_blocks,
        )
    finally:
        engine.close()


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with together."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
