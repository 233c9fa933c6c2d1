"""A model's `autoscaling`: what is refused, by name, and what Serve is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from autoscaling.spec import PolicySpec
from deployments.cli.main import main
from deployments.config.application import ModelConfig
from deployments.config.autoscaling import ScalingConfig

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "cluster_configs" / "autoscale.yaml"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"policy": "slow"}, "autoscaling.policy: unknown autoscaling policy 'slow'; known: slo, queue_depth"),
        ({"min_replicas": -1}, "autoscaling.min_replicas: must be greater than or equal to 0, got -1"),
        ({"min_replicas": 9}, "autoscaling.min_replicas: must be at most max_replicas 8, got 9"),
        ({"max_replicas": "many"}, "autoscaling.max_replicas: must be an integer, got 'many'"),
        ({"params": {"ttft_slo_s": 0}}, "autoscaling.params: ttft_slo_s: must be above 0, got 0"),
        ({"params": {"ttft": 1}}, "autoscaling.params: unknown setting ttft; known: ttft_slo_s"),
        ({"policy": "ongoing", "params": {"ttft_slo_s": 1}}, "autoscaling.params: unknown setting ttft_slo_s"),
        ({"guardrails": {"panic_s": -1}}, "autoscaling.guardrails: panic_s: must be at least 0, got -1"),
        ({"guardrails": {"panics": 1}}, "autoscaling.guardrails: unknown setting panics"),
        ({"min_replicas": 1, "guardrails": {"min_replicas": 2}}, "guardrails: min_replicas: is given twice"),
        ({"polic": "slo"}, "autoscaling.polic: unknown key; did you mean policy?"),
    ],
)
def test_sluice_check_names_the_field(
    given: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = yaml.safe_load(CONFIG.read_text())
    raw["applications"][0]["args"]["models"][0]["autoscaling"] = given
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(raw))
    assert main(["check", str(file)]) == 1
    assert message in capsys.readouterr().out


def test_a_policy_file_is_the_same_mapping() -> None:
    file = {
        "policy": "slo",
        "params": {"ttft_slo_s": 0.5},
        "guardrails": {"min_replicas": 2, "max_replicas": 5, "panic_s": 9},
    }
    section = ScalingConfig.model_validate(file)
    assert (section.min_replicas, section.max_replicas) == (2, 5)
    assert PolicySpec.from_dict(section.model_dump(), "x") == PolicySpec.from_dict(file, "x")
    flat = {"policy": "slo", "min_replicas": 2, "max_replicas": 5, "params": {"ttft_slo_s": 0.5}}
    section = ScalingConfig.model_validate(flat)
    assert PolicySpec.from_dict(section.model_dump(), "x") == PolicySpec.from_dict(flat, "x")


def test_serve_is_told_the_adapter_and_no_delays_of_its_own() -> None:
    from deployments.ray_serve.scaling_policy import ScalingPolicy

    section = ScalingConfig(min_replicas=2, max_replicas=4, params={"ttft_slo_s": 0.5})
    told = section.for_serve("chat", 1)
    assert (told.min_replicas, told.max_replicas) == (2, 4)
    assert [section.for_serve("chat", n).initial_replicas for n in (1, 2, 3, 9)] == [None, None, 3, 4]
    assert told.upscale_delay_s == told.downscale_delay_s == 0.0
    assert told.metrics_interval_s < told.look_back_period_s
    made = told.policy.get_policy()(**told.policy.policy_kwargs)
    assert type(made).__name__ == ScalingPolicy.__name__ and made._controller is not None


def test_a_composite_is_checked_to_its_members() -> None:
    members = [{"policy": "slo"}, {"policy": "schedule", "params": {"otherwise": -1}}]
    with pytest.raises(ValidationError, match=r"policies\[1\]\.params\.otherwise: must be at least 0, got -1"):
        ScalingConfig(policy="composite", params={"policies": members})


def two_pools(tmp_path: Path, **args: Any) -> Path:
    raw = yaml.safe_load(CONFIG.read_text())
    ours = raw["applications"][0]["args"]
    [model] = ours["models"]
    fixed = {key: value for key, value in model.items() if key != "autoscaling"} | {"name": "fixed", "replicas": 2}
    scaled = model | {"name": "scaled", "autoscaling": {"min_replicas": 1, "max_replicas": 9}}
    resting = model | {"name": "resting", "replicas": 0, "autoscaling": {"min_replicas": 0, "max_replicas": 9}}
    ours["models"] = [fixed, scaled, resting]
    raw["applications"][0]["args"] = ours | args
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(raw))
    return file


ONE_EACH = {name: {"gpus_per_replica": 1} for name in ("fixed", "scaled", "resting")}


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"gpus": 4, "pools": ONE_EACH}, ""),
        ({"gpus": 2, "pools": ONE_EACH}, "gpu_budget.gpus must be at least 3, which the least replicas of all pools"),
        ({"gpus": 3, "pools": ONE_EACH}, "gpu_budget.gpus 3 never has room for 'resting': a replica takes 1"),
        ({"gpus": 4, "pools": {"nobody": {}}}, "gpu_budget.pools names 'nobody', which is none of models: fixed, "),
        ({"gpus": 0}, "gpu_budget.gpus: must be greater than 0, got 0"),
        ({"gpus": 4, "pools": {"fixed": {"rank": 1}}}, "gpu_budget.pools.fixed.rank: unknown key"),
        ({"pools": {}}, "gpu_budget.gpus: is missing"),
    ],
)
def test_a_budget_is_checked_against_the_pools(
    budget: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(two_pools(tmp_path, gpu_budget=budget))]) == (1 if message else 0)
    assert message in capsys.readouterr().out


def test_what_pools_that_do_not_scale_have_is_not_to_be_divided(tmp_path: Path) -> None:
    from deployments.config.serve_file import ServeFile

    pools = {**ONE_EACH, "scaled": {"gpus_per_replica": 2, "priority": 3}}
    file = ServeFile.load(str(two_pools(tmp_path, gpu_budget={"gpus": 8, "pools": pools})))
    fixed, scaled, resting = file.config.models
    assert file.config.budget_terms(scaled) == {"gpus": 6, "gpus_per_replica": 2, "priority": 3}
    assert file.config.budget_terms(resting) == {"gpus": 6, "gpus_per_replica": 1, "priority": 0}
    assert fixed.autoscaling is None and file.pooled_ids == ("fixed", "scaled")  # the other rests at first
    none = ServeFile.load(str(two_pools(tmp_path, gpu_budget={"gpus": 8})))  # on a CPU nobody takes anything
    assert [none.config.budget_terms(model) for model in none.config.models] == [None] * 3


def test_serve_is_told_to_begin_with_nothing() -> None:
    section = ScalingConfig(min_replicas=0, max_replicas=4)
    told = section.for_serve("chat", 0, {"gpus": 4, "gpus_per_replica": 1, "priority": 0})
    assert (told.min_replicas, told.initial_replicas) == (0, None)
    made = told.policy.get_policy()(**told.policy.policy_kwargs)
    assert made.fault is None and made.shares_budget


@pytest.mark.parametrize("scaling", [None, {"min_replicas": 1}])
def test_only_a_pool_that_may_rest_begins_with_nothing(scaling: dict[str, Any] | None) -> None:
    given = {"name": "m", "replicas": 0, "autoscaling": scaling, "engine": {"model": "none"}}
    with pytest.raises(ValidationError, match="replicas must be at least 1, got 0"):
        ModelConfig.model_validate(given)
