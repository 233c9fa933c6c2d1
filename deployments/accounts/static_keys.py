"""The API keys that stand in the config file. Needs no database, since replicas use it too."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable

from deployments.accounts.tenant import Tenant
from deployments.config.environment import from_environment
from deployments.config.gateway import StaticKey


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
        """The organisations of the keys, each once, in the order of the keys."""
        return tuple(dict.fromkeys(tenant.org for _, tenant in self._tenants))

    def find(self, secret: str) -> Tenant | None:
        """The tenant whose key this is. Every key is compared, in constant time, so that the time it takes says nothing
        about how near a guess was."""
        digest = hashlib.sha256(secret.encode()).digest()
        found = None
        for known, tenant in self._tenants:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found


def secret_of(static: StaticKey) -> str:
    """The key itself. Raises ValueError for an unset variable or an unusable key."""
    key = from_environment(static.key, "the API key's")
    if not re.fullmatch(r"[\x21-\x7e]+", key):
        raise ValueError("an API key must be one or more visible ASCII characters")
    return key
