"""Which of torch's own ops a model calls.

This is the one place in the engine that uses names of torch which begin with an underscore: dispatch modes have no
public name. A release of torch that moves them fails at import, and tests/engine/runner/test_graphs.py fails if they
see an op no more.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode


class OtherOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within its block, collects the names of the torch ops that do more than give another view of a tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; but to leave this class out, torch would import its compiler, for seconds."""
        return False

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # By where the results lie, for ops such as reshape copy only if they must.
        if func._schema.is_mutable or not _storages(result) <= _storages(args):
            self.names.add(str(func))
        return result


def _storages(values: Any) -> set[int]:
    """Where the tensors among `values` (one, or a sequence) begin; 0 stands for anything else."""
    items = values if isinstance(values, list | tuple) else (values,)
    return {x.untyped_storage().data_ptr() if isinstance(x, Tensor) else 0 for x in items}
