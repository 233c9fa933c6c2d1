"""The gateway's settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from deployments.config.limits import LimitsConfig
from deployments.config.strict import StrictModel
from deployments.config.tiers import Tier, resolve

ACCOUNT_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"  # of organisations and projects
AccountName = Annotated[str, Field(pattern=ACCOUNT_NAME)]
Scope = Literal["models.read", "inference", "batch", "admin"]
USUAL_SCOPES: tuple[Scope, ...] = tuple(scope for scope in get_args(Scope) if scope != "admin")
"""What a key may do that is made without saying what."""
CorsOrigin = Annotated[str, Field(pattern=r"^(\*|https?://[^/\s*]+)$")]


class StaticKey(StrictModel):
    """An API key from the config file. A bare string is the same as only `key`, and no administrator."""

    key: str = Field(repr=False, min_length=1)
    """`env:NAME`: the variable in the environment of the gateway's process that holds the key. Or the key itself, for a
    server on the loopback address: it stands in Serve's logs then."""
    org: AccountName | None = None
    """The organisation it belongs to. By default the key is an organisation of its own."""
    project: AccountName = "default"
    """The project it belongs to."""
    tier: str = Field("default", min_length=1)
    """The tier of its requests. `default` is replaced by `default_tier` where that is given."""
    scopes: tuple[Scope, ...] = USUAL_SCOPES
    """What the key may do, by default all but `admin`. `batch` is reserved for batch jobs, which do not exist yet."""
    models: tuple[str, ...] | None = None
    """The model ids that it may see. By default all that its tier allows."""

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, value: Any) -> Any:
        return {"key": value} if isinstance(value, str) else value


class KeysConfig(StrictModel):
    """API keys in a database, with budgets and usage. A request that runs already is not cut off when its key is
    revoked."""

    database: str | None = Field(None, repr=False)
    """Where keys, budgets and usage are kept: an absolute path or one that begins with `~` (SQLite), an SQLAlchemy
    URL, or `env:NAME` for either, which a URL with a password needs unless the server is on the loopback address.
    `sluice keys create` makes the database. Gateways on several machines need Postgres. By default there are only the
    keys of the config file."""
    fresh_s: float = Field(5.0, gt=0)
    """Seconds after which a key in use is read from the database again."""
    poll_s: float = Field(0.25, gt=0, le=0.5)
    """Seconds between two looks for changed keys."""
    grace_s: float = Field(300.0, ge=0)
    """Seconds for which keys that were in use go on working while the database is down."""

    @field_validator("database")
    @classmethod
    def _check_path(cls, value: str | None) -> str | None:
        if value is not None and "://" not in value and not value.startswith(("/", "~", "env:")):
            raise ValueError("must be a URL, env:NAME, an absolute path or one that begins with ~")
        return value


class LedgerConfig(StrictModel):
    """Where usage goes before it is in the database."""

    flush_s: float = Field(0.5, gt=0, le=60)
    """Seconds between two writes of usage to the database, and of what running requests have used to a file. What they
    used since is lost when a gateway is killed."""
    spill_dir: str | None = None
    """Directory for usage while the database is down, and of requests that run, by default one below
    `~/.local/state/sluicegate`. In a container, name a volume."""


class GatewayConfig(StrictModel):
    """The HTTP API. With neither `api_keys` nor `keys.database`, everybody may use it, but for the admin API and web
    pages."""

    api_keys: tuple[StaticKey, ...] = ()
    """Keys that are let in besides those of `keys.database`."""
    keys: KeysConfig = KeysConfig()
    """Keys in a database."""
    ledger: LedgerConfig = LedgerConfig()
    """The way of usage into that database."""
    tiers: Mapping[str, Tier] = {}
    """Tier name to what its keys may do. Without any, every key may do everything."""
    default_tier: str | None = None
    """The tier of keys that name none. It is needed with `tiers`, unless one of them is called `default`."""
    limits: LimitsConfig = LimitsConfig()
    """Limits of organisations and projects, and where all counts are kept."""
    unknown_fields: Literal["ignore", "reject"] = "ignore"
    """What becomes of fields in request bodies that nobody knows. OpenAI rejects them; most other servers, and SDKs'
    `extra_body`, do not."""
    max_body_bytes: int = Field(8 * 1024 * 1024, ge=1024)
    """The largest request body in bytes, before and after decompression."""
    body_timeout_s: float = Field(60.0, gt=0)
    """Seconds that a client may take to send its body."""
    max_prompts: int = Field(2048, ge=1)
    """The most prompts in one request to /v1/completions."""
    max_choices: int = Field(4096, ge=1)
    """The most choices in one request: prompts times `n`."""
    keepalive_s: float = Field(15.0, gt=0)
    """Seconds of silence after which a stream sends a comment, so that nobody on the way closes it."""
    send_timeout_s: float = Field(60.0, gt=0)
    """Seconds for which a client may take nothing of its stream before it counts as gone."""
    cors_origins: tuple[CorsOrigin, ...] = ()
    """Web pages that may call the API from a browser: `https://host[:port]`, or `*` for all."""
    allowed_hosts: tuple[str, ...] = ()
    """Names, without a port, under which clients reach a server without API keys, besides addresses, names without a
    dot, names in `.local`, `.localhost`, `.internal` and `.svc`, and the machine's own name. Others are refused, so
    that no web page can reach the server under a name of its own (DNS rebinding). With keys, all names are allowed."""
    public_metrics: bool = False
    """Whether GET /metrics needs no key. Else it needs one with the scope `admin`, if there are keys."""

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
    def keyless(self) -> bool:
        """Whether everybody may use the API."""
        return not self.api_keys and not self.keys.database

    @property
    def has_limits(self) -> bool:
        """Whether anything is counted at all."""
        allowances = (*self.tiers.values(), *self.limits.orgs.values(), *self.limits.projects.values())
        return any(a.rpm or a.tpm or a.max_concurrent for a in allowances)
