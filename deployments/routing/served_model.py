"""A model as clients see it."""

from __future__ import annotations

from dataclasses import dataclass

from deployments.config.sampling_defaults import OPENAI_DEFAULTS, SamplingDefaults
from engine.text import TextModel


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model under the name that clients use.

    `created`: Unix time in seconds. `max_model_len` in tokens; 0: not known yet, no request can be taken. `fingerprint`
    names weights and settings in `system_fingerprint`.
    """

    id: str
    created: int
    owned_by: str
    max_model_len: int
    text: TextModel
    defaults: SamplingDefaults = OPENAI_DEFAULTS
    fingerprint: str | None = None
