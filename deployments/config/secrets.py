"""Secrets that are written out in a config instead of standing in the environment (`env:NAME`).

Serve writes the arguments of every application to its log when it builds it, and shows them in its status: what must
not stand there must not be in the file.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from deployments.config.problems import Path, dotted

_VARIABLE = "SLUICE_SECRET_{}"


def written_secrets(gateway: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    """API keys and URLs with passwords that the mapping under `gateway` holds, each with its place there. What has not
    the right shape is passed over: the check of the file says so."""
    keys = gateway.get("api_keys")
    for i, entry in enumerate(keys if isinstance(keys, list | tuple) else ()):
        key = entry.get("key") if isinstance(entry, Mapping) else entry
        if isinstance(key, str) and not key.startswith("env:"):
            yield ("api_keys", i, "key") if isinstance(entry, Mapping) else ("api_keys", i), key
    for section, name in (("keys", "database"), ("limits", "redis_url")):
        settings = gateway.get(section)
        url = settings.get(name) if isinstance(settings, Mapping) else None
        if isinstance(url, str) and _has_password(url):
            yield (section, name), url


def is_loopback(host: str) -> bool:
    """Whether a server that listens on `host` can be reached from this machine only."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def refuse_written_secrets(gateway: Mapping[str, Any], host: str) -> None:
    """Raises ValueError for secrets in the settings of a gateway whose server listens on more than loopback."""
    if is_loopback(host):
        return
    if places := [dotted(place) for place, _ in written_secrets(gateway)]:
        raise ValueError(
            f"gateway.{places[0]} is written out, and Serve has it in its logs by now: replace the secret, and write "
            f"env:NAME. Only a server on the loopback address ({host} is none) takes secrets from the config"
        )


def moved_to_environment(raw: Mapping[str, Any], builder: str) -> tuple[dict[str, Any], dict[str, str]]:
    """A copy of a whole config without the secrets of its applications with this import path, and the environment
    variables that hold them instead."""
    moved = copy.deepcopy(dict(raw))
    variables: dict[str, str] = {}
    for app in moved.get("applications") or ():
        gateway = (app.get("args") or {}).get("gateway") if app.get("import_path") == builder else None
        for place, secret in list(written_secrets(gateway or {})):
            name = _VARIABLE.format(len(variables))
            variables[name] = secret
            node: Any = gateway
            for key in place[:-1]:
                node = node[key]
            node[place[-1]] = f"env:{name}"
    return moved, variables


def _has_password(url: str) -> bool:
    if url.startswith("env:") or "://" not in url:
        return False
    try:
        parts = urlsplit(url)
        return bool(parts.password) or any(name == "password" for name, _ in parse_qsl(parts.query))
    except ValueError:
        return True  # not to be read: there may be one
