"""An external server's settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import Field, model_validator

from deployments.config.environment import from_environment
from deployments.config.strict import StrictModel

_OURS = frozenset({"cache_salt", "priority", "service_tier", "stream_options"})  # mean something here, and not there
_NOT_SENT = frozenset(  # change no answer here, and tell the other server of our clients, or have it keep what they say
    {"metadata", "prediction", "prompt_cache_retention", "safety_identifier", "store", "user", "verbosity"}
)


class UpstreamConfig(StrictModel):
    """An external server with OpenAI's API. With `tokenizer` and `max_model_len` prompts can be counted without a pool:
    it is then served under its own name, and may be one of a route's `pools`. Else it can only be a fallback."""

    name: Annotated[str, Field(pattern=r"^\S{1,200}$")]
    """The name by which routes call it."""
    base_url: Annotated[str, Field(pattern=r"^https?://[^\s/@]+(/\S*)?$")]
    """Its address, up to what comes before `/chat/completions`. It has no user and password: see `api_key`."""
    api_key: Annotated[str, Field(pattern=r"^env:[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    """`env:NAME`: the environment variable that holds the key it asks for."""
    models: Mapping[str, str] = {}
    """Our model id to the server's. Others keep their names."""
    drop_fields: frozenset[str] = frozenset()
    """Fields of request bodies that the server does not understand, which are left out."""
    tokenizer: Annotated[str, Field(min_length=1)] | None = None
    """A model directory, .gguf file or `pkg://package/file` with the vocabulary and the chat template of its model."""
    max_model_len: int | None = Field(None, ge=2)
    """The context of its model in tokens. To be given with `tokenizer`."""
    max_connections: int = Field(256, ge=1)
    """The most connections to it from one gateway."""
    connect_s: float = Field(5.0, gt=0)
    """Seconds that it may take to accept a connection."""
    first_token_s: float = Field(30.0, gt=0)
    """Seconds that it may take to begin its answer."""
    idle_s: float = Field(60.0, gt=0)
    """Seconds of silence within an answer after which it counts as broken."""

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
        """All fields that are left out, ours among them."""
        return self.drop_fields | _OURS | _NOT_SENT

    def secret(self) -> str | None:
        """Raises ValueError when the variable is not set."""
        if self.api_key is None:
            return None
        return from_environment(self.api_key, f"upstreams.{self.name}.api_key: the")
