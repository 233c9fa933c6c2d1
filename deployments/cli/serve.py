"""`sluice serve`: the whole graph on this machine, in the foreground."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import socket
import ssl
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from email.message import Message
from types import FrameType
from typing import TYPE_CHECKING, Any

from deployments.cli import processes
from deployments.cli.config_file import server_url
from deployments.cli.local_ray import LocalRay, StartError, free_port, remove_stale, set_environment
from deployments.cli.phases import Compiling, Phases
from deployments.cli.supervise import STOP, supervised
from deployments.ray_serve import private

if TYPE_CHECKING:
    from deployments.config.serve_file import ServeFile

_API_KEY = "SLUICE_SERVE_API_KEY"  # the variable that holds --api-key
_DRAIN_S = 30.0  # at most, and no longer than a replica may take
_SAY_EVERY_S = 5.0
_KERNEL_SOURCES = "engine/kernels/cpu/src/"  # in the command line of a compiler that is at work at them
_POLL_S = 0.5  # a look costs Serve's controller and this process some 20 ms of CPU time, which replicas want now
_FIRST_ANSWER_S = 300.0  # a model's first prompt may be slow where its kernels are still being compiled
_ANSWER_S = 120.0


def add(commands: Any) -> None:
    """Declares `sluice serve`."""
    p = commands.add_parser(
        "serve",
        help="serve a model, or a config file, on this machine",
        description="Serves MODEL, or what --config describes, until Ctrl-C.",
    )
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("model", nargs="?", metavar="MODEL", help="model directory, .gguf file or pkg://package/file")
    what.add_argument("--config", metavar="FILE", help="a Serve config file, as for `serve deploy`")
    p.add_argument("--port", type=int, help="HTTP port; 0 takes a free one (default: the file's, or 8000)")
    p.add_argument("--host", help="address to listen on (default: the file's, or 127.0.0.1)")
    p.add_argument("--name", help="id under which clients ask for the model (default: the file's or directory's name)")
    p.add_argument(
        "--api-key", metavar="KEY", help="let in only clients with this key (default: the file's keys, or none)"
    )
    p.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="KEY=VALUE",
        help="change one setting by its dotted name, e.g. engine.max_num_seqs=8; repeatable",
    )
    p.set_defaults(run=run)


class _Stop(BaseException):
    """Raised in the main thread by the first signal."""


def run(args: argparse.Namespace) -> int:
    """Serves until a signal comes. Returns the exit status."""
    try:
        return supervised(lambda: _serve(args))
    finally:
        remove_stale()


def _serve(args: argparse.Namespace) -> int:
    phases = Phases()
    set_environment()
    from deployments.config.serve_file import ConfigFileError
    from deployments.ray_serve import way_in

    if args.api_key and not args.api_key.startswith("env:"):  # Serve must not log it
        os.environ[_API_KEY] = args.api_key
        args.api_key = f"env:{_API_KEY}"
    try:
        file = _load(args)
        key = _first_key(file)
        _need_database(file)
        _need_port(file.host, file.port)
        way = way_in.choose(file.raw.get("http_options", {}), os.environ)
    except ConfigFileError as error:
        more = len(error.problems) - 1
        hint = f" (and {more} more: sluice check {args.config})" if more and args.config else ""
        return _refuse(error.problems[0] + hint, 2)
    except FileNotFoundError as error:
        return _refuse(str(error), 2)
    raw, secrets = file.without_secrets()
    os.environ.update(secrets)  # before Ray's processes start, which take them from here
    needed = sum(m.most_replicas * m.num_cpus for m in file.config.models) + 2
    node = LocalRay(max(os.cpu_count() or 1, math.ceil(needed)), file.host, way)
    drain_s = min(_DRAIN_S, max((m.graceful_shutdown_timeout_s for m in file.config.models), default=_DRAIN_S))
    ready = False
    status = 0
    try:
        signal.signal(STOP, _stop)
        _say(f"starting Ray and Serve; {way}")
        phases.done("settings")
        node.start()
        phases.done("Ray")
        node.deploy(raw)
        phases.done("Serve")
        compiling = _wait_running(node)
        phases.done("gateway and model", compiling.remark())
        _wait_answer(file, key)
        _check_guard(file)
        phases.done("first answer")
        _say(f"started in {phases}")
        _announce(file, key, node)
        ready = True
        while node.alive():
            time.sleep(1.0)
        status = _refuse("Ray has died", 1)
    except _Stop:
        _say(f"stopping; running requests get {drain_s:.0f} s, or Ctrl-C again" if ready else "stopping")
        status = 0 if ready else 130
    except StartError as error:
        status = _refuse(str(error), 1)
    finally:
        signal.signal(STOP, signal.SIG_IGN)
        node.stop(drain_s if ready and status == 0 else None)
    return status


def _load(args: argparse.Namespace) -> ServeFile:
    """The configuration, with a free port in it where it has port 0. Raises ConfigFileError."""
    file = _read(args, args.port)
    return file if file.port else _read(args, free_port())


def _read(args: argparse.Namespace, port: int | None) -> ServeFile:
    from deployments.config.serve_file import ServeFile

    extra = []
    if port is not None:
        extra.append(f"http.port={port}")
    if args.host is not None:
        extra.append(f"http.host={json.dumps(args.host)}")
    if args.config is None:
        return ServeFile.for_model(
            args.model, args.name, [args.api_key] if args.api_key else [], [*extra, *args.overrides]
        )
    if args.name is not None:
        extra.append(f"name={json.dumps(args.name)}")
    if args.api_key is not None:
        extra.append(f"gateway.api_keys={json.dumps([args.api_key])}")
    return ServeFile.load(args.config, [*extra, *args.overrides])


def _first_key(file: ServeFile) -> str | None:
    """A key that will be let in. Raises ConfigFileError for one the gateway would refuse to start with."""
    from deployments.accounts.static_keys import secret_of
    from deployments.config.serve_file import ConfigFileError

    try:
        keys = [(secret_of(key), key) for key in file.config.gateway.api_keys]
    except ValueError as error:
        raise ConfigFileError([f"gateway.api_keys: {error}"]) from None
    return next((secret for secret, key in keys if "inference" in key.scopes and key.models is None), None)


def _keyed(file: ServeFile) -> bool:
    """Whether clients need a key."""
    return bool(file.config.gateway.api_keys or file.config.gateway.keys.database)


def _need_database(file: ServeFile) -> None:
    """Raises ConfigFileError when the key database is not one that can be opened, or not there."""
    from deployments.accounts.database import Database, DatabaseUrlError, NoDatabaseError
    from deployments.accounts.records import DatabaseDownError
    from deployments.config.serve_file import ConfigFileError

    if setting := file.config.gateway.keys.database:
        try:
            database = Database(setting)
            try:
                database.migrate(create=False)
            finally:
                database.close()
        except (DatabaseUrlError, NoDatabaseError) as error:
            raise ConfigFileError([f"gateway.keys.database: {error}"]) from None
        except DatabaseDownError as error:  # it may come back: gateways wait for it
            _say(str(error))


def _need_port(host: str, port: int) -> None:
    """Raises ConfigFileError unless (host, port) can be listened on now."""
    from deployments.config.serve_file import ConfigFileError

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise ConfigFileError([f"cannot listen on {host}:{port}: {why}"]) from None


def _wait_running(node: LocalRay) -> Compiling:
    """Until Serve says that every replica is up. Returns what was seen of compiling. Raises StartError."""
    compiling = Compiling(lambda: processes.find(_KERNEL_SOURCES) is not None)
    began = said = time.monotonic()
    while missing := node.poll():
        busy = compiling.look()
        if (now := time.monotonic()) - said >= _SAY_EVERY_S:
            said = now
            _say(f"loading, {now - began:.0f} s: waiting for {missing}{', which compiles kernels' if busy else ''}")
        if not node.alive():
            raise StartError("Ray has died while starting")
        time.sleep(_POLL_S)
    return compiling


def _wait_answer(file: ServeFile, key: str | None) -> None:
    """Until the server says it is ready and, if a key for that is known, has completed a first prompt of every model
    that is ours. Raises StartError."""
    deadline = time.monotonic() + _FIRST_ANSWER_S
    while True:
        try:
            _http(file, key, "/health/ready")
            for model_id in file.pooled_ids if key or not _keyed(file) else ():
                _http(file, key, "/v1/completions", {"model": model_id, "prompt": "Hello", "max_tokens": 1})
            return
        except urllib.error.HTTPError as error:
            reason = f"{error.url} answers {error.code}: {error.read(500).decode(errors='replace')}"
            if error.code < 500:
                raise StartError(" ".join(reason.split())) from None
        except OSError as error:
            reason = str(error)
        if time.monotonic() > deadline:
            raise StartError(f"no answer after {_FIRST_ANSWER_S:.0f} s: {' '.join(reason.split())}")
        time.sleep(0.1)


def _check_guard(file: ServeFile) -> None:
    """Raises StartError when Serve's HTTP server runs without the guard that it has been told to run."""
    request = urllib.request.Request(urllib.parse.urljoin(_url(file), "/-/healthz"))
    request.add_header("X-Request-Id", private.UNUSABLE_ID)
    try:
        headers = _open(request)
    except urllib.error.HTTPError as error:
        headers = error.headers
    if faults := private.guard_faults(headers.get("X-Request-Id")):
        raise StartError("; ".join(faults))


