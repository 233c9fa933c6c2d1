from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from engine import cpp_build
from engine.kernels.cpu import build
from engine.kernels.cpu.packing import pack_codes

ROOT = Path(__file__).parents[3]


def run_python(code: str, cache: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "XDG_CACHE_HOME": str(cache), **env},
        capture_output=True,
        text=True,
        check=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["/bin/false", "/no/such/compiler"])
def test_a_failed_build_falls_back_to_torch_with_one_warning(tmp_path, compiler):
    code = """
import torch
from engine.kernels import cpu, select_kernels
assert not cpu.available()
assert not cpu.available()
print(type(select_kernels(torch.device("cpu"), torch.float32)).__name__)
"""
    done = run_python(code, tmp_path, CXX=compiler)
    assert done.stdout.strip() == "TorchKernels"
    assert done.stderr.count("unavailable") == 1
    assert compiler in done.stderr


@pytest.fixture
def tiny_sources(tmp_path, monkeypatch):
    """One small source instead of the kernels, and an empty cache."""
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / "answer.cpp").write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    try:
        cpp_build.find_compiler()
    except cpp_build.BuildError as error:
        pytest.skip(str(error))
    return sources


def test_builds_once_and_again_after_a_change(tiny_sources):
    assert build.load(build.FLAGS).answer() == 42
    assert build.load(build.FLAGS).answer() == 42
    assert len(list(cpp_build.cache_dir("kernels").rglob("*.so"))) == 1
    (tiny_sources / "answer.cpp").write_text('extern "C" int answer() { return 43; }\n')
    assert build.load(build.FLAGS).answer() == 43
    assert (
        len(list(cpp_build.cache_dir("kernels").rglob("*"))) == 4
    )  # two directories with a library each, no leftovers


def test_an_unwritable_cache_still_builds(tiny_sources, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/self/no-such-place")
    assert build.load(build.FLAGS).answer() == 42


def test_a_compile_error_names_the_cause(tiny_sources):
    (tiny_sources / "answer.cpp").write_text("this is not C++\n")
    with pytest.raises(cpp_build.BuildError, match=r"answer\.cpp"):
        build.load(build.FLAGS)
    assert not list(cpp_build.cache_dir("kernels").rglob("*.so"))


def test_no_compiler(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(cpp_build.BuildError, match="set CXX"):
        cpp_build.find_compiler()


def test_cxx_may_carry_arguments(monkeypatch):
    monkeypatch.setenv("CXX", "ccache g++")
    assert cpp_build.find_compiler() == ["ccache", "g++"]


def test_callers_on_several_threads_share_the_workers(native):
    torch.set_num_threads(3)
    packed = pack_codes(
        torch.randint(0, 16, (512, 576), dtype=torch.uint8), torch.rand(512, 18), torch.rand(512, 18), 4
    )
    x = torch.randn(40, 576)
    want = native.packed_linear(x, packed)
    wrong: list[int] = []

    def call() -> None:
        torch.set_num_threads(3)
        for i in range(50):
            if not torch.equal(native.packed_linear(x, packed), want):
                wrong.append(i)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads cannot be placed here")
def test_workers_keep_off_the_callers_core():
    code = """
import os, sys, torch
from engine.kernels import cpu
from engine.kernels.cpu.ops import NativeKernels
cores = sorted(os.sched_getaffinity(0))[:2]
if not cpu.available() or len(cores) < 2:
    sys.exit(0)
os.sched_setaffinity(0, cores)
torch.set_num_threads(2)
NativeKernels().silu_mul(torch.randn(64, 2048))
assert os.sched_getaffinity(0) == set(cores)
placed = [os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")]
assert {cores[0]} in placed or {cores[1]} in placed, placed
"""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    run_python(code, Path(cache))


@pytest.mark.slow
def test_a_forked_child_still_computes(tmp_path):
    """Worker threads do not survive a fork; the child's caller does the work alone."""
    code = """
import os, sys, torch
from engine.kernels import cpu
from engine.kernels.cpu.ops import NativeKernels
if not cpu.available():
    sys.exit(0)
torch.set_num_threads(3)
k, x = NativeKernels(), torch.randn(64, 2048)
want = k.silu_mul(x)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(k.silu_mul(x), want) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    run_python(code, Path(cache))
