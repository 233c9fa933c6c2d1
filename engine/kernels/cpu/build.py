"""Compile the C++ sources once per machine and load them. No torch headers: a plain C ABI through ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "src"
# No contraction: the compiler must not choose where to fuse, or tile shapes would round differently.
FLAGS = ("-std=c++20", "-O3", "-march=native", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-pthread")
TIMEOUT_S = 300


class BuildError(Exception):
    """Why there is no library: no compiler, its error output, or a library that does not load."""


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, built if need be (seconds); None, after one warning, where they cannot be."""
    try:
        return load(FLAGS)
    except (BuildError, OSError) as error:
        logger.warning("the compiled CPU kernels are unavailable, torch runs instead (slower): %s", error)
        return None


def load(flags: tuple[str, ...]) -> ctypes.CDLL:
    """Build with `flags` or take the cached build. Raises BuildError or OSError."""
    compiler = find_compiler()
    path = cache_dir() / _fingerprint(compiler, flags) / "kernels.so"
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _build(compiler, flags, path)
    except OSError as error:
        logger.info("building in a temporary directory: %s", error)
        with tempfile.TemporaryDirectory(prefix="sluicegate-") as private:
            path = Path(private) / "kernels.so"
            _build(compiler, flags, path)
            return ctypes.CDLL(str(path))  # outlives its file
    return ctypes.CDLL(str(path))


def cache_dir() -> Path:
    """$XDG_CACHE_HOME/sluicegate/kernels, by default under ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "sluicegate" / "kernels"


def find_compiler() -> list[str]:
    """$CXX, which may carry arguments, else the first of g++ and clang++ on the path."""
    if chosen := shlex.split(os.environ.get("CXX", "")):
        return chosen
    for name in ("g++", "clang++"):
        if path := shutil.which(name):
            return [path]
    raise BuildError("no C++ compiler (install g++ or clang++, or set CXX)")


def _build(compiler: list[str], flags: tuple[str, ...], path: Path) -> None:
    """Compile next to `path`, then rename: another process sees all of it or nothing."""
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        objects, jobs = [], []
        try:
            for source in sorted(SOURCES.glob("*.cpp")):
                objects.append(str(Path(scratch) / f"{source.stem}.o"))
                jobs.append(_start([*compiler, *flags, "-c", str(source), "-o", objects[-1]]))
            for job in jobs:
                _finish(job)
        finally:
            for job in jobs:
                job.kill()  # nothing to a finished one
                job.communicate()
        shared = Path(scratch) / path.name
        _finish(_start([*compiler, "-shared", "-pthread", *objects, "-o", str(shared)]))
        shared.replace(path)


def _start(command: list[str]) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError as error:
        raise BuildError(f"{command[0]}: {error.strerror}") from error


def _finish(job: subprocess.Popen[str]) -> None:
    try:
        output, _ = job.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise BuildError(f"{job.args!r} took more than {TIMEOUT_S} s") from None
    if job.returncode:
        raise BuildError(f"{job.args!r} failed with {job.returncode}: {output[-2000:].strip()}")


def _fingerprint(compiler: list[str], flags: tuple[str, ...]) -> str:
    job = _start([*compiler, "--version"])
    version = job.communicate(timeout=TIMEOUT_S)[0]
    parts = [shlex.join(compiler), version, *flags, _cpu()]
    parts += [source.name + source.read_text() for source in sorted(SOURCES.iterdir()) if source.is_file()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
