"""The gateway's settings."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class GatewayConfig(BaseModel):
    """`api_keys`: keys that are let in, each the key itself or `env:NAME`; none at all turns authentication
    off. `unknown_fields`: what becomes of body fields nobody knows (OpenAI refuses them, SDKs' `extra_body` and
    most servers do not). `max_body_bytes` holds before and after decompression. `body_timeout_s`: how long a client may
    take to send its body. `keepalive_s`: how long a stream stays silent before it sends a comment.
    `public_metrics`: GET /metrics needs no key."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    api_keys: tuple[str, ...] = ()
    unknown_fields: Literal["ignore", "reject"] = "ignore"
    max_body_bytes: int = Field(8 * 1024 * 1024, ge=1024)
    body_timeout_s: float = Field(60.0, gt=0)
    max_prompts: int = Field(2048, ge=1)
    max_choices: int = Field(4096, ge=1)
    keepalive_s: float = Field(15.0, gt=0)
    public_metrics: bool = False
