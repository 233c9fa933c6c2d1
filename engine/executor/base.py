"""The seam between scheduling and tensors: where the ranks run."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv.window import KVWindow
from engine.registry import Registry, load
from engine.types import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the loaded model is and can hold. max_model_len: the model's own limit, or the configured one.
    `fingerprint` names the weights' content, so that caches never outlive a change of weights. `num_host_slots`
    blocks fit host memory, copying one there or back takes `copy_s`; `num_disk_slots` more fit the disk. `window`:
    what no layer sees beyond."""

    num_blocks: int
    max_model_len: int
    vocab_size: int
    eos_ids: frozenset[int]
    fingerprint: str
    num_host_slots: int = 0
    copy_s: float = 0.0
    window: KVWindow | None = None
    num_disk_slots: int = 0


class Executor(Protocol):
    """Runs the engine's plans on one rank or several: one plan in, one result out."""

    def __init__(self, config: EngineConfig) -> None: ...
    def start(self) -> Capacity:
        """Load, size the cache, warm up. Blocks. Raises ModelFileError or ConfigError."""

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Run a plan on every rank. The future has rank 0's result, or what a rank raised."""

    def check_health(self) -> None:
        """Raise if any rank is lost: ranks live and die together."""

    def shutdown(self) -> None:
        """End the ranks and free what they hold."""


EXECUTORS: Registry[Executor] = Registry("executor", {"local": "engine.executor.local:LocalExecutor"})


def executor_class(name: str) -> type[Executor]:
    """The executor called `name`: one of EXECUTORS, or `module:Class` for one that is not shipped with the engine.

    Raises ValueError for a name that is not in the table, ConfigError for a class that cannot be imported.
    """
    if ":" not in name:
        return EXECUTORS.get(name)
    try:
        cls: type[Executor] = load(name)
    except Exception as error:  # whatever the module raises while it is imported
        raise ConfigError(f"executor {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    return cls
