"""An external server's settings."""

from __future__ import annotations

import os
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

_OURS = frozenset({"cache_salt", "priority", "service_tier", "stream_options"})  # mean something here, and not there


class UpstreamConfig(BaseModel):
    """`name` stands in routes. `base_url` ends before /chat/completions. `api_key` is `env:NAME`: the environment
    variable that has it. `models`: what a model of ours is called there; others keep their names. `drop_fields`: body
    fields it does not understand. `connect_s`, `first_token_s` and `idle_s` are how long it may take to accept, to
    begin and to go on.

    With `tokenizer` (a model directory, .gguf file or pkg://package/file whose vocabulary and chat template its model
    has) and `max_model_len` (its context), prompts can be counted without a pool: it is then served under its own name,
    or may be one of a route's `pools`."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    name: Annotated[str, Field(pattern=r"^\S{1,200}$")]
    base_url: Annotated[str, Field(pattern=r"^https?://[^\s/]+(/\S*)?$")]
    api_key: Annotated[str, Field(pattern=r"^env:[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    models: dict[str, str] = {}
    drop_fields: frozenset[str] = frozenset()
    tokenizer: Annotated[str, Field(min_length=1)] | None = None
    max_model_len: int | None = Field(None, ge=2)
    max_connections: int = Field(256, ge=1)
    connect_s: float = Field(5.0, gt=0)
    first_token_s: float = Field(30.0, gt=0)
    idle_s: float = Field(60.0, gt=0)

    @model_validator(mode="after")
    def _check_standalone(self) -> Self:
        if (self.tokenizer is None) != (self.max_model_len is None):
            raise ValueError("tokenizer must come with max_model_len: give both or neither")
        return self

    @property
    def standalone(self) -> bool:
        """Whether it can serve a model that no pool serves."""
        return self.tokenizer is not None

    @property
    def dropped(self) -> frozenset[str]:
        return self.drop_fields | _OURS

    def secret(self) -> str | None:
        """Raises ValueError when the variable is not set."""
        if self.api_key is None:
            return None
        variable = self.api_key.removeprefix("env:")
        if not (value := os.environ.get(variable)):
            raise ValueError(f"upstreams.{self.name}.api_key: the environment variable {variable} is not set")
        return value
