"""The admin API, /admin/v1: organisations, projects with their budgets, keys, the audit log, and usage.

It takes a key with the scope `admin`, which is over the whole installation, not over an organisation. Answers have the
shapes of OpenAI's lists and errors. Whatever is changed stands in the audit log, with the caller's key and request id.
"""

from __future__ import annotations

import time
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from deployments.accounts.accounts import Accounts
from deployments.accounts.ledger_store import GROUPS
from deployments.accounts.periods import moment
from deployments.accounts.records import USUAL_SCOPES, NewKey
from deployments.admin.http import Handler, answer, change, enter, in_thread, page, routes_of
from deployments.admin.types import (
    AuditList,
    AuditQuery,
    KeyAnswer,
    KeyBody,
    KeyChanges,
    KeyList,
    KeysQuery,
    OrgAnswer,
    OrgBody,
    OrgList,
    OrgsQuery,
    ProjectAnswer,
    ProjectBody,
    ProjectList,
    ProjectsQuery,
    RotateBody,
    UsageList,
    UsageQuery,
)
from deployments.api.errors import clip, invalid
from deployments.api.openapi import Operation
from deployments.api.services import Services
from deployments.api.validation_errors import from_pydantic, unsupported_choice
from deployments.config.tiers import resolve

_KEYS, _KEY = "/admin/v1/keys", "/admin/v1/keys/{key_id}"
_ORGS, _PROJECTS = "/admin/v1/orgs", "/admin/v1/projects"
_ONE = (404,)
_CHANGE = (*_ONE, 409)  # what is revoked stays so
ADMIN_OPERATIONS = (
    Operation("GET", _KEYS, "Keys, oldest first.", {200: KeyList}, "admin", query=KeysQuery, errors=_ONE),
    Operation("POST", _KEYS, "A new key, and its secret.", {200: KeyAnswer}, "admin", body=KeyBody),
    Operation("GET", _KEY, "One key.", {200: KeyAnswer}, "admin", errors=_ONE),
    Operation("POST", _KEY, "Changes a key.", {200: KeyAnswer}, "admin", body=KeyChanges, errors=_CHANGE),
    Operation("DELETE", _KEY, "Revokes a key for good.", {200: KeyAnswer}, "admin", errors=_ONE),
    Operation("POST", f"{_KEY}/rotate", "A new secret.", {200: KeyAnswer}, "admin", body=RotateBody, errors=_CHANGE),
    Operation("GET", _ORGS, "Organisations by name.", {200: OrgList}, "admin", query=OrgsQuery),
    Operation("POST", _ORGS, "Makes sure that there is one.", {200: OrgAnswer}, "admin", body=OrgBody),
    Operation("GET", _PROJECTS, "Projects, and their month so far.", {200: ProjectList}, "admin", query=ProjectsQuery),
    Operation("POST", _PROJECTS, "Creates one or sets its budget.", {200: ProjectAnswer}, "admin", body=ProjectBody),
    Operation("GET", "/admin/v1/audit", "Changes, newest first.", {200: AuditList}, "admin", query=AuditQuery),
    Operation("GET", "/admin/v1/usage", "Sums of usage.", {200: UsageList}, "admin", query=UsageQuery),
)

B = TypeVar("B", bound=BaseModel)


def admin_routes(services: Services, accounts: Accounts) -> list[BaseRoute]:
    """The routes that need a key database."""
    admin = _Admin(services, accounts)
    handlers: dict[str, dict[str, Handler]] = {
        _KEYS: {"GET": admin.keys, "POST": admin.create_key},
        _KEY: {"GET": admin.key, "POST": admin.update_key, "DELETE": admin.revoke_key},
        f"{_KEY}/rotate": {"POST": admin.rotate_key},
        _ORGS: {"GET": admin.orgs, "POST": admin.create_org},
        _PROJECTS: {"GET": admin.projects, "POST": admin.set_project},
        "/admin/v1/audit": {"GET": admin.audit},
        "/admin/v1/usage": {"GET": admin.usage},
    }
    return routes_of(handlers)


