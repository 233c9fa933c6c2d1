from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.config.serve_file import ConfigFileError, ServeFile, override, read_config


@pytest.fixture
def raw(tmp_path: Path) -> dict[str, Any]:
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF")
    return {
        "http_options": {"host": "127.0.0.1", "port": 8000},
        "applications": [
            {
                "name": "a",
                "route_prefix": "/",
                "import_path": "deployments.app:build",
                "args": {"models": [{"name": "m", "engine": {"model": str(gguf)}}], "gateway": {"api_keys": ["k"]}},
                "deployments": [{"name": "Gateway", "autoscaling_config": {"min_replicas": 1}}],
            }
        ],
    }


def load(tmp_path: Path, raw: dict[str, Any], *overrides: str) -> ServeFile:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(raw))
    return ServeFile.load(str(path), overrides)


def refused(tmp_path: Path, raw: dict[str, Any], *overrides: str) -> list[str]:
    with pytest.raises(ConfigFileError) as info:
        load(tmp_path, raw, *overrides)
    return [line.removeprefix(f"{tmp_path}/c.yaml: ") for line in info.value.problems]


def test_a_good_file(tmp_path: Path, raw: dict[str, Any]) -> None:
    file = load(tmp_path, raw)
    assert (file.host, file.port, file.app_name) == ("127.0.0.1", 8000, "a")
    assert [key.key for key in file.config.gateway.api_keys] == ["k"]


_ARGS = ("applications", 0, "args")
_MODEL = (*_ARGS, "models", 0)


@pytest.mark.parametrize(
    ("at", "key", "value", "line"),
    [
        ((), "proxy_locatoin", "HeadOnly", "proxy_locatoin: unknown key; did you mean proxy_location?"),
        (("http_options",), "prt", 1, "http_options.prt: unknown key; did you mean port?"),
        (
            ("applications", 0),
            "route_prefx",
            "/",
            "applications[0].route_prefx: unknown key; did you mean route_prefix?",
        ),
        (
            ("applications", 0, "deployments", 0),
            "max_ongoing_request",
            7,
            "applications[0].deployments[0].max_ongoing_request: unknown key; did you mean max_ongoing_requests?",
        ),
        (
            ("applications", 0, "deployments", 0, "autoscaling_config"),
            "min_replica",
            7,
            "applications[0].deployments[0].autoscaling_config.min_replica: unknown key; did you mean min_replicas?",
        ),
        (_ARGS, "model", [], "applications[0].args.model: unknown key; did you mean models?"),
        (
            (*_MODEL, "engine"),
            "max_num_seq",
            8,
            "applications[0].args.models[0].engine.max_num_seq: unknown key; did you mean max_num_seqs?",
        ),
        (
            (*_MODEL, "engine"),
            "max_num_seqs",
            "x",
            "applications[0].args.models[0].engine.max_num_seqs: must be an integer, got 'x'",
        ),
        (
            (*_MODEL, "engine"),
            "block_size",
            0,
            "applications[0].args.models[0].engine.block_size: must be at least 1, got 0",
        ),
        (
            (*_MODEL, "engine"),
            "enable_prefix_caching",
            "maybe",
            "applications[0].args.models[0].engine.enable_prefix_caching: must be true or false, got 'maybe'",
        ),
        (
            (*_MODEL, "engine"),
            "model",
            "/none/x.gguf",
            "applications[0].args.models[0].engine.model: '/none/x.gguf': no such file or directory",
        ),
        (
            _MODEL,
            "replicas",
            0,
            "applications[0].args.models[0].replicas: must be at least 1, got 0; without any needs "
            "autoscaling.min_replicas 0",
        ),
        (
            _ARGS,
            "models",
            [],
            "applications[0].args.models: must name at least one model, or upstreams one with a tokenizer and a "
            "max_model_len",
        ),
        (
            _ARGS,
            "upstreams",
            [{"name": "u", "base_url": "http://u", "tokenizer": "/none", "max_model_len": 100}],
            "applications[0].args.upstreams[0].tokenizer: '/none': no such file or directory",
        ),
        (
            (),
            "grpc_options",
            {"port": 8000, "grpc_servicer_functions": ["a.b"]},
            "grpc_options.port: 8000 is also http_options.port",
        ),
        (("http_options",), "ssl_keyfile", "/none/key", "http_options.ssl_keyfile: no such file: /none/key"),
        (
            ("applications", 0),
            "import_path",
            "deployments.nope:build",
            "applications[0].import_path: no module 'deployments.nope'; the builder here is deployments.app:build",
        ),
    ],
)
def test_one_fault_is_one_line(
    tmp_path: Path, raw: dict[str, Any], at: tuple[str | int, ...], key: str, value: Any, line: str
) -> None:
    node: Any = raw
    for part in at:
        node = node[part]
    node[key] = value
    assert refused(tmp_path, raw) == [line]


