"""The project keeps its own promises: documents, config files and the direction of imports."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from deployments.cli.main import main, parser
from deployments.config.serve_file import BUILDER, ServeFile

ROOT = Path(__file__).parents[1]
CONFIGS = sorted(p for p in (ROOT / "cluster_configs").glob("*.yaml") if p.name != "tls.yaml")  # needs your own files
DOCUMENTS = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
DOCUMENTS += sorted((ROOT / "docs").glob("*.md"))
ENGINE_MAY_IMPORT = {"torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "gguf", "jinja2"}


def imports(path: Path) -> Iterator[str]:
    """Every module a file imports, inside functions too; not what is under TYPE_CHECKING only."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in node.body
        for inner in ast.walk(child)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", files("engine"), ids=relative)
def test_engine_is_a_library_of_its_own(path: Path) -> None:
    allowed = ENGINE_MAY_IMPORT | {"engine"} | set(sys.stdlib_module_names)
    assert {name.split(".")[0] for name in imports(path)} <= allowed


def test_scheduling_and_block_accounting_and_text_know_no_tensors() -> None:
    modules = [
        relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for package in ("engine/scheduler", "engine/kv", "engine/text")
        for path in files(package)
        if relative(path) != "engine/kv/storage.py"
    ]
    modules.append("engine.models.gguf_file")  # what reads the vocabulary imports it late
    code = f"import sys, importlib; [importlib.import_module(m) for m in {modules}]; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_the_nouns_stand_at_the_bottom() -> None:
    allowed = {
        "engine/types.py": set[str](),
        "engine/errors.py": set(),
        "engine/registry.py": set(),
        "engine/config.py": {"engine.errors"},
    }
    for name, modules in allowed.items():
        assert {m for m in imports(ROOT / name) if m.split(".")[0] == "engine"} <= modules, name


def imports_within(package: str) -> dict[str, set[str]]:
    """For each module of `package` the other modules of it that it imports, those for type annotations too."""
    paths = {relative(p).removesuffix(".py").removesuffix("/__init__").replace("/", "."): p for p in files(package)}
    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        found = set[str]()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                inner = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                found |= {name if name in paths else str(node.module) for name in inner.values()}
        graph[name] = (found & paths.keys()) - {name}
    return graph


@pytest.mark.slow
@pytest.mark.parametrize("package", ["engine", "deployments"])
def test_imports_run_one_way(package: str) -> None:
    """Neither the files of a package nor its sub-packages (and loose files) import each other in a circle."""
    by_file = imports_within(package)
    by_room: dict[str, set[str]] = {}
    for name, others in by_file.items():
        room, *rest = (".".join(n.split(".")[:2]) for n in (name, *others))
        by_room.setdefault(room, set()).update(set(rest) - {room})
    for graph in (by_file, by_room):
        TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


# The packages of `deployments` in the order of their imports: each may import only those before it.
LAYERS = (
    *("config", "observe", "ray_serve", "accounts", "limits", "channel", "upstream", "replica", "routing"),
    *("api", "admin", "gateway", "app", "cli"),
)


@pytest.mark.slow
def test_packages_of_deployments_import_in_order() -> None:
    place = {f"deployments.{name}": i for i, name in enumerate(LAYERS)}
    rooms = [
        (name, ".".join(name.split(".")[:2]), ".".join(other.split(".")[:2]))
        for name, others in imports_within("deployments").items()
        for other in others
    ]
    assert not [(name, other) for name, room, other in rooms if place[other] > place[room]]


@pytest.mark.parametrize("path", files("autoscaling"), ids=relative)
def test_autoscaling_knows_only_the_engines_nouns(path: Path) -> None:
    ours = {name for name in imports(path) if name.split(".")[0] in ("engine", "deployments", "load_tests")}
    assert ours <= {"engine.types", "engine.registry", "engine.cpp_build"}  # plain data, tables, and how C++ is built
    if path.name != "serve_adapter.py":
        assert "ray" not in {name.split(".")[0] for name in imports(path)}


@pytest.mark.slow
def test_load_tests_stand_on_top() -> None:
    """They may import everything; nothing may import them. Nor does the engine know what serves and scales it."""
    order = ("engine", "autoscaling", "deployments", "load_tests")
    for place, package in enumerate(order):
        above = set(order[place + 1 :])
        for path in files(package):
            assert not above & {name.split(".")[0] for name in imports(path)}, relative(path)


@pytest.mark.parametrize("path", CONFIGS, ids=relative)
def test_every_config_is_valid(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(path)]) == 0, capsys.readouterr().out
    file = ServeFile.load(str(path))
    assert file.host == "127.0.0.1"
    assert file.raw["applications"][0]["import_path"] == BUILDER


def test_the_console_script_resolves() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"sluice": "deployments.cli.main:main"}
    (installed,) = (e for e in entry_points(group="console_scripts") if e.name == "sluice")
    assert installed.load() is main
    joined = {e.name: e.value for e in entry_points(group="sluice.commands")}
    if not joined:
        pytest.skip("installed before the project declared further commands: pip install -e .")
    assert joined == project["entry-points"]["sluice.commands"]


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = {
        name.lower().replace("_", "-")
        for name in re.findall(r"(?m)^([\w.-]+)==", (ROOT / "constraints.txt").read_text())
    }
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    missing = {re.split(r"[\[>=<;! ]", need)[0].lower().replace("_", "-") for need in wanted} - pins
    assert not missing


def commands(path: Path) -> Iterator[str]:
    """The shell lines of a document's code blocks, continuation lines joined."""
    for block in re.findall(r"```bash\n(.*?)```", path.read_text(), re.DOTALL):
        yield from (line.strip() for line in block.replace("\\\n", " ").splitlines() if line.strip())


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_documented_commands_exist(document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    others = [import_module(name) for name in project["entry-points"]["sluice.commands"].values()]
    for line in commands(document):
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words.pop(0)
        if words[:1] == ["make"]:
            assert {word for word in words[1:] if "=" not in word} <= targets, line
        elif words and words[0].endswith("sluice"):
            parser(others).parse_args(words[1:])


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_documented_paths_exist(document: Path) -> None:
    text = document.read_text()
    named = set(
        re.findall(r"\b((?:engine|deployments|autoscaling|load_tests|cluster_configs|tests)/[\w./-]*\w/?)", text)
    )
    links = {link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link}
    missing = {name for name in named if not (ROOT / name).exists()}
    assert not missing | {link for link in links if not (document.parent / link).exists()}
