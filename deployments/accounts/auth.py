"""Who may enter, as which tenant, and for what: the keys of the config file, then those of the database."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from deployments.accounts.errors import KeyRefusedError, MissingScopeError
from deployments.accounts.key_cache import KeyRing
from deployments.accounts.records import SCOPES, Key
from deployments.config.gateway import StaticKey

# The scheme's case does not matter; only spaces may follow it; the key is visible ASCII.
_BEARER = re.compile(rb"(?i:bearer) +([\x21-\x7e]+) *\Z")
_NO_KEY = (
    "You didn't provide an API key. You need to provide your API key in an Authorization header using Bearer auth "
    "(i.e. Authorization: Bearer YOUR_KEY)."
)

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Tenant:
    """On whose behalf a request runs: the key's `id`, which never reveals the key, and what the key belongs to.
    `models` None: all that its tier allows. Smaller `priority` is more important."""

    id: str
    org: str = "default"
    project: str = "default"
    tier: str = "default"
    scopes: frozenset[str] = frozenset(SCOPES)
    models: frozenset[str] | None = None
    priority: int = 0


ANONYMOUS = Tenant("anonymous")


class StaticKeys:
    """The config's keys, kept as digests only."""

    def __init__(self, keys: Iterable[StaticKey]) -> None:
        """Raises ValueError for an unset variable or an unusable key."""
        self._tenants: list[tuple[bytes, Tenant]] = []
        for static in keys:
            digest = hashlib.sha256(secret_of(static).encode()).digest()
            key_id = f"key-{digest.hex()[:12]}"
            models = None if static.models is None else frozenset(static.models)
            org = static.org or key_id  # nobody said that it may share anything with another key
            tenant = Tenant(key_id, org, static.project, static.tier, frozenset(static.scopes), models)
            self._tenants.append((digest, tenant))

    def __bool__(self) -> bool:
        return bool(self._tenants)

    @property
    def orgs(self) -> tuple[str, ...]:
        """Each once."""
        return tuple(dict.fromkeys(tenant.org for _, tenant in self._tenants))

    def find(self, secret: str) -> Tenant | None:
        """Every key is compared, in constant time, so that the time taken says nothing of how near a guess was."""
        digest = hashlib.sha256(secret.encode()).digest()
        found = None
        for known, tenant in self._tenants:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found


class Authenticator:
    """`ring` None: there is no database. Without one and without static keys, everybody is let in."""

    def __init__(self, static: StaticKeys, ring: KeyRing | None, clock: Callable[[], float] = time.time) -> None:
        self._static = static
        self._ring = ring
        self._clock = clock

    async def admit(self, authorization: list[bytes], scope: str) -> Tenant:
        """The tenant of a request with these Authorization header values, for a purpose that needs `scope`. Raises
        KeyRefusedError, MissingScopeError, and DatabaseDownError while the database is needed and can't be reached."""
        if self._ring is None and not self._static:
            return ANONYMOUS
        secret = _bearer(authorization)
        tenant = self._static.find(secret)
        if tenant is None:
            tenant = await self._from_ring(secret)
        if scope not in tenant.scopes:
            raise MissingScopeError(scope)
        return tenant

    async def _from_ring(self, secret: str) -> Tenant:
        key = None if self._ring is None else await self._ring.find(secret)
        if key is None:
            raise KeyRefusedError(f"Incorrect API key provided: {_masked(secret)}.")
        if (status := key.status(self._clock())) != "active":
            raise KeyRefusedError(f"The API key {key.id} is {status}.")
        return _tenant(key)


def visible(models: Mapping[str, M], *allowed: frozenset[str] | None) -> Mapping[str, M]:
    """The models in all of the `allowed` sets. None allows everything."""
    sets = [names for names in allowed if names is not None]
    return {name: models[name] for name in models if all(name in names for names in sets)} if sets else models


def cache_salt(tenant: Tenant, client_salt: str | None) -> str:
    """Separates prefix caches by organisation, whatever salt a client brings: tagged and length-prefixed, so that no
    two (organisation, salt) pairs can collide."""
    state = hashlib.sha256()
    for part in (b"org", tenant.org.encode(), b"salt", (client_salt or "").encode()):
        state.update(len(part).to_bytes(8, "big") + part)
    return state.hexdigest()


def secret_of(static: StaticKey) -> str:
    """The key itself. Raises ValueError for an unset variable or an unusable key."""
    key = static.key
    if key.startswith("env:"):
        name = key.removeprefix("env:")
        key = os.environ.get(name, "").strip()
        if not key:
            raise ValueError(f"the API key's environment variable {name!r} is not set")
    if not re.fullmatch(r"[\x21-\x7e]+", key):
        raise ValueError("an API key must be one or more visible ASCII characters")
    return key


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
