"""One rank in this process, run by whoever submits."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from engine.config import EngineConfig
from engine.executor.base import Capacity
from engine.executor.rank import Rank
from engine.kv.transfer import Layers
from engine.types import StepPlan, StepResult


class LocalExecutor:
    """submit() computes in the calling thread and returns a done Future."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._rank = Rank(config)

    @property
    def rank(self) -> Rank:
        """The one rank."""
        return self._rank

    def start(self) -> Capacity:
        """See Executor.start(). Raises ConfigError for tensor_parallel_size above 1: there is one rank here."""
        return self._rank.load()

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Run the plan before returning. What the rank raises is in the future."""
        future: Future[StepResult] = Future()
        try:
            future.set_result(self._rank.run(plan))
        except Exception as e:
            future.set_exception(e)
        return future

    def read_blocks(self, block_ids: Sequence[int]) -> Layers:
        """See BlockAccess.read_blocks()."""
        return self._rank.runner.read_blocks(block_ids)

    def write_blocks(self, block_ids: Sequence[int], layers: Layers) -> None:
        """See BlockAccess.write_blocks()."""
        self._rank.runner.write_blocks(block_ids, layers)

    def check_health(self) -> None:
        """See Executor.check_health(): a rank in this process is lost only with the process."""

    def shutdown(self) -> None:
        """Free weights and cache."""
        self._rank = Rank(self._config)