def _http(file: ServeFile, key: str | None, path: str, body: dict[str, Any] | None = None) -> None:
    request = urllib.request.Request(_url(file) + path, json.dumps(body).encode() if body else None)
    request.add_header("Content-Type", "application/json")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    _open(request)


def _open(request: urllib.request.Request) -> Message:
    """The headers of the answer, when all of it has come. Raises OSError, HTTPError among them."""
    context = ssl.create_default_context()
    context.check_hostname = False  # it is our own server, just started, whatever name its certificate is for
    context.verify_mode = ssl.CERT_NONE
    with urllib.request.urlopen(request, timeout=_ANSWER_S, context=context) as answer:
        answer.read()
        headers: Message = answer.headers
        return headers


def _url(file: ServeFile) -> str:
    app = next(a for a in file.raw["applications"] if a.get("name", "default") == file.app_name)
    return server_url(file.raw, app)


def _announce(file: ServeFile, key: str | None, node: LocalRay) -> None:
    url = _url(file)
    names = file.model_ids
    body = {"model": names[0], "stream": True, "messages": [{"role": "user", "content": "Say hello."}]}
    if key is None and _keyed(file):
        key = "YOUR_KEY"
        _say("no key in the config may use all models; `sluice keys create` makes one")
    auth = f"-H 'Authorization: Bearer {key}' " if key else ""
    _say(f"logs {node.logs}")
    _say(f"all of Ray's metrics, ours among them: http://127.0.0.1:{node.metrics_port}/metrics")
    print(f"ready {url} model={','.join(names)} key={key or 'none'} metrics={url}/metrics", flush=True)
    print(
        f"curl -N {url}/v1/chat/completions {auth}-H 'Content-Type: application/json' -d '{json.dumps(body)}'",
        flush=True,
    )


def _stop(signum: int, frame: FrameType | None) -> None:
    raise _Stop


def _say(text: str) -> None:
    print(text, flush=True)


def _refuse(text: str, status: int) -> int:
    print(f"sluice serve: {text}", file=sys.stderr, flush=True)
    return status
