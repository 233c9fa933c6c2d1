"""generation_config.json where a config file is checked."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from deployments.cli.main import main
from deployments.config.application import ModelConfig
from deployments.config.sampling_defaults import OPENAI_DEFAULTS, sampling_defaults
from deployments.config.serve_file import ConfigFileError, ServeFile


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory that passes for a model's."""
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("config.json", "model.safetensors"):
        (directory / name).write_text("{}")
    return directory


def config_file(model: Path, **settings: str) -> Path:
    file = model.parent / "c.yaml"
    args = {"models": [{"name": "m", "engine": {"model": str(model)}, **settings}]}
    app = {"name": "a", "route_prefix": "/", "import_path": "deployments.app:build", "args": args}
    file.write_text(yaml.safe_dump({"applications": [app]}))
    return file


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('{"temperature": -1}', "temperature: must be greater than or equal to 0, got -1"),
        ('{"temperature": "warm"}', "temperature: must be a number, got 'warm'"),
        ('{"temperature": true}', "temperature: must be a number, got True"),
        ('{"temperature": NaN}', "temperature: must be a finite number, got nan"),
        ('{"top_p": 1.5}', "top_p: must be less than or equal to 1, got 1.5"),
        ('{"top_k": 2.5}', "top_k: must be an integer, got 2.5"),
        ('{"min_p": 2}', "min_p: must be less than or equal to 1, got 2"),
        ('{"repetition_penalty": 0}', "repetition_penalty: must be greater than 0, got 0"),
        ("[]", "must hold a JSON object"),
        ("{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
    ],
)
def test_what_is_wrong_is_said_by_file_and_field(model: Path, text: str, wrong: str) -> None:
    (model / "generation_config.json").write_text(text)
    with pytest.raises(ConfigFileError) as refused:
        ServeFile.load(str(config_file(model)))
    (problem,) = refused.value.problems
    assert problem == (
        f"{model.parent}/c.yaml: applications[0].args.models[0].engine.model: {model}/generation_config.json: {wrong}"
    )
    ServeFile.load(str(config_file(model, generation_config="none")))


def test_check_says_what_the_defaults_are(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "top_p": 1}')
    file = config_file(model)
    assert main(["check", str(file)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[1:] == [
        f"{file}: m samples with temperature 0.6, top_k 20 where a request does not say (generation_config)"
    ]


def test_a_file_has_none(tmp_path: Path) -> None:
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF")
    config = ModelConfig.model_validate({"name": "m", "engine": {"model": str(gguf)}})
    assert sampling_defaults(config) == OPENAI_DEFAULTS


def test_another_source_is_unknown(model: Path) -> None:
    with pytest.raises(ConfigFileError, match="generation_config: must be 'auto' or 'none', got 'vllm'"):
        ServeFile.load(str(config_file(model, generation_config="vllm")))
