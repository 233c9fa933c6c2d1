"""The gateway's settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from deployments.config.limits import LimitsConfig
from deployments.config.tiers import Tier, resolve

AccountName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
CorsOrigin = Annotated[str, Field(pattern=r"^(\*|https?://[^/\s*]+)$")]


class StaticKey(BaseModel):
    """A key from the config file: `key` is the key itself or `env:NAME`, and a bare string is the same as only `key`.
    Without `org` the key is an organisation of its own. `models` None: all that its tier allows."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: str = Field(repr=False, min_length=1)
    org: AccountName | None = None
    project: AccountName = "default"
    tier: str = Field("default", min_length=1)
    scopes: tuple[Literal["models.read", "inference", "batch", "admin"], ...] = (
        "models.read",
        "inference",
        "batch",
        "admin",
    )
    models: tuple[str, ...] | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, value: Any) -> Any:
        return {"key": value} if isinstance(value, str) else value


class KeysConfig(BaseModel):
    """`database`: where keys, budgets and usage are kept: an absolute path or one that begins with `~` for SQLite,
    an SQLAlchemy URL, or `env:NAME` for either; without it there are only the keys in the config. Gateways on several
    machines need Postgres. A key is read again after `fresh_s`, changes are noticed every `poll_s` (a request that runs
    already is not cut off), and while the database is down, keys that were in use go on for `grace_s`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    database: str | None = Field(None, repr=False)
    fresh_s: float = Field(5.0, gt=0)
    poll_s: float = Field(0.25, gt=0, le=0.5)
    grace_s: float = Field(300.0, ge=0)

    @field_validator("database")
    @classmethod
    def _check_path(cls, value: str | None) -> str | None:
        if value is not None and "://" not in value and not value.startswith(("/", "~", "env:")):
            raise ValueError("must be a URL, env:NAME, an absolute path or one that begins with ~")
        return value


class LedgerConfig(BaseModel):
    """Usage goes to the database every `flush_s`. While that is down, it goes to files in `spill_dir`, by default one
    below `~/.local/state/sluicegate`; in a container, name a volume."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    flush_s: float = Field(0.5, gt=0, le=60)
    spill_dir: str | None = None


class GatewayConfig(BaseModel):
    """`api_keys`: keys that are let in besides those of `keys.database`; neither at all turns authentication
    off. `unknown_fields`: what becomes of body fields nobody knows (OpenAI refuses them, SDKs' `extra_body` and
    most servers do not). `max_body_bytes` holds before and after decompression. `body_timeout_s`: how long a client may
    take to send its body. `keepalive_s`: how long a stream stays silent before it sends a comment.
    `send_timeout_s`: how long a client may take nothing of its stream before it counts as gone. `cors_origins`: the web
    pages that may call from a browser, as `https://host[:port]` or `*`; none by default.
    `tiers`: without any, every key may do everything; with some, each key has one, `default_tier` if it names none.
    `public_metrics`: GET /metrics needs no key, else one with the scope `admin`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    api_keys: tuple[StaticKey, ...] = ()
    keys: KeysConfig = KeysConfig()
    ledger: LedgerConfig = LedgerConfig()
    tiers: Mapping[str, Tier] = {}
    default_tier: str | None = None
    limits: LimitsConfig = LimitsConfig()
    unknown_fields: Literal["ignore", "reject"] = "ignore"
    max_body_bytes: int = Field(8 * 1024 * 1024, ge=1024)
    body_timeout_s: float = Field(60.0, gt=0)
    max_prompts: int = Field(2048, ge=1)
    max_choices: int = Field(4096, ge=1)
    keepalive_s: float = Field(15.0, gt=0)
    send_timeout_s: float = Field(60.0, gt=0)
    cors_origins: tuple[CorsOrigin, ...] = ()
    public_metrics: bool = False

    @model_validator(mode="after")
    def _check_tiers(self) -> Self:
        if not self.tiers:
            if self.default_tier is not None:
                raise ValueError("default_tier needs tiers")
            return self
        known = ", ".join(self.tiers)
        unknown = self.default_tier is not None and self.default_tier not in self.tiers
        if unknown or resolve(self.tiers, self.default_tier, "default") is None:
            raise ValueError(f"default_tier must name one of the tiers {known}, which keys without a tier get")
        for i, key in enumerate(self.api_keys):
            if resolve(self.tiers, self.default_tier, key.tier) is None:
                raise ValueError(f"api_keys entry {i} names the tier {key.tier!r}; tiers: {known}")
        return self

    @property
    def has_limits(self) -> bool:
        """Whether anything is counted at all."""
        allowances = (*self.tiers.values(), *self.limits.orgs.values(), *self.limits.projects.values())
        return any(a.rpm or a.tpm or a.max_concurrent for a in allowances)
