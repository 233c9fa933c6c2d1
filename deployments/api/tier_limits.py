"""How long an answer a tier allows."""

from __future__ import annotations

from deployments.api.errors import ApiError, invalid
from deployments.config.tiers import Tier


def check_ceiling(tier: Tier, param: str, asked: int | None) -> None:
    """Raises ApiError 400 for a request that asks for more than the tier's `max_tokens`."""
    if asked is not None and tier.max_tokens is not None and asked > tier.max_tokens:
        raise _above(param, asked, tier.max_tokens)


def default_tokens(tier: Tier, usual: int | None, num_prompt: int, num_choices: int) -> int | None:
    """How many tokens each of `num_choices` answers gets when the request does not say: at most `usual` (None: no
    bound), the tier's ceiling, and what could ever pass its tokens per minute besides prompts of `num_prompt` tokens.
    At least 1: what cannot pass at all is refused where it is counted."""
    bounds = [bound for bound in (usual, tier.max_tokens) if bound is not None]
    if tier.tpm is not None:
        bounds.append(max(1, (tier.tpm - num_prompt) // num_choices))
    return min(bounds, default=None)


def _above(param: str, asked: int, ceiling: int) -> ApiError:
    message = (
        f"Invalid '{param}': integer above maximum value. Your service tier allows a value <= {ceiling}, but got "
        f"{asked} instead."
    )
    return invalid(message, param, "integer_above_max_value")
