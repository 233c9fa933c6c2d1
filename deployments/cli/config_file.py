"""What commands that need not start anything read of a config file: as it is, for it might name models that are not on
this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class CommandError(Exception):
    """One line for the user."""


def read_application(path: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The file, and the application in it that is ours; empty when there is none. Raises CommandError."""
    from deployments.config.serve_file import BUILDER, ConfigFileError, read_config

    try:
        raw = read_config(path)
    except ConfigFileError as error:
        raise CommandError(error.problems[0]) from None
    apps = raw.get("applications")
    ours = (app for app in (apps if isinstance(apps, list) else ()) if mapping(app).get("import_path") == BUILDER)
    return raw, mapping(next(ours, None))


def gateway_of(app: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the application's `args` say under `gateway`; empty when they say nothing."""
    return mapping(mapping(app.get("args")).get("gateway"))


def server_url(raw: Mapping[str, Any], app: Mapping[str, Any]) -> str:
    """Where a server with this config is reached from its own machine."""
    http = mapping(raw.get("http_options"))
    host = str(http.get("host", "0.0.0.0"))  # Serve's own default for files
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    prefix = (http.get("root_path") or "").rstrip("/") + (app.get("route_prefix") or "/").rstrip("/")
    scheme = "https" if http.get("ssl_certfile") else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{http.get('port', 8000)}{prefix}"


def mapping(value: Any) -> Mapping[str, Any]:
    """The value if it is a mapping, else an empty one: files are read before they are checked."""
    return value if isinstance(value, dict) else {}
