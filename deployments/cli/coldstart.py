"""`sluice autoscale coldstart`: where the time goes until a new replica gives its first token.

Each round is a process of its own, as a replica is; run() below is what happens in it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

PHASES = {
    "process": "the interpreter starts; Ray mostly has one ready",
    "ray": "import ray.serve",
    "torch": "import torch",
    "imports": "import the rest of what a replica is",
    "tokenizer": "tokenizer and chat template",
    "kernels": "the compiled ones loaded; built at a machine's first start",
    "weights": "read, packed and mapped",
    "warm_up": "buffers sized, graphs recorded, a first decode",
    "cache": "the K/V cache, and all else in loading",
    "first_token": "a prompt of 64 tokens, through the engine",
}
_PROMPT_TOKENS = 64
_TIMEOUT_S = 600.0


def add(verbs: Any) -> None:
    """Declares `sluice autoscale coldstart`."""
    p = verbs.add_parser("coldstart", help="time until a new replica's first token, by phase")
    p.add_argument("model", nargs="?", metavar="MODEL", help="model directory, .gguf file or pkg://package/file")
    p.add_argument("--config", metavar="FILE", help="take the first model of a Serve config file instead")
    p.add_argument("--rounds", type=int, default=3, help="the median counts (default: %(default)s)")
    p.add_argument("--json", action="store_true", help="print JSON instead of a table")
    p.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    try:
        engine = _engine_settings(args)
        rounds = [_round(engine) for _ in range(max(1, args.rounds))]
    except (ValueError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        print(f"sluice autoscale coldstart: {error}", file=sys.stderr)
        return 2
    phases = {name: statistics.median(r[name] for r in rounds) for name in PHASES}
    total = statistics.median(sum(r.values()) for r in rounds)
    if args.json:
        print(
            json.dumps(
                {"phases_s": phases, "total_s": total, "rounds": len(rounds), "model": engine["model"]}, indent=2
            )
        )
        return 0
    width = max(map(len, PHASES))
    for name, seconds in phases.items():
        print(f"{name.ljust(width)}  {seconds:7.3f} s  {seconds / total:4.0%}  {PHASES[name]}")
    print(f"{'total'.ljust(width)}  {total:7.3f} s        median of {len(rounds)}")
    return 0


def _engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Raises ValueError."""
    if (args.model is None) == (args.config is None):
        raise ValueError("give either MODEL or --config")
    if args.model is not None:
        return {"model": args.model}
    from deployments.config.serve_file import ServeFile

    file = ServeFile.load(args.config)
    if not file.config.models:
        raise ValueError(f"{args.config}: names no model of its own")
    engine = file.config.models[0].model_dump(mode="json")["engine"]
    assert isinstance(engine, dict)
    return engine


def _round(engine: Mapping[str, Any]) -> dict[str, float]:
    """One start. Raises RuntimeError with what the process said."""
    from deployments.ray_serve.flags import replica_env, serve_env

    code = "from deployments.cli.coldstart import replica; replica()"
    began = time.time()
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(engine),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        env=os.environ | serve_env() | replica_env(),
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["the process ended"]
        raise RuntimeError(lines[-1])
    said: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {"process": said.pop("began") - began, **said}


def replica() -> None:
    """In the new process: engine settings on stdin, seconds by phase on stdout."""
    clock = _Clock()
    with clock("ray"):
        import ray.serve  # noqa: F401
    with clock("torch"):
        import torch  # noqa: F401
    with clock("imports"):
        import deployments.replica.deployment  # noqa: F401
        from engine.config import EngineConfig
        from engine.engine import Engine
        from engine.executor import rank
        from engine.kernels import cpu
        from engine.models.locate import resolve
        from engine.text import load_text
        from engine.types import GenerateRequest, SamplingParams
    config = EngineConfig(**json.loads(sys.stdin.read()))
    with clock("tokenizer"):
        text = load_text(str(resolve(config.model)), config.tokenizer)
    for module, name, phase in (
        (cpu, "available", "kernels"),
        (rank, "load_model", "weights"),
        (rank, "_warm_up", "warm_up"),
        (rank, "_first_steps", "warm_up"),
    ):
        setattr(module, name, clock.timed(phase, getattr(module, name)))
    with clock("cache"):
        engine = Engine(config, text=text)
    clock.spent["cache"] -= sum(clock.spent[phase] for phase in ("kernels", "weights", "warm_up"))
    with clock("first_token"):
        engine.add(GenerateRequest("first", (1,) * _PROMPT_TOKENS, SamplingParams(max_tokens=1, ignore_eos=True)))
        while engine.has_work:
            engine.step()
    print(json.dumps({"began": clock.began, **clock.spent}))


class _Clock:
    """Adds up seconds by phase."""

    def __init__(self) -> None:
        self.began = time.time()
        self.spent = {name: 0.0 for name in PHASES if name != "process"}
        self._phase = ""
        self._since = 0.0

    def __call__(self, phase: str) -> _Clock:
        self._phase = phase
        return self

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.spent[self._phase] += time.perf_counter() - self._since

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time counts for a phase."""
        return partial(self._run, phase, function)

    def _run(self, phase: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            self.spent[phase] += time.perf_counter() - began
