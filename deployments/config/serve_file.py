"""A Serve config file as a whole: reading, `--set`, and finding everything that is wrong with it.

Serve itself drops keys it does not know and reports bad values only after `serve deploy` has returned; here
both are errors before anything starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from deployments.config.application import ModelConfig, ServeConfig
from deployments.config.check_routing import routing_problems, table_of
from deployments.config.check_tls import tls_problems
from deployments.config.pinned_prompts import faults as pin_faults
from deployments.config.problems import Path as KeyPath
from deployments.config.problems import Problem, dotted, unknown, unknown_keys, without, wrong_values
from deployments.config.sampling_defaults import SamplingDefaults, sampling_defaults
from deployments.config.secrets import is_loopback, moved_to_environment, written_secrets
from deployments.config.yaml_file import YamlFileError, read_yaml
from engine.errors import ModelFileError
from engine.models.locate import resolve

BUILDER = "deployments.app:build"
_HTTP = "http_options"
_SERVES_HOST = "0.0.0.0"  # Serve's own default for files


class ConfigFileError(ValueError):
    """A config that must not be started. `problems`: one line each, never empty."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class ServeFile:
    """A config without known faults. `raw` is what Serve takes; `config` the typed `args:` of the application that
    is ours, the first if there are several; `model_ids` are what clients may ask it for, and `pooled_ids` those of them
    that a pool of ours serves from the start. `sampling_defaults`: by pool."""

    source: str
    raw: Mapping[str, Any]
    config: ServeConfig
    app_name: str
    model_ids: tuple[str, ...]
    pooled_ids: tuple[str, ...]
    sampling_defaults: Mapping[str, SamplingDefaults]

    @property
    def host(self) -> str:
        """The address that the HTTP proxy listens on."""
        return str(self.raw.get(_HTTP, {}).get("host", _SERVES_HOST))

    @property
    def port(self) -> int:
        """The port that the HTTP proxy listens on."""
        return int(self.raw.get(_HTTP, {}).get("port", 8000))

    def without_secrets(self) -> tuple[dict[str, Any], dict[str, str]]:
        """What Serve takes, without the secrets that are written out in it, and the environment variables that must
        hold them instead."""
        return moved_to_environment(self.raw, BUILDER)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is allowed for a server on the loopback address only, a line each."""
        gateway = self.config.gateway.model_dump()
        return tuple(
            f"gateway.{dotted(place)} is written out: it stands in Serve's logs; write env:NAME"
            for place, _ in written_secrets(gateway)
        )

    @classmethod
    def load(cls, path: str, overrides: Sequence[str] = ()) -> ServeFile:
        """Raises ConfigFileError with every problem found."""
        return cls._checked(path, read_config(path), overrides, label=f"{path}: ")

    @classmethod
    def for_model(
        cls, model: str, name: str | None, api_keys: Sequence[str], overrides: Sequence[str] = ()
    ) -> ServeFile:
        """The same graph for one model without a file, on the loopback address."""
        is_path = "://" not in model
        place = str(Path(model).expanduser().resolve()) if is_path else model
        raw = {
            "proxy_location": "HeadOnly",
            _HTTP: {"host": "127.0.0.1", "port": 8000, "keep_alive_timeout_s": 75},
            "logging_config": {"encoding": "JSON", "log_level": "INFO", "enable_access_log": False},
            "applications": [
                {
                    "name": "sluicegate",
                    "route_prefix": "/",
                    "import_path": BUILDER,
                    "args": {
                        "models": [{"name": name or Path(place).name, "engine": {"model": place}}],
                        "gateway": {"api_keys": list(api_keys)},
                    },
                }
            ],
        }
        return cls._checked(model, raw, overrides, label="")

    @classmethod
    def _checked(cls, source: str, raw: dict[str, Any], overrides: Sequence[str], label: str) -> ServeFile:
        places = {override(raw, text): text.partition("=")[0].strip() for text in overrides}
        if found := list(problems(raw)):
            raise ConfigFileError([_line(problem, places, label) for problem in found])
        app = next((app for app in raw["applications"] if app.get("import_path") == BUILDER), None)
        if app is None:
            raise ConfigFileError([f"{label}no application has import_path {BUILDER}"])
        config = ServeConfig.model_validate(app["args"])
        index = raw["applications"].index(app)
        defaults: dict[str, SamplingDefaults] = {}
        if found := [*_pin_problems(index, config), *_sampling_problems(index, config, defaults)]:
            raise ConfigFileError([_line(problem, places, label) for problem in found])
        table = table_of(app, config)
        resting = {model.name for model in config.models if model.replicas == 0}
        pooled = tuple(
            name
            for name, route in table.routes.items()
            if any(not table.targets[share.target].external for share in route.shares)
            and not all(share.target in resting for share in route.shares)
        )
        return cls(source, raw, config, str(app.get("name", "default")), tuple(table.routes), pooled, defaults)


def read_config(path: str) -> dict[str, Any]:
    """The mapping in `path`, not yet checked. Raises ConfigFileError: no such file, not YAML, a key given twice."""
    try:
        value = read_yaml(path)
    except YamlFileError as error:
        raise ConfigFileError([str(error)]) from None
    if not isinstance(value, dict):
        raise ConfigFileError([f"{path}: must be a mapping with the key applications"])
    return value


def problems(raw: dict[str, Any]) -> Iterator[Problem]:
    """Everything wrong with a whole config, each fault once."""
    from ray.serve.schema import ServeDeploySchema  # a second's import, only for those who check

    yield from _schema_problems(raw, ServeDeploySchema)
    apps = raw.get("applications")
    for index, app in enumerate(apps if isinstance(apps, list) else ()):
        if isinstance(app, dict):
            yield from _app_problems(app, ("applications", index))
            yield from _secret_problems(raw, app, ("applications", index, "args", "gateway"))
    yield from _http_problems(raw)


def override(raw: dict[str, Any], text: str) -> KeyPath:
    """Applies one `--set path=value` to `raw`; the value is read as YAML. Returns where in `raw` it went.

    Paths start at the one model (`engine.max_num_seqs`, `replicas`), at the application's args (`gateway.api_keys`,
    `models.0.name`), at `http` for http_options, or at a key of the file itself. Raises ConfigFileError.
    """
    name, equals, value_text = text.partition("=")
    keys = [int(key) if key.isdigit() else key for key in name.strip().split(".")]
    if not equals or not all(key != "" for key in keys):
        raise ConfigFileError([f"--set {text}: must be of the form key.key=value"])
    try:
        value = yaml.safe_load(value_text)
    except yaml.YAMLError:
        raise ConfigFileError([f"--set {name}: {value_text!r} is not a YAML value"]) from None
    path = (*_root(raw, keys, name), *keys[1:])
    node: Any = raw
    for depth, key in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(node, list) and isinstance(key, int) and key < len(node):
            pass
        elif isinstance(node, dict) and isinstance(key, str):
            if node.get(key) is None and not last:
                node[key] = {}
        else:
            raise ConfigFileError([f"--set {name}: {dotted(path[:depth]) or 'the file'} has no member {key}"])
        if last:
            node[key] = value
        else:
            node = node[key]
    return path


def _root(raw: dict[str, Any], keys: list[str | int], name: str) -> KeyPath:
    """Where in `raw` the first key of a `--set` path is meant."""
    from ray.serve.schema import ServeDeploySchema

    first = keys[0]
    apps = raw.get("applications")
    ours = [i for i, app in enumerate(apps or ()) if isinstance(app, dict) and app.get("import_path") == BUILDER]
    if first == "http":
        return (_HTTP,)
    if first in ServeDeploySchema.model_fields:
        return (first,)
    if len(ours) != 1:
        raise ConfigFileError([f"--set {name}: the file has {len(ours)} applications of {BUILDER}, not one"])
    args: KeyPath = ("applications", ours[0], "args")
    if first in ServeConfig.model_fields:
        return (*args, first)
    if first in ModelConfig.model_fields:
        models = (raw["applications"][ours[0]].get("args") or {}).get("models")
        if not isinstance(models, list) or len(models) != 1:
            raise ConfigFileError([f"--set {name}: there is not exactly one model; write models.0.{name}"])
        return (*args, "models", 0, first)
    known = sorted({"http", *ServeConfig.model_fields, *ModelConfig.model_fields, *ServeDeploySchema.model_fields})
    raise ConfigFileError([f"--set {name}: {first}: {unknown(str(first), known)}"])


def _schema_problems(value: dict[str, Any], kind: type[BaseModel], at: KeyPath = ()) -> Iterator[Problem]:
    unknown_here = list(unknown_keys(value, kind))
    for problem in unknown_here:
        yield Problem((*at, *problem.path), problem.message)
    try:
        kind.model_validate(without(value, {problem.path for problem in unknown_here}))
    except ValidationError as error:
        yield from wrong_values(error, at)


def _app_problems(app: dict[str, Any], at: KeyPath) -> Iterator[Problem]:
    import_path = app.get("import_path")
    if import_path != BUILDER:
        module = str(import_path).partition(":")[0]
        if isinstance(import_path, str) and not _found(module):
            yield Problem((*at, "import_path"), f"no module {module!r}; the builder here is {BUILDER}")
        return
    args = app.get("args")
    if not isinstance(args, dict):
        yield Problem((*at, "args"), "is missing; it must name at least one model under models")
        return
    yield from routing_problems(app, at)
    at = (*at, "args")
    yield from _schema_problems(args, ServeConfig, at)
    models = args.get("models")
    for index, model in enumerate(models if isinstance(models, list) else ()):
        engine = model.get("engine") if isinstance(model, dict) else None
        if isinstance(engine, dict):
            yield from _file_problems(engine, (*at, "models", index, "engine"))
    upstreams = args.get("upstreams")
    for index, upstream in enumerate(upstreams if isinstance(upstreams, list) else ()):
        if isinstance(upstream, dict):
            yield from _file_problems(upstream, (*at, "upstreams", index), ("tokenizer",))


def _file_problems(
    settings: dict[str, Any], at: KeyPath, keys: Sequence[str] = ("model", "tokenizer")
) -> Iterator[Problem]:
    for key in keys:
        if not isinstance(ref := settings.get(key), str):
            continue
        try:
            place = resolve(ref)
        except ModelFileError as error:
            yield Problem((*at, key), str(error).removeprefix("model "))
            continue
        if key == "model" and place.is_dir():
            for pattern in ("config.json", "*.safetensors"):
                if not any(place.glob(pattern)):
                    yield Problem((*at, key), f"{ref!r} has no {pattern}; expected a Hugging Face model directory")


def _pin_problems(app: int, config: ServeConfig) -> Iterator[Problem]:
    for index, model in enumerate(config.models):
        for entry, message in pin_faults(model.pinned_prompts, model.engine):
            yield Problem(("applications", app, "args", "models", index, "pinned_prompts", entry), message)


def _sampling_problems(app: int, config: ServeConfig, found: dict[str, SamplingDefaults]) -> Iterator[Problem]:
    """Puts each pool's defaults into `found`, by its name."""
    for index, model in enumerate(config.models):
        try:
            found[model.name] = sampling_defaults(model)
        except ModelFileError as error:
            yield Problem(("applications", app, "args", "models", index, "engine", "model"), str(error))


