"""Compile C++ sources once per machine and load them. No foreign headers: a plain C ABI through ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

TIMEOUT_S = 300  # for the largest source on a busy core several times over; a compiler that hangs must end


class BuildError(Exception):
    """Why there is no library: no compiler, its error output, or a library that does not load."""


def load(name: str, sources: Sequence[Path], flags: Sequence[str]) -> ctypes.CDLL:
    """Build the .cpp files among `sources` with `flags`, or take the cached build; the others are headers. What a
    build is cached by: compiler, flags, sources and processor. Raises BuildError or OSError."""
    compiler = find_compiler()
    path = cache_dir(name) / _fingerprint(compiler, sources, flags) / f"{name}.so"
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _build(compiler, sources, flags, path)
    except OSError:  # a cache that cannot be written
        with tempfile.TemporaryDirectory(prefix="sluicegate-") as private:
            path = Path(private) / path.name
            _build(compiler, sources, flags, path)
            return ctypes.CDLL(str(path))  # outlives its file
    return ctypes.CDLL(str(path))


def cache_dir(name: str) -> Path:
    """$XDG_CACHE_HOME/sluicegate/`name`, by default under ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "sluicegate" / name


def find_compiler() -> list[str]:
    """$CXX, which may carry arguments, else the first of g++ and clang++ on the path."""
    if chosen := shlex.split(os.environ.get("CXX", "")):
        return chosen
    for name in ("g++", "clang++"):
        if path := shutil.which(name):
            return [path]
    raise BuildError("no C++ compiler (install g++ or clang++, or set CXX)")


def _build(compiler: list[str], sources: Sequence[Path], flags: Sequence[str], path: Path) -> None:
    """Compile next to `path`, then rename: another process sees all of it or nothing."""
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        objects, jobs = [], []
        try:
            for source in (source for source in sources if source.suffix == ".cpp"):
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


def _fingerprint(compiler: list[str], sources: Sequence[Path], flags: Sequence[str]) -> str:
    job = _start([*compiler, "--version"])
    version = job.communicate(timeout=TIMEOUT_S)[0]
    parts = [shlex.join(compiler), version, *flags, _cpu()]
    parts += [source.name + source.read_text() for source in sources]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
