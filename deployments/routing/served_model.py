"""A model as clients see it."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.text import TextModel


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a model samples with when a request does not say (its generation_config)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model under the name that clients use. `max_model_len` 0: not known yet, no request can be taken.
    `fingerprint` names weights and settings in `system_fingerprint`."""

    id: str
    created: int
    owned_by: str
    max_model_len: int
    text: TextModel
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    fingerprint: str | None = None
