"""API keys: who may enter, and as which tenant."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

from deployments.gateway.errors import unauthorized

# The scheme's case does not matter; only spaces may follow it; the key is visible ASCII.
_BEARER = re.compile(rb"(?i:bearer) +([\x21-\x7e]+) *\Z")
SCOPES = frozenset({"models.read", "inference", "batch", "admin"})
_NO_KEY = (
    "You didn't provide an API key. You need to provide your API key in an Authorization header using Bearer auth "
    "(i.e. Authorization: Bearer YOUR_KEY)."
)


@dataclass(frozen=True, slots=True)
class Tenant:
    """On whose behalf a request runs: the key's `id`, which never reveals the key, and what the key belongs to. `models`
    None: all that its tier allows. Smaller `priority` is more important."""

    id: str
    org: str = "default"
    project: str = "default"
    tier: str = "default"
    scopes: frozenset[str] = SCOPES
    models: frozenset[str] | None = None
    priority: int = 0


ANONYMOUS = Tenant("anonymous")


class ApiKeys:
    """The accepted keys, kept as digests only."""

    def __init__(self, keys: Iterable[str]) -> None:
        """`keys`: literal, or `env:NAME`. Raises ValueError for an unset variable or an unusable key."""
        self._tenants: list[tuple[bytes, Tenant]] = []
        for key in map(_resolve, keys):
            digest = hashlib.sha256(key).digest()
            self._tenants.append((digest, Tenant(f"key-{digest.hex()[:12]}")))

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def admit(self, authorization: list[bytes]) -> Tenant:
        """The tenant of a request with these Authorization header values. Raises ApiError 401. Every key is
        compared, in constant time, so that the time taken says nothing of how near a guess was."""
        if not self._tenants:
            return ANONYMOUS
        if not authorization:
            raise unauthorized(_NO_KEY, code=None)
        if len(authorization) > 1:
            raise unauthorized("More than one Authorization header was sent.")
        match = _BEARER.match(authorization[0])
        if match is None:
            raise unauthorized("The Authorization header is not of the form 'Bearer YOUR_KEY'.")
        digest = hashlib.sha256(match[1]).digest()
        found = None
        for known, tenant in self._tenants:
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None:
            raise unauthorized(f"Incorrect API key provided: {_masked(match[1].decode('ascii'))}.")
        return found


def cache_salt(tenant: Tenant, client_salt: str | None) -> str:
    """Separates prefix caches by tenant, whatever salt a client brings: tagged and length-prefixed, so that no
    two (tenant, salt) pairs can collide."""
    state = hashlib.sha256()
    for part in (b"tenant", tenant.id.encode(), b"salt", (client_salt or "").encode()):
        state.update(len(part).to_bytes(8, "big") + part)
    return state.hexdigest()


def _resolve(key: str) -> bytes:
    if key.startswith("env:"):
        name = key.removeprefix("env:")
        key = os.environ.get(name, "").strip()
        if not key:
            raise ValueError(f"the API key's environment variable {name!r} is not set")
    if not re.fullmatch(r"[\x21-\x7e]+", key):
        raise ValueError("an API key must be one or more visible ASCII characters")
    return key.encode()


def _masked(key: str) -> str:
    if len(key) < 12:
        return "***"
    return f"{'sk-' if key.startswith('sk-') else ''}...{key[-4:]}"
