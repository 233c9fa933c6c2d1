"""Where a model's files are."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from engine.errors import ModelFileError

_SCHEME = "pkg://"


def resolve(ref: str) -> Path:
    """The existing file or directory that `ref` names: a path, or `pkg://package/rel/file`.

    The package is found, never imported, so that one whose own imports are not met still serves its files.
    Raises ModelFileError.
    """
    if ref.startswith(_SCHEME):
        path = _in_package(ref)
    elif "://" in ref:
        raise ModelFileError(f"model {ref!r}: only paths and {_SCHEME}package/file are understood")
    else:
        path = Path(ref).expanduser()
    if not ref or not path.exists():
        raise ModelFileError(f"model {ref!r}: no such file or directory" + (f": {path}" if str(path) != ref else ""))
    return path


def _in_package(ref: str) -> Path:
    package, _, rel = ref.removeprefix(_SCHEME).partition("/")
    parts = PurePosixPath(rel).parts
    if not package.isidentifier() or not parts or ".." in parts or rel.startswith("/"):
        raise ModelFileError(f"model {ref!r}: expected {_SCHEME}package/relative/file, with a top-level package")
    spec = find_spec(package)  # a top-level name: nothing is executed
    if spec is None or not spec.submodule_search_locations:
        raise ModelFileError(f"model {ref!r}: Python package {package!r} is not installed")
    places = [Path(root, *parts) for root in spec.submodule_search_locations]
    return next((p for p in places if p.exists()), places[0])
