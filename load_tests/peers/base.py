"""What an engine must say of itself to be measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine.registry import Registry
from load_tests.errors import LoadError
from load_tests.servers import Launch

Say = Callable[[str], None]


class PeerError(LoadError):
    """This engine cannot be measured here; the others can. One line."""


@dataclass(frozen=True, slots=True)
class Models:
    """The demo model in the forms that engines read. All exist and hold the same weights: `gguf` in 4 bits, the
    others what those bits stand for, rounded to bfloat16."""

    gguf: Path
    bf16: Path  # a Hugging Face directory


class Peer(Protocol):
    """`keep_alive` False: the server drops reused connections, so each request opens its own. `most`: requests at a
    time that it can take, None for any. `round_s`: about how long one round of everything takes on two cores."""

    keep_alive: bool
    most: int | None
    round_s: float

    def __init__(self, home: Path) -> None:
        """`home` is the engine's own directory, which may not exist yet. Engines that share an installation share
        it."""

    def prepare(self, models: Models, say: Say) -> None:
        """Installs or builds, with at most two jobs; returns at once when that has been done. Raises PeerError."""

    def launch(self, models: Models, port: int) -> Launch:
        """With its best settings for all cores of this machine, listening on 127.0.0.1:`port`."""

    def version(self) -> str:
        """Of what prepare() has installed."""


PEERS: Registry[Peer] = Registry(
    "peer",
    {
        "sluicegate": "load_tests.peers.ours:OursBf16",
        "sluicegate-q4": "load_tests.peers.ours:OursQ4",
        "sluicegate-q4-exact": "load_tests.peers.ours:OursQ4Exact",
        "vllm": "load_tests.peers.vllm:Vllm",
        "vllm-2c": "load_tests.peers.vllm:VllmAllCores",
        "llamacpp": "load_tests.peers.llamacpp:LlamaQ4",
        "llamacpp-bf16": "load_tests.peers.llamacpp:LlamaBf16",
        "transformers": "load_tests.peers.hf:Transformers",
    },
)
DEFAULT = ("sluicegate", "sluicegate-q4", "sluicegate-q4-exact", "vllm", "llamacpp", "llamacpp-bf16")
FOLDERS = {"vllm-2c": "vllm", "llamacpp-bf16": "llamacpp"}
"""Engines that use another's directory."""


def is_ours(name: str) -> bool:
    return name.startswith("sluicegate")
