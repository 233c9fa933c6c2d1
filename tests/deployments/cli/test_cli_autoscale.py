"""`sluice autoscale` end to end: what it prints, what it writes, what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from deployments.cli.main import main

SMALL = ["--hours", "0.1", "--rate", "20"]


def test_simulate_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["autoscale", "simulate", "--trace", "burst", "--json", *SMALL]) == 0
    out = json.loads(capsys.readouterr().out)
    assert [p["policy"] for p in out["policies"]] == ["slo", "ongoing"]
    for p in out["policies"]:
        assert {"slo_attainment", "ttft_p50_s", "ttft_p95_s", "replica_hours", "scale_events", "rejected"} <= set(p)
        assert 0 <= p["slo_attainment"] <= 1 and p["requests"] == out["requests"]


def test_simulate_writes_a_page_that_stands_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    mine = tmp_path / "mine.yaml"
    mine.write_text("policy: queue_depth\nparams: {waiting_per_replica: 4}\nguardrails: {max_replicas: 3}\n")
    out = tmp_path / "r.html"
    command = ["autoscale", "simulate", "--trace", "ramp", "--policy", "slo", "--policy", str(mine), *SMALL]
    assert main([*command, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "SLO met" in printed and "mine" in printed and "seed 0" in printed
    page = out.read_text()
    assert "<svg" in page and "<script" not in page and 'src="' not in page and "mine" in page
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_equal_replica_hours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["autoscale", "simulate", "--trace", "burst", "--equal-replica-hours", "--json", *SMALL]) == 0
    slo, ongoing = json.loads(capsys.readouterr().out)["policies"]
    assert ongoing["policy"].startswith("ongoing @")
    assert ongoing["replica_hours"] == pytest.approx(slo["replica_hours"], rel=0.3)


@pytest.mark.slow
def test_compare_and_tune(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traces = ["--trace", "burst", "--trace", "burst:0.5@2"]
    assert main(["autoscale", "compare", *traces, "--markdown", *SMALL]) == 0
    head, _, whole, varied = capsys.readouterr().out.splitlines()
    assert head.startswith("| trace | SLO met |")
    assert whole.startswith("| burst | ") and varied.startswith("| burst:0.5@2 | ")
    assert main(["autoscale", "compare", "--trace", "burst:0.5@2", "--json", *SMALL]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert {"0.5 times the requests", "played 2 times as fast"} < set(row["notes"])
    pytest.importorskip("optuna")
    best = tmp_path / "best.yaml"
    status = main(
        ["autoscale", "tune", "--trace", "burst", "--trials", "4", "--target", "0", "--out", str(best), *SMALL]
    )
    assert status == 0 and "The cheapest" in capsys.readouterr().out
    assert yaml.safe_load(best.read_text())["policy"] == "slo"
    assert main(["autoscale", "simulate", "--trace", "burst", "--policy", str(best), *SMALL]) == 0


@pytest.mark.parametrize("given", ["burst:0", "burst:x", "burst@0.0", "burst@-1"])
def test_what_is_no_variation_is_a_name(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["autoscale", "compare", "--trace", given, *SMALL]) == 2
    assert f"is called '{given}'" in capsys.readouterr().err


def test_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"batch": b, "context": c, "step_ms": 2 + b + b * c / 1e3} for b in (1, 4) for c in (100, 1000)]
    bench = tmp_path / "b.json"
    bench.write_text(json.dumps({"tables": {"decode": {"rows": rows}}}))
    profile = tmp_path / "p.json"
    assert main(["autoscale", "fit", str(bench), "--base", "cpu-demo", "--out", str(profile)]) == 0
    assert json.loads(profile.read_text())["base_s"] == pytest.approx(0.002, rel=0.01)
    beside = tmp_path / "beside.json"
    beside.write_text(json.dumps({"tables": {"decode": {"rows": [r | {"step_ms": 1.5 * r["step_ms"]} for r in rows]}}}))
    assert main(["autoscale", "fit", str(bench), "--beside", str(beside), "--out", str(profile)]) == 0
    assert "1.50 times as long beside a busy replica" in capsys.readouterr().err
    made = json.loads(profile.read_text())
    assert made["contention"] == pytest.approx(0.5, rel=0.01) and made["replicas_per_host"] == 2
    assert main(["autoscale", "simulate", "--trace", "constant", "--profile", str(profile), *SMALL, "--rate", "1"]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trace", "no-such"], "no file and no generator is called 'no-such'"),
        (["--trace", "burst", "--policy", "sol"], "unknown autoscaling policy 'sol'; known: slo"),
        (["--trace", "burst", "--policy", "a.yaml"], "a.yaml: No such file"),
        (["--trace", "burst", "--policy", "slo", "--policy", "slo"], "each needs a name of its own"),
        (["--trace", "burst", "--scale-rate", "0"], "--scale-rate: must be above 0, got 0"),
        (["--trace", "burst", "--min", "9", "--max", "3"], "min_replicas: must be at most max_replicas 3, got 9"),
        (["--trace", "burst", "--profile", "x"], "profile x: No such file"),
        (["--trace", "burst", "--router", "x"], "--router: must be one of least_loaded"),
        (["--trace", "burst", "--out", "/no/such/dir/r.html"], "there is no directory"),
    ],
)
def test_mistakes(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["autoscale", "simulate", *options, *SMALL]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.sockets
def test_the_command_line_starts_light() -> None:
    code = (
        "import sys; from deployments.cli.main import parser; parser();"
        "print(sorted({'pandas', 'statsmodels', 'optuna', 'matplotlib', 'scipy', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