def test_upstreams_alone(tmp_path: Path, raw: dict[str, Any]) -> None:
    """A gateway without a pool of its own."""
    args = raw["applications"][0]["args"]
    tokenizer = args.pop("models")[0]["engine"]["model"]
    args["upstreams"] = [{"name": "u", "base_url": "http://u", "tokenizer": tokenizer, "max_model_len": 100}]
    file = load(tmp_path, raw)
    assert (file.model_ids, file.pooled_ids) == (("u",), ())
    user_config = {"routes": {"theirs": {"pools": ["u"]}}}
    raw["applications"][0]["deployments"].append({"name": "ModelRouter", "user_config": user_config})
    assert load(tmp_path, raw).model_ids == ("theirs",)
    del args["upstreams"][0]["max_model_len"]
    [line] = refused(tmp_path, raw)
    assert line.endswith("upstreams[0].tokenizer: must come with max_model_len: give both or neither")


def test_every_fault_is_reported(tmp_path: Path, raw: dict[str, Any]) -> None:
    raw["x"] = 1
    engine = raw["applications"][0]["args"]["models"][0]["engine"]
    engine |= {"a_key": 1, "block_size": 0, "model": "/none"}
    raw["applications"][0]["args"]["gateway"]["nope"] = 1
    assert {line.split(": ")[0] for line in refused(tmp_path, raw)} == {
        "x",
        "applications[0].args.models[0].engine.a_key",
        "applications[0].args.models[0].engine.block_size",
        "applications[0].args.models[0].engine.model",
        "applications[0].args.gateway.nope",
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\nb: [1\n", ":3:1: expected ',' or ']', but got '<stream end>'"),
        ("a: 1\na: 2\n", ":2:1: key a is given twice"),
        ("- 1\n", ": must be a mapping with the key applications"),
        ("", ": must be a mapping with the key applications"),
    ],
)
def test_not_a_config(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigFileError) as info:
        read_config(str(path))
    assert info.value.problems == (f"{path}{expected}",)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigFileError, match="No such file"):
        read_config(str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("engine.max_num_seqs=8", (*_MODEL, "engine", "max_num_seqs"), 8),
        ("engine.enable_prefix_caching=false", (*_MODEL, "engine", "enable_prefix_caching"), False),
        ("engine.max_model_len=null", (*_MODEL, "engine", "max_model_len"), None),
        ("replicas=2", (*_MODEL, "replicas"), 2),
        ("models.0.name=x", (*_MODEL, "name"), "x"),
        ("gateway.api_keys=[a, b]", (*_ARGS, "gateway", "api_keys"), ["a", "b"]),
        ("http.port=9", ("http_options", "port"), 9),
        ("logging_config.log_level=DEBUG", ("logging_config", "log_level"), "DEBUG"),
    ],
)
def test_override(raw: dict[str, Any], text: str, path: tuple[str | int, ...], value: object) -> None:
    before = copy.deepcopy(raw)
    assert override(raw, text) == path
    node: Any = raw
    for key in path:
        node = node[key]
    assert node == value
    assert raw != before


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("engine.max_num_seqs=x", "--set engine.max_num_seqs: must be an integer, got 'x'"),
        ("engine.max_num_seq=8", "--set engine.max_num_seq: unknown key; did you mean max_num_seqs?"),
        ("engine.block_size=0", "--set engine.block_size: must be at least 1, got 0"),
        ("engin.x=1", "--set engin.x: engin: unknown key; did you mean engine?"),
        ("engine.model.x=1", "--set engine.model.x: applications[0].args.models[0].engine.model has no member x"),
        ("models.3.name=x", "--set models.3.name: applications[0].args.models has no member 3"),
        ("engine.seed", "--set engine.seed: must be of the form key.key=value"),
        ("engine.seed=[", "--set engine.seed: '[' is not a YAML value"),
    ],
)
def test_wrong_override(tmp_path: Path, raw: dict[str, Any], text: str, line: str) -> None:
    assert refused(tmp_path, raw, text) == [line]


def test_model_settings_need_one_model(tmp_path: Path, raw: dict[str, Any]) -> None:
    models = raw["applications"][0]["args"]["models"]
    models.append({**models[0], "name": "n"})
    assert refused(tmp_path, raw, "replicas=2") == [
        "--set replicas: there is not exactly one model; write models.0.replicas"
    ]
    assert load(tmp_path, raw, "models.1.replicas=2").config.models[1].replicas == 2


def test_a_model_without_a_file(tmp_path: Path) -> None:
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"GGUF")
    file = ServeFile.for_model(str(gguf), None, ["k"], ["engine.seed=7", "http.port=81"])
    assert (file.host, file.port) == ("127.0.0.1", 81)
    assert file.config.models[0].name == "tiny.gguf"
    assert file.config.models[0].engine.seed == 7
    assert ServeFile.for_model(str(gguf), "n", []).config.models[0].name == "n"


def test_a_directory_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigFileError) as info:
        ServeFile.for_model(str(tmp_path), None, [])
    assert info.value.problems == (
        f"engine.model: {str(tmp_path)!r} has no *.safetensors; expected a Hugging Face model directory",
    )
