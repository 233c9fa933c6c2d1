"""Why a request that is right in itself is not served."""

from __future__ import annotations

RETRY_AFTER_S = 5.0  # about what a replica's restart takes


class RoutingError(Exception):
    """Root of what routing raises on purpose."""


class ModelUnavailableError(RoutingError):
    """No replica of the model can take the request now: loading, restarting or scaled to zero."""

    def __init__(self, retry_after_s: float = 1.0) -> None:
        super().__init__(retry_after_s)
        self.retry_after_s = retry_after_s


class ModelStartError(ModelUnavailableError):
    """Replicas of the model fail to start."""


class OverloadedError(RoutingError):
    """More requests wait already than this one may wait behind. `retry_after_s`: until there will be fewer."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(retry_after_s)
        self.retry_after_s = retry_after_s


class ReplicaLostError(RoutingError):
    """The replica that served the request is gone."""


class ReplicaSilentError(RoutingError):
    """A replica of a pool did not answer a question about its state in time."""

    def __init__(self, pool: str, within_s: float) -> None:
        super().__init__(f"A replica of '{pool}' did not answer within {within_s:g} seconds. Please retry.")


class UnknownModelError(RoutingError):
    """No route has this model id, or none that the request's tier may use."""

    def __init__(self, model_id: str) -> None:
        super().__init__(model_id)
        self.model_id = model_id


class UnableError(RoutingError):
    """No pool of the model has the abilities that the request needs."""

    def __init__(self, model_id: str) -> None:
        super().__init__(f"No pool of the model `{model_id}` can do what the request asks for.")
