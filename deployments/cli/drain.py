"""`sluice drain`: replicas out of rotation, and back."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deployments.cli.config_file import CommandError
from deployments.cli.keys import print_table
from deployments.cli.remote import add_server, call, connect

if TYPE_CHECKING:
    import httpx

_LOOK_S = 0.5
_SAY_S = 2.0
_PATIENCE = 20  # looks that may fail: the gateway may be restarting

Replica = Mapping[str, Any]


def add(commands: Any) -> None:
    """Declares `sluice drain`."""
    p = commands.add_parser(
        "drain",
        help="take replicas out of rotation, and wait until they are empty",
        description="Takes a model's replicas out of rotation: they get no new requests, and what runs there ends or, "
        "after --timeout, goes on elsewhere. Returns when they are empty. Ctrl-C stops waiting, not the drain. Without "
        "MODEL: shows all replicas.",
    )
    p.add_argument("model", nargs="?", metavar="MODEL", help="a name under `models` in the config")
    p.add_argument("--replica", metavar="ID", help="only this one")
    p.add_argument(
        "--timeout", type=_seconds, metavar="S", help="move streams that still run after so long (default: never)"
    )
    p.add_argument("--undo", action="store_true", help="put them back into rotation")
    add_server(p)
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command. Returns the exit status."""
    import httpx

    try:
        if args.model is None and (args.replica or args.undo or args.timeout is not None):
            raise CommandError("MODEL is missing")
        with connect(args) as client:
            if args.model is None:
                _show(client)
            elif args.undo:
                _show_states(args.model, _ask(client, args, draining=False))
            else:
                _drain(client, args)
    except CommandError as error:
        print(f"sluice drain: {error}", file=sys.stderr)
        return 1
    except httpx.TransportError as error:
        print(f"sluice drain: {args.base_url or args.config or 'the server'}: {error}", file=sys.stderr)
        return 1
    return 0


def _ask(client: httpx.Client, args: argparse.Namespace, draining: bool) -> list[Replica]:
    body = {"pool": args.model, "replica": args.replica, "draining": draining}
    if draining:
        body["timeout_s"] = args.timeout
    replicas: list[Replica] = call(client, "POST", "/admin/v1/drain", body)["replicas"]
    return replicas


def _drain(client: httpx.Client, args: argparse.Namespace) -> None:
    states = _ask(client, args, draining=True)
    if not states:
        print(f"{args.model}: has no replica")
    ours = [args.replica] if args.replica else [state["id"] for state in states]
    try:
        wait_until_empty(args.model, ours, states, lambda: _look(client, args.model))
    except KeyboardInterrupt:
        print(f"\nstill out of rotation; `sluice drain --undo {args.model}` puts it back", file=sys.stderr)
        raise


def wait_until_empty(
    model: str,
    ours: Sequence[str],
    states: Sequence[Replica],
    look: Callable[[], Sequence[Replica]],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """`look` gives the model's replicas anew. Raises CommandError when one of `ours` takes requests again, and
    httpx.TransportError when there has been no answer for long."""
    import httpx

    failed, said, quiet_s = 0, "", 0.0
    while True:
        mine = [state for state in states if state["id"] in ours]
        if back := [state["id"] for state in mine if state["status"] == "active"]:
            raise CommandError(f"{model}/{back[0]} has been put back into rotation meanwhile")
        left = sum(state["streams"] for state in mine)
        line = f"{model}: {left} streams left on {len(mine)} replicas"
        if left and line != said and (not said or quiet_s >= _SAY_S):
            print(line, flush=True)
            said, quiet_s = line, 0.0
        if not left:
            break
        sleep(_LOOK_S)
        quiet_s += _LOOK_S
        try:
            states, failed = look(), 0
        except httpx.TransportError:
            failed += 1
            if failed > _PATIENCE:
                raise
    for name in ours:
        print(f"{model}/{name}: {'drained' if any(s['id'] == name for s in mine) else 'gone'}")
    for state in states:
        if state["id"] not in ours and len(ours) > 1:
            print(f"{model}/{state['id']}: {state['status']}, started meanwhile")


def _look(client: httpx.Client, model: str) -> list[Replica]:
    pools = {pool["id"]: pool["replicas"] for pool in call(client, "GET", "/admin/v1/pools")["data"]}
    replicas: list[Replica] = pools.get(model, [])
    return replicas


def _show(client: httpx.Client) -> None:
    rows: list[Sequence[object]] = [("MODEL", "REPLICA", "STATUS", "STREAMS", "RUNNING", "WAITING")]
    for pool in call(client, "GET", "/admin/v1/pools")["data"]:
        if not pool["replicas"]:
            rows.append((pool["id"], "none", pool["status"], 0, 0, 0))
        for state in pool["replicas"]:
            rows.append((pool["id"], *(state[name] for name in ("id", "status", "streams", "running", "waiting"))))
    print_table(rows, right=3)


def _show_states(model: str, states: Sequence[Replica]) -> None:
    for state in states:
        print(f"{model}/{state['id']}: {state['status']}")


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"must be 0 to 86400, got {text}")
    return value
