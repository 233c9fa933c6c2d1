"""How commands reach a running server: its address and a key, given or from its config file."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from deployments.cli.config_file import CommandError, gateway_of, read_application, server_url

if TYPE_CHECKING:
    import httpx

_TIMEOUT_S = 30.0


def add_server(p: argparse.ArgumentParser) -> None:
    """Declares the options that say where the server is, and with which key to ask it."""
    where = p.add_mutually_exclusive_group()
    where.add_argument("--base-url", metavar="URL", help="the server (default: http://127.0.0.1:8000)")
    where.add_argument("--config", metavar="FILE", help="the config file of a server on this machine")
    p.add_argument(
        "--api-key",
        metavar="KEY",
        help="one with the scope admin (default: $SLUICE_API_KEY, or the first in the config file)",
    )


def connect(args: argparse.Namespace) -> httpx.Client:
    """Raises CommandError."""
    import httpx

    url, key = args.base_url or "http://127.0.0.1:8000", args.api_key or os.environ.get("SLUICE_API_KEY")
    if args.config is not None:
        raw, app = read_application(args.config)
        if not app:
            raise CommandError(f"{args.config}: no application of this product")
        url, key = server_url(raw, app), args.api_key or _admin_key(gateway_of(app).get("api_keys")) or key
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        return httpx.Client(base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=_TIMEOUT_S)
    except (httpx.InvalidURL, ValueError) as error:
        raise CommandError(f"--base-url {url}: {error}") from None


def call(client: httpx.Client, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The JSON of a 200. Raises CommandError for any other answer, and httpx.TransportError."""
    import httpx

    try:
        response = client.request(method, path, json=body)
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        raise CommandError(f"{client.base_url}: {error}") from None
    try:
        answer: dict[str, Any] = response.json()
        if response.status_code == 200:
            return answer
        message = answer["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"not the answer of this product: status {response.status_code}"
    raise CommandError(f"{client.base_url}: {message}")


def _admin_key(keys: Any) -> str | None:
    from pydantic import ValidationError

    from deployments.accounts.static_keys import secret_of
    from deployments.config.gateway import StaticKey

    for entry in keys if isinstance(keys, list) else ():
        try:
            key = StaticKey.model_validate(entry)
            if "admin" in key.scopes:
                return secret_of(key)
        except (ValidationError, ValueError) as error:
            raise CommandError(f"gateway.api_keys: {' '.join(str(error).split())}") from None
    return None
