"""What sampling settings may be. A gateway words its own refusals first; this is for everybody who uses the library."""

from __future__ import annotations

import math

from engine.errors import InvalidRequestError
from engine.types import SamplingParams

# Of each number: its least and its greatest value. Not-a-number is outside of any range.
_RANGES = {
    "max_tokens": (0, math.inf),
    "min_tokens": (0, math.inf),
    "n": (1, math.inf),
    "temperature": (0.0, 1e6),
    "top_p": (0.0, 1.0),
    "top_k": (0, math.inf),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-1e6, 1e6),
    "frequency_penalty": (-1e6, 1e6),
    "repetition_penalty": (1e-6, 1e6),
}


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidRequestError that names the setting: one that no sampler can follow must not reach a step, where it
    would end everybody's."""
    for name, (least, most) in _RANGES.items():
        value = getattr(params, name)
        if not least <= value <= most:
            raise InvalidRequestError(f"{name} must be {_words(least, most)}, got {value}", name)
    if params.top_p == 0.0:
        raise InvalidRequestError("top_p must be above 0; for the likeliest token alone use temperature 0", "top_p")
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and count < 0:
            raise InvalidRequestError(f"{name} must be None or at least 0, got {count}", name)
    for token, bias in params.logit_bias:
        if not 0 <= token < vocab_size or not -1e6 <= bias <= 1e6:
            raise InvalidRequestError(
                f"logit_bias must map ids in [0, {vocab_size}) to finite numbers, got {token}: {bias}", "logit_bias"
            )
    if wrong := [token for token in params.stop_token_ids if not 0 <= token < vocab_size]:
        raise InvalidRequestError(f"stop_token_ids must be in [0, {vocab_size}), got {wrong[0]}", "stop_token_ids")
    if "" in params.stop:
        raise InvalidRequestError("stop must hold no empty string", "stop")


def _words(least: float, most: float) -> str:
    return f"at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
