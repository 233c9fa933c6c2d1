from __future__ import annotations

import pickle

import pytest
from pydantic import ValidationError

from deployments.config.application import ModelConfig, ServeConfig
from engine.config import EngineConfig


def model(**over: object) -> dict[str, object]:
    return {"name": "m", "engine": {"model": "x.gguf"}, **over}


def test_engine_settings_become_the_engines_own_config() -> None:
    config = ServeConfig.model_validate({"models": [model(engine={"model": "x.gguf", "max_num_seqs": 8})]})
    assert config.models[0].engine == EngineConfig(model="x.gguf", max_num_seqs=8)
    assert type(config.models[0].engine) is EngineConfig


def test_crosses_process_boundaries() -> None:
    config = ServeConfig.model_validate({"models": [model()]})
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    "args",
    [
        {"models": []},
        {},
        {"models": [model(), model()]},
        {"models": [model()], "extra": 1},
        {"models": [model(replica=1)]},
        {"models": [model(replicas=0)]},
        {"models": [model(name="")]},
        {"models": [model(name="a b")]},
        {"models": [model(engine={"model": "x", "max_num_seq": 8})]},
        {"models": [model(engine={"model": "x", "block_size": 0})]},
        {"models": [model(engine={})]},
        {"models": [model()], "gateway": {"api_key": "x"}},
    ],
)
def test_refuses(args: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ServeConfig.model_validate(args)


@pytest.mark.parametrize(
    ("num_gpus", "engine", "expected"),
    [
        (None, {"device": "cpu", "tensor_parallel_size": 2}, 0.0),
        (None, {"device": "cuda", "tensor_parallel_size": 2}, 2.0),
        (0.5, {"device": "cuda"}, 0.5),
        (0.0, {"device": "cuda"}, 0.0),
    ],
)
def test_gpus_follow_the_engine_unless_given(
    num_gpus: float | None, engine: dict[str, object], expected: float
) -> None:
    config = ModelConfig.model_validate(model(num_gpus=num_gpus, engine={"model": "x", **engine}))
    assert config.gpus_per_replica == expected
