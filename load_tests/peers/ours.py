"""Sluicegate itself, through its whole HTTP path."""

from __future__ import annotations

import subprocess
from importlib.metadata import version
from pathlib import Path

from load_tests.peers.base import Models, Say
from load_tests.servers import Launch, sluice_serve

_ROOT = Path(__file__).resolve().parents[2]


class _Ours:
    keep_alive = True
    most: int | None = None
    round_s = 60.0

    def __init__(self, home: Path) -> None:
        pass

    def prepare(self, models: Models, say: Say) -> None:
        pass  # it runs in the environment that runs this

    def version(self) -> str:
        git = subprocess.run(
            ["git", "-C", _ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
        )
        return f"{version('sluicegate')} {git.stdout.strip()}".strip()


class OursBf16(_Ours):
    def launch(self, models: Models, port: int) -> Launch:
        return sluice_serve(models.bf16, port)


class OursQ4(_Ours):
    """The file's own 4-bit weights, kept in 4 bits, with activations of 8 as llama.cpp has them."""

    def launch(self, models: Models, port: int) -> Launch:
        return sluice_serve(models.gguf, port, ["engine.dtype=bfloat16"])


class OursQ4Exact(_Ours):
    """As the file is served without being asked otherwise: every product that of the float32 model."""

    def launch(self, models: Models, port: int) -> Launch:
        return sluice_serve(models.gguf, port)
