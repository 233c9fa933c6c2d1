"""Real against predicted, trace by trace."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from autoscaling.traces.trace import Trace
from load_tests.autoscale.real import Measured, measure
from load_tests.autoscale.traffic import make_trace, within, write_trace
from load_tests.errors import LoadError
from load_tests.peers.ours import SLUICE

PROFILE: Mapping[str, Any] = {
    "base_s": 0.02,
    "prefill_token_s": 0.0002,
    "prefill_pair_s": 0.0,
    "decode_seq_s": 0.0015,
    "decode_context_s": 1e-7,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 64,
    "kv_tokens": 160_000,
    "max_num_waiting": 4096,
    "about": "made up: a replica of it takes two requests a second and 30 steps, so that several fit two cores",
}
POLICY: Mapping[str, Any] = {
    "policy": "slo",
    "min_replicas": 1,
    "max_replicas": 5,
    "params": {"ttft_slo_s": 1.0, "startup_s": 8.0},
    "guardrails": {"downscale_window_s": 30.0, "downscale_cooldown_s": 5.0},
}
_MAX_PROMPT, _MAX_OUTPUT = 4000, 400
_CLOSE = 0.2


@dataclass(frozen=True, slots=True)
class Figures:
    """`ttft_*` in seconds at the client. `max_replicas` and `mean_replicas`: those that cost, starting and draining
    ones included."""

    ttft_p50_s: float
    ttft_p95_s: float
    slo_attainment: float
    mean_replicas: float
    max_replicas: int
    scale_events: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """`off`: predicted over real, less 1."""

    trace: str
    notes: tuple[str, ...]
    requests: int
    failed: int
    overhead_s: float
    startup_s: float | None
    server_cpu: float
    real: Figures
    predicted: Figures

    @property
    def off(self) -> dict[str, float]:
        names = ("ttft_p50_s", "ttft_p95_s", "mean_replicas", "max_replicas")
        return {n: getattr(self.predicted, n) / getattr(self.real, n) - 1 for n in names}

    @property
    def close(self) -> bool:
        return all(abs(value) <= _CLOSE for value in self.off.values())

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "off": self.off, "close": self.close}


def validate(
    traces: Sequence[str], seconds: float, rate: float, seed: int, say: Callable[[str], None]
) -> Iterator[Comparison]:
    """Each as soon as it is known: minutes apart. Raises LoadError."""
    made = [within(make_trace(name, seconds, rate, seed), _MAX_PROMPT, _MAX_OUTPUT) for name in traces]
    for trace in made:
        yield _one(trace, say)


def _one(trace: Trace, say: Callable[[str], None]) -> Comparison:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "trace.csv"
        write_trace(trace, file)
        say(f"{trace.name}: {len(trace)} requests in {trace.duration_s:.0f} s, for real")
        measured = measure(trace, PROFILE, POLICY, folder, say)
        if not measured.ttft_s:
            raise LoadError(f"{trace.name}: no request was answered: {measured.failed[:1]}")
        predicted = predict(file, measured, folder)
    slo_s = POLICY["params"]["ttft_slo_s"]
    ttft = np.array(measured.ttft_s)
    real = Figures(
        float(np.quantile(ttft, 0.5)),
        float(np.quantile(ttft, 0.95)),
        float(np.count_nonzero(ttft <= slo_s)) / len(trace),
        float(np.mean(measured.replicas)),
        max(measured.replicas),
        len(measured.decisions),
    )
    return Comparison(
        trace.name,
        trace.notes,
        len(trace),
        len(measured.failed),
        measured.overhead_s,
        measured.startup_s,
        measured.cpu_s / trace.duration_s,
        real,
        _figures(predicted),
    )


def predict(trace: Path, measured: Measured, folder: Path) -> Mapping[str, Any]:
    """What `sluice autoscale simulate` says, told the delays that were measured. Raises LoadError."""
    startup_s = POLICY["params"]["startup_s"] if measured.startup_s is None else measured.startup_s
    profile, policy = folder / "profile.json", folder / "policy.yaml"
    profile.write_text(json.dumps({**PROFILE, "overhead_s": measured.overhead_s, "startup_s": startup_s}))
    policy.write_text(yaml.safe_dump(dict(POLICY)))
    command = [
        *SLUICE, "autoscale", "simulate", "--json", "--trace", str(trace), "--policy", str(policy),
        "--profile", str(profile), "--initial", "1", "--ttft-slo", str(POLICY["params"]["ttft_slo_s"]),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LoadError(f"sluice autoscale simulate: {done.stderr.strip()[-500:]}")
    said = json.loads(done.stdout)
    [summary] = said["policies"]
    return {**summary, "duration_s": said["duration_s"]}


def _figures(said: Mapping[str, Any]) -> Figures:
    return Figures(
        said["ttft_p50_s"],
        said["ttft_p95_s"],
        said["slo_attainment"],
        said["replica_hours"] * 3600 / said["duration_s"],
        said["peak_replicas"],
        said["scale_events"],
    )


def markdown(results: Sequence[Comparison]) -> str:
    heads = ("trace", "requests", "", "TTFT p50", "p95", "SLO met", "mean replicas", "max", "changes")
    rows = [heads, ("---", "---:", "---", *["---:"] * 6)]
    for r in results:
        for who, f in (("real", r.real), ("predicted", r.predicted)):
            first = (r.trace, str(r.requests)) if who == "real" else ("", "")
            rows.append(
                (
                    *first, who, f"{f.ttft_p50_s:.3f} s", f"{f.ttft_p95_s:.3f} s", f"{f.slo_attainment:.1%}",
                    f"{f.mean_replicas:.2f}", str(f.max_replicas), str(f.scale_events),
                )
            )  # fmt: skip
        off = r.off
        cells = (f"{off['ttft_p50_s']:+.0%}", f"{off['ttft_p95_s']:+.0%}", "", f"{off['mean_replicas']:+.0%}")
        rows.append(("", "", "off", *cells, f"{off['max_replicas']:+.0%}", ""))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
