"""On whose behalf a request runs. Needs no database, since replicas use it too."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from deployments.accounts.records import USUAL_SCOPES


@dataclass(frozen=True, slots=True)
class Tenant:
    """On whose behalf a request runs: the key's `id`, which never reveals the key, and what the key belongs to.
    `models` None: all that its tier allows. Smaller `priority` is more important."""

    id: str
    org: str = "default"
    project: str = "default"
    tier: str = "default"
    scopes: frozenset[str] = USUAL_SCOPES
    models: frozenset[str] | None = None
    priority: int = 0


ANONYMOUS = Tenant("anonymous")


def cache_salt(org: str, client_salt: str | None) -> str:
    """Separates the prefix caches of organisations, whatever salt a client brings. Both parts are tagged and have their
    length before them, so that no two pairs of organisation and salt give the same result."""
    state = hashlib.sha256()
    for part in (b"org", org.encode(), b"salt", (client_salt or "").encode()):
        state.update(len(part).to_bytes(8, "big") + part)
    return state.hexdigest()
