"""transformers' generate(), one request at a time: the plainest way to run the model."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path

from load_tests.peers.base import Models, Say
from load_tests.servers import Launch


class Transformers:
    keep_alive = True
    most: int | None = 1
    round_s = 30.0

    def __init__(self, home: Path) -> None:
        pass

    def prepare(self, models: Models, say: Say) -> None:
        pass  # the engine depends on it

    def version(self) -> str:
        return version("transformers")

    def launch(self, models: Models, port: int) -> Launch:
        argv = (sys.executable, "-m", "load_tests.peers.hf_server", str(models.bf16), str(port))
        threads = str(len(os.sched_getaffinity(0)))
        return Launch(argv, "demo", {"OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"})
