"""The bodies, queries and answers of the admin API, as types."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, with_config
from typing_extensions import TypedDict

from deployments.api.integers import Body
from deployments.config.gateway import ACCOUNT_NAME, Scope

_exact = with_config(ConfigDict(extra="forbid", strict=True))
# Checked where the names are kept, which says what is allowed.
_Name = Annotated[str, WithJsonSchema({"type": "string", "pattern": ACCOUNT_NAME})]
_Tier = Annotated[str, Field(min_length=1, max_length=64)]
_Label = Annotated[str, Field(max_length=128)]
_Scopes = Annotated[list[Scope], Field(min_length=1)]
_Models = Annotated[list[Annotated[str, Field(min_length=1, max_length=200)]], Field(max_length=1000)]
_Time = Annotated[int, Field(ge=0, le=253_402_300_799)]  # until the year 9999
_Tokens = Annotated[int, Field(ge=0, le=2**62)]
_GROUP = "(day|org|project|key|model)"
_MONTH_S = 31 * 86400


class _Body(Body):
    model_config = ConfigDict(extra="forbid")


class KeyBody(_Body):
    """`models` null: all that the tier allows. `expires_at`: seconds since 1970."""

    org: _Name
    project: _Name = "default"
    tier: _Tier = "default"
    name: _Label = ""
    scopes: _Scopes | None = None
    models: _Models | None = None
    expires_at: _Time | None = None


class KeyChanges(_Body):
    """Only what is there is changed. For `models` and `expires_at`, null takes the restriction away."""

    tier: _Tier | None = None
    name: _Label | None = None
    scopes: _Scopes | None = None
    models: _Models | None = None
    expires_at: _Time | None = None
    disabled: bool | None = None


class RotateBody(_Body):
    """`grace_s`: for how long older secrets of the key still work."""

    grace_s: Annotated[float, Field(ge=0, le=_MONTH_S)] = 0.0


class OrgBody(_Body):
    """`org`: the name of the organisation."""

    org: _Name


class ProjectBody(_Body):
    """`monthly_tokens`: prompt and completion tokens per calendar month in UTC, null for no limit."""

    org: _Name
    project: _Name
    monthly_tokens: _Tokens | None = None
    hard_stop: bool = True


class _Query(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


_Limit = Annotated[int, Field(ge=1, le=100)]


class OrgsQuery(_Query):
    """`after`: the last one of the page before."""

    limit: _Limit = 20
    after: str | None = None


class KeysQuery(OrgsQuery):
    """As OrgsQuery. `org`: only keys of this organisation."""

    org: str | None = None


class ProjectsQuery(_Query):
    """`org`: only projects of this organisation."""

    org: str | None = None


class AuditQuery(_Query):
    """Newest first. `after`: the last entry of the page before."""

    limit: _Limit = 20
    after: Annotated[int, Field(ge=0, le=2**62)] | None = None


class UsageQuery(_Query):
    """`group_by`: some of day, org, project, key, model, with commas between. `from` is included, `to` is not: ISO
    dates or times in UTC, or seconds since 1970."""

    group_by: Annotated[str, Field(json_schema_extra={"pattern": f"^({_GROUP}(,{_GROUP})*)?$"})] = "day,model"
    since: str | None = Field(None, alias="from", json_schema_extra={"format": "date-time"})
    until: str | None = Field(None, alias="to", json_schema_extra={"format": "date-time"})
    org: str | None = None


@_exact
class KeyAnswer(TypedDict):
    """`secret` is there only once, when it is made."""

    id: str
    object: Literal["key"]
    prefix: str
    name: str
    org: str
    project: str
    tier: str
    scopes: list[str]
    models: list[str] | None
    status: Literal["active", "disabled", "expired", "revoked"]
    created_at: int
    expires_at: int | None
    revoked_at: int | None
    secret: NotRequired[str]


class DrainBody(_Body):
    """`replica` null: all that the pool has now. `draining` false: back into rotation. After `timeout_s`, streams that
    still run go on elsewhere, or end with an error where nobody else has the model; null: they are never moved."""

    pool: Annotated[str, Field(min_length=1, max_length=200)]
    replica: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    draining: bool = True
    timeout_s: Annotated[float, Field(ge=0, le=86400)] | None = None


@_exact
class ReplicaAnswer(TypedDict):
    """`status`: `active` takes requests, `draining` takes none until it is put back, `drained` too and has none left,
    `leaving` takes none any more, `silent` does not answer. `streams`: requests that it serves or lets wait. `running`
    and `waiting` count sequences, of which a request may have many."""

    id: str
    object: Literal["replica"]
    status: Literal["active", "draining", "drained", "leaving", "silent"]
    streams: int
    running: int
    waiting: int


@_exact
class PoolAnswer(TypedDict):
    """One entry of the configuration's `models`, and its replicas. `status`: `up` when some take requests, `drained`
    when those there are have been taken out of rotation; without any, `asleep` when the next request starts one,
    `starting` when one did, `failing` when those that were started did not come up, else `down`."""

    id: str
    object: Literal["pool"]
    status: Literal["up", "drained", "asleep", "starting", "failing", "down"]
    replicas: list[ReplicaAnswer]


@_exact
class PoolList(TypedDict):
    """A page of pools."""

    object: Literal["list"]
    data: list[PoolAnswer]
    has_more: bool


@_exact
class OrgAnswer(TypedDict):
    """`created_at`: seconds since 1970."""

    id: str
    object: Literal["org"]
    created_at: int


@_exact
class ProjectAnswer(TypedDict):
    """`spent_tokens`: of this month."""

    id: str
    object: Literal["project"]
    org: str
    monthly_tokens: int | None
    hard_stop: bool
    spent_tokens: int
    created_at: int


@_exact
class AuditAnswer(TypedDict):
    """One change. `at`: seconds since 1970. `actor`: the id of the key, or `cli:` and the name of a user."""

    id: int
    object: Literal["audit_entry"]
    at: float
    actor: str
    action: str
    target: str
    request_id: str | None
    detail: dict[str, Any]


@_exact
class UsageRow(TypedDict):
    """The sums of one group; only the names that were asked for in `group_by` are there."""

    day: NotRequired[str]
    org: NotRequired[str]
    project: NotRequired[str]
    key: NotRequired[str]
    model: NotRequired[str]
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    total_tokens: int


@_exact
class KeyList(TypedDict):
    """A page of keys."""

    object: Literal["list"]
    data: list[KeyAnswer]
    has_more: bool


@_exact
class OrgList(TypedDict):
    """A page of organisations."""

    object: Literal["list"]
    data: list[OrgAnswer]
    has_more: bool


@_exact
class ProjectList(TypedDict):
    """A page of projects."""

    object: Literal["list"]
    data: list[ProjectAnswer]
    has_more: bool


@_exact
class AuditList(TypedDict):
    """A page of the audit log."""

    object: Literal["list"]
    data: list[AuditAnswer]
    has_more: bool


@_exact
class UsageList(TypedDict):
    """All sums."""

    object: Literal["list"]
    data: list[UsageRow]
    has_more: bool