class _Admin:
    """Each method is one operation. The stores run in threads."""

    def __init__(self, services: Services, accounts: Accounts) -> None:
        self._services = services
        self._accounts = accounts

    async def keys(self, request: Request) -> Response:
        await enter(self._services, request)
        query = _query(KeysQuery, request)
        found = await in_thread(self._accounts, self._accounts.keys.list, query.org, query.after, query.limit + 1)
        return page([key.public(time.time()) for key in found], query.limit)

    async def create_key(self, request: Request) -> Response:
        by, body = await change(self._services, request, KeyBody)
        self._check_tier(body.tier)
        scopes = USUAL_SCOPES if body.scopes is None else frozenset[str](body.scopes)
        models = None if body.models is None else frozenset(body.models)
        new = NewKey(body.org, body.project, body.tier, body.name, scopes, models, body.expires_at)
        key, secret = await in_thread(self._accounts, self._accounts.keys.create, new, by)
        return answer(key.public(time.time()) | {"secret": secret})

    async def key(self, request: Request) -> Response:
        await enter(self._services, request)
        key = await in_thread(self._accounts, self._accounts.keys.get, request.path_params["key_id"])
        return answer(key.public(time.time()))

    async def update_key(self, request: Request) -> Response:
        by, body = await change(self._services, request, KeyChanges)
        if body.tier is not None:
            self._check_tier(body.tier)
        changes: dict[str, Any] = {name: getattr(body, name) for name in body.model_fields_set}
        changes = {k: v for k, v in changes.items() if v is not None or k in ("models", "expires_at")}
        changes = {k: frozenset(v) if isinstance(v, list) else v for k, v in changes.items()}
        key = await in_thread(self._accounts, self._accounts.keys.update, request.path_params["key_id"], changes, by)
        return answer(key.public(time.time()))

    async def revoke_key(self, request: Request) -> Response:
        by = await enter(self._services, request)
        key = await in_thread(self._accounts, self._accounts.keys.revoke, request.path_params["key_id"], by)
        return answer(key.public(time.time()))

    async def rotate_key(self, request: Request) -> Response:
        by, body = await change(self._services, request, RotateBody)
        key, secret = await in_thread(
            self._accounts, self._accounts.keys.rotate, request.path_params["key_id"], body.grace_s, by
        )
        return answer(key.public(time.time()) | {"secret": secret})

    async def orgs(self, request: Request) -> Response:
        await enter(self._services, request)
        query = _query(OrgsQuery, request)
        found = await in_thread(self._accounts, self._accounts.directory.orgs, query.after, query.limit + 1)
        return page([org.public() for org in found], query.limit)

    async def create_org(self, request: Request) -> Response:
        by, body = await change(self._services, request, OrgBody)
        return answer((await in_thread(self._accounts, self._accounts.directory.create_org, body.org, by)).public())

    async def projects(self, request: Request) -> Response:
        await enter(self._services, request)
        query = _query(ProjectsQuery, request)
        found = await in_thread(self._accounts, self._accounts.directory.projects, query.org)
        return page([project.public() for project in found])

    async def set_project(self, request: Request) -> Response:
        by, body = await change(self._services, request, ProjectBody)
        set_project = self._accounts.directory.set_project
        project = await in_thread(
            self._accounts, set_project, body.org, body.project, body.monthly_tokens, body.hard_stop, by
        )
        return answer(project.public())

    async def audit(self, request: Request) -> Response:
        await enter(self._services, request)
        query = _query(AuditQuery, request)
        found = await in_thread(self._accounts, self._accounts.directory.audit, query.after, query.limit + 1)
        return page([entry.public() for entry in found], query.limit)

    async def usage(self, request: Request) -> Response:
        await enter(self._services, request)
        query = _query(UsageQuery, request)
        groups = [name.strip() for name in query.group_by.split(",") if name.strip()]
        if unknown := [name for name in groups if name not in GROUPS]:
            names = ", ".join(f"'{name}'" for name in GROUPS)
            message = f"Invalid value: '{clip(unknown[0])}'. Supported values are: {names}."
            raise invalid(message, "group_by", "invalid_value")
        since, until = _time("from", query.since), _time("to", query.until)
        rows = await in_thread(
            self._accounts, self._accounts.usage.usage, tuple(dict.fromkeys(groups)), since, until, query.org
        )
        return page(rows)

    def _check_tier(self, tier: str) -> None:
        config = self._services.config
        if resolve(config.tiers, config.default_tier, tier) is None:
            raise unsupported_choice("tier", tier, list(config.tiers))


def _query(kind: type[B], request: Request) -> B:
    fields = dict(request.query_params)
    known = [field.alias or name for name, field in kind.model_fields.items()]
    if unknown := [name for name in fields if name not in known]:
        name = clip(unknown[0])
        raise invalid(f"Unknown parameter: '{name}'.", name, "unknown_parameter")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise from_pydantic(error) from None


def _time(param: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return float(text) if text.isascii() and text.isdigit() and len(text) < 12 else moment(text)
    except ValueError as error:
        raise invalid(f"Invalid '{param}': {clip(str(error), 200)}.", param, "invalid_value") from None
