"""python -m load_tests.worst_bodies: what the costliest bodies that a client may send cost a gateway.

Each body is made ready, or refused, in a process of its own: unpacked, read, validated, its text tokenized. Shown are
the CPU time and by how much the process's peak of memory grew.
"""

from __future__ import annotations

import argparse
import gzip
import os
import pickle
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from deployments.accounts.tenant import Tenant
from deployments.api.body import MAX_CONTAINERS, MAX_DEPTH, MAX_STRINGS, decode
from deployments.api.errors import from_exception
from deployments.api.requests import Caller, prepare_chat, prepare_completion
from deployments.config.gateway import GatewayConfig
from deployments.config.tiers import UNLIMITED
from deployments.routing.served_model import ServedModel
from engine.models.locate import resolve
from engine.text import load_text
from load_tests.peers.demo import MODEL

_NAME = "demo"
_HI = [{"role": "user", "content": "hi"}]


def bodies(limit: int) -> Mapping[str, tuple[str, bytes, str]]:
    """By name: which endpoint, the body, and its coding."""

    def chat(**fields: Any) -> bytes:
        return orjson.dumps({"model": _NAME, "messages": _HI, "max_tokens": 1, **fields})

    def packed(raw: bytes) -> bytes:
        return gzip.compress(raw, 9)

    many = {
        "as many arrays as allowed": chat(junk=[[]] * (MAX_CONTAINERS - 50)),
        "one array too many": chat(junk=[[]] * (MAX_CONTAINERS + 1)),
        "as many strings as allowed": chat(junk=["a"] * (MAX_STRINGS - 50)),
        "as deep as allowed": chat(junk=_nested(MAX_DEPTH - 2)),
        "numbers up to the size limit": chat(junk=[1] * (limit // 2 - 100)),
        "wrong numbers in logit_bias": chat(logit_bias={str(i): "x" for i in range(300_000)}),
        "as many messages as allowed": chat(messages=[*_HI, {"role": "assistant", "content": "a"}] * 8000 + _HI),
        "a long text": chat(messages=[{"role": "user", "content": "word " * (limit // 6)}]),
        "a long text without blanks": chat(messages=[{"role": "user", "content": "a" * (limit - 1000)}]),
        "a schema of many tools": chat(
            tools=[{"type": "function", "function": {"name": f"f{i}"}} for i in range(8000)]
        ),
        "a string of backslashes": b'{"model": "' + b"\\" * (limit - 100),
    }
    made = {name: ("chat", raw, "identity") for name, raw in many.items()}
    made |= {f"{name}, gzip": ("chat", packed(raw), "gzip") for name, raw in many.items() if len(raw) > 1_000_000}
    prompts = orjson.dumps({"model": _NAME, "prompt": [[5] * 400] * 32, "n": 4, "max_tokens": 1})
    made["prompts of token ids"] = ("completion", prompts, "identity")
    made["gzip that never ends"] = ("chat", packed(bytes(200_000_000)), "gzip")
    return made


def _nested(depth: int) -> Any:
    return [] if depth <= 1 else [_nested(depth - 1)]


def cost(prepare: Callable[[], object]) -> tuple[float, float, str]:
    """CPU seconds, MiB and the outcome, in a child process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        before, began_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        try:
            prepare()
            outcome = "accepted"
        except Exception as error:
            answer = from_exception(error)
            outcome = f"{answer.status}: {str(answer)[:60]}" if answer is not None else f"fault: {error!r}"
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        os.write(writing, pickle.dumps((time.process_time() - began_s, grown / 1024, outcome)))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    result: tuple[float, float, str] = pickle.loads(said)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m load_tests.worst_bodies", description=(__doc__ or "").split("\n")[0])
    p.parse_args(argv)
    config = GatewayConfig()
    model = ServedModel(_NAME, 0, "tests", 8192, load_text(str(resolve(MODEL))))
    tenant = Tenant("key", "org", "default", "default", frozenset({"inference"}), None)

    def ready(kind: str, raw: bytes, coding: str) -> object:
        caller = Caller(config, {_NAME: model}, tenant, "default", UNLIMITED)
        fields = decode(raw, coding, config.max_body_bytes)
        return (prepare_chat if kind == "chat" else prepare_completion)(fields, caller)

    print("| body | bytes sent | CPU ms | MiB | outcome |\n|---|---|---|---|---|")
    for name, (kind, raw, coding) in bodies(config.max_body_bytes).items():
        seconds, mib, outcome = cost(lambda kind=kind, raw=raw, coding=coding: ready(kind, raw, coding))  # type: ignore[misc]
        print(f"| {name} | {len(raw)} | {seconds * 1000:.0f} | {mib:.0f} | {outcome} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
