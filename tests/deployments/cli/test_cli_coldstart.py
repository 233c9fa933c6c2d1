"""`sluice autoscale coldstart`: every phase is told, and mistakes are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from deployments.cli.coldstart import PHASES
from deployments.cli.main import main
from load_tests.stand_in import STAND_IN

pytestmark = pytest.mark.sockets

ROOT = Path(__file__).parents[3]


def test_phases_of_a_start_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = yaml.safe_load((ROOT / "cluster_configs" / "autoscale.yaml").read_text())
    engine = given["applications"][0]["args"]["models"][0]["engine"]
    engine |= {"executor": STAND_IN, "executor_options": {"base_s": 0.01, "prefill_token_s": 0.001}}
    file = tmp_path / "paced.yaml"
    file.write_text(yaml.safe_dump(given))
    assert main(["autoscale", "coldstart", "--config", str(file), "--rounds", "1", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert list(said["phases_s"]) == list(PHASES)
    assert said["phases_s"]["weights"] == said["phases_s"]["warm_up"] == 0.0  # there are none
    assert all(said["phases_s"][name] > 0 for name in ("process", "ray", "torch", "tokenizer", "first_token"))
    assert said["total_s"] == pytest.approx(sum(said["phases_s"].values()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either MODEL or --config"),
        (["m.gguf", "--config", "c.yaml"], "give either MODEL or --config"),
        (["--config", "no-such.yaml"], "no-such.yaml: No such file"),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["autoscale", "coldstart", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_replica_starts_without_what_only_gateways_need() -> None:
    unwanted = {"sqlalchemy", "alembic", "redis", "optuna"}
    code = f"import sys, deployments.replica.deployment; print(sorted({unwanted} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