def _http_problems(raw: dict[str, Any]) -> Iterator[Problem]:
    http, grpc = (value if isinstance(value := raw.get(k), dict) else {} for k in (_HTTP, "grpc_options"))
    if grpc.get("grpc_servicer_functions") and grpc.get("port", 9000) == http.get("port", 8000):
        yield Problem(("grpc_options", "port"), f"{grpc.get('port', 9000)} is also {_HTTP}.port")
    for key, message in tls_problems(http):
        yield Problem((_HTTP, key), message)
    if http.get("ssl_certfile") and os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1":
        yield Problem((_HTTP, "ssl_certfile"), "HAProxy would serve without TLS: unset RAY_SERVE_ENABLE_HA_PROXY")


def _secret_problems(raw: dict[str, Any], app: dict[str, Any], at: KeyPath) -> Iterator[Problem]:
    http = raw.get(_HTTP)
    host = str(http.get("host", _SERVES_HOST) if isinstance(http, dict) else _SERVES_HOST)
    args = app.get("args")
    gateway = args.get("gateway") if isinstance(args, dict) else None
    if app.get("import_path") != BUILDER or not isinstance(gateway, dict) or is_loopback(host):
        return
    for place, _ in written_secrets(gateway):
        yield Problem(
            (*at, *place),
            f"must be env:NAME: Serve logs what is written out, and {host} is not the loopback address",
        )


def _found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _line(problem: Problem, places: Mapping[KeyPath, str], label: str) -> str:
    for place, name in places.items():
        if problem.path[: len(place)] == place:
            rest = dotted(problem.path[len(place) :])
            return f"--set {name}{'.' if rest else ''}{rest}: {problem.message}"
    if not label:  # no file whose structure the user would recognise
        at = ("applications", 0, "args", "models", 0)
        path = problem.path[len(at) :] if problem.path[: len(at)] == at else problem.path
        return str(Problem(path, problem.message))
    return f"{label}{problem}"
