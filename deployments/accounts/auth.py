"""Who may enter, as which tenant, and for what: the keys of the config file, then those of the database."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from deployments.accounts.errors import KeyRefusedError, MissingScopeError
from deployments.accounts.records import Key
from deployments.accounts.static_keys import StaticKeys
from deployments.accounts.tenant import ANONYMOUS, Tenant

if TYPE_CHECKING:
    from deployments.accounts.key_cache import KeyCache

# The scheme's case does not matter; only spaces may follow it; the key is visible ASCII.
_BEARER = re.compile(rb"(?i:bearer) +([\x21-\x7e]+) *\Z")
_NO_KEY = (
    "You didn't provide an API key. You need to provide your API key in an Authorization header using Bearer auth "
    "(i.e. Authorization: Bearer YOUR_KEY)."
)

M = TypeVar("M")


class Authenticator:
    """`key_cache` None: there is no database. Without one and without static keys, everybody is let in."""

    def __init__(self, static: StaticKeys, key_cache: KeyCache | None, clock: Callable[[], float] = time.time) -> None:
        self._static = static
        self._key_cache = key_cache
        self._clock = clock

    async def admit(self, authorization: list[bytes], scope: str) -> Tenant:
        """The tenant of a request with these Authorization header values, for a purpose that needs `scope`. Raises
        KeyRefusedError, MissingScopeError, and DatabaseDownError while the database is needed and can't be reached."""
        if self._key_cache is None and not self._static:
            return ANONYMOUS
        secret = _bearer(authorization)
        tenant = self._static.find(secret)
        if tenant is None:
            tenant = await self._from_database(secret)
        if scope not in tenant.scopes:
            raise MissingScopeError(scope)
        return tenant

    async def _from_database(self, secret: str) -> Tenant:
        key = None if self._key_cache is None else await self._key_cache.find(secret)
        if key is None:
            raise KeyRefusedError(f"Incorrect API key provided: {_masked(secret)}.")
        if (status := key.status(self._clock())) != "active":
            raise KeyRefusedError(f"The API key {key.id} is {status}.")
        return _tenant(key)


def visible(models: Mapping[str, M], *allowed: frozenset[str] | None) -> Mapping[str, M]:
    """The models in all of the `allowed` sets. None allows everything."""
    sets = [names for names in allowed if names is not None]
    return {name: models[name] for name in models if all(name in names for names in sets)} if sets else models


def authorization_of(scope: Mapping[str, Any]) -> list[bytes]:
    """All Authorization headers of an ASGI request."""
    return [value for name, value in scope["headers"] if name == b"authorization"]


def _bearer(authorization: list[bytes]) -> str:
    if not authorization:
        raise KeyRefusedError(_NO_KEY, missing=True)
    if len(authorization) > 1:
        raise KeyRefusedError("More than one Authorization header was sent.")
    match = _BEARER.match(authorization[0])
    if match is None:
        raise KeyRefusedError("The Authorization header is not of the form 'Bearer YOUR_KEY'.")
    return match[1].decode("ascii")


def _tenant(key: Key) -> Tenant:
    return Tenant(key.id, key.org, key.project, key.tier, key.scopes, key.models)


def _masked(key: str) -> str:
    if len(key) < 12:
        return "***"
    return f"{'sk-' if key.startswith('sk-') else ''}...{key[-4:]}"
