"""What keeps web pages away from a server without API keys.

A page that somebody opens in a browser can send requests to servers that only that browser reaches, such as one on the
loopback address. Where keys are needed that leads nowhere, because no page knows one. Where none are, a request must
not come from a page of another origin, and its Host must be a name that no stranger can point at this machine (DNS
rebinding).
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from ipaddress import ip_address

from deployments.api.errors import ApiError, clip
from deployments.ray_serve.request_head import Headers

_OWN_ZONES = (".localhost", ".local", ".internal", ".svc")  # names that public DNS does not have


def refuse_web_pages(headers: Headers, allowed_hosts: Sequence[str], cors_origins: Sequence[str]) -> None:
    """Raises ApiError 403 for a request that a web page may have made, unless the page's origin is in `cors_origins`.
    `allowed_hosts`: names under which the server is reached besides those that are safe by themselves."""
    host = _one(headers, b"host")
    if host is not None and not _is_safe(_name(host)) and _name(host) not in allowed_hosts:
        message = (
            f"The Host '{clip(host)}' is not one of this server, which needs no API keys. Add the name to "
            "gateway.allowed_hosts, or use API keys."
        )
        raise ApiError(403, message, code="host_not_allowed")
    origin = _one(headers, b"origin")
    if origin is not None and "*" not in cors_origins and origin not in cors_origins and not _same(origin, host):
        message = f"Web pages of '{clip(origin)}' may not use this server. gateway.cors_origins can allow them."
        raise ApiError(403, message, code="origin_not_allowed")


def _one(headers: Headers, name: bytes) -> str | None:
    """The header's value. Several are joined, and then match nothing."""
    values = [value.decode("latin-1").strip() for key, value in headers if key == name]
    return ", ".join(values) if values else None


def _name(host: str) -> str:
    """The host without its port, in lower case."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() and not name.endswith(":") else host).rstrip(".").lower()


def _is_safe(name: str) -> bool:
    """Whether no stranger can make a browser take `name` for this machine: addresses, names without a dot, names in
    zones that public DNS does not have, and the machine's own name."""
    try:
        ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return "." not in name or name.endswith(_OWN_ZONES) or name == socket.gethostname().lower()
    return True


def _same(origin: str, host: str | None) -> bool:
    """Whether the page comes from this server itself."""
    return host is not None and origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}")
