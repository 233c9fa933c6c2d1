"""Errors for valid requests that are not served."""

from __future__ import annotations

RETRY_AFTER_S = 5.0  # seconds: about as long as a replica takes to restart


class RoutingError(Exception):
    """Base class of the errors that routing raises."""


class ModelUnavailableError(RoutingError):
    """No replica of the model can take the request now: loading, restarting or scaled to zero."""

    def __init__(self, retry_after_s: float = 1.0) -> None:
        super().__init__(retry_after_s)
        self.retry_after_s = retry_after_s


class ModelStartError(ModelUnavailableError):
    """Replicas of the model fail to start."""


class OverloadedError(RoutingError):
    """Too many requests wait already. `retry_after_s`: seconds until there will be few enough."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(retry_after_s)
        self.retry_after_s = retry_after_s


class ReplicaLostError(RoutingError):
    """The replica that served the request is gone, and no other can go on with the answer."""


class UnusableOutputError(RoutingError):
    """The model gave nothing for this request from which a token could be chosen. Other replicas would do the same."""


class RepeatedLossError(RoutingError):
    """Several replicas were lost one after the other while they worked on this request: it may be the cause."""

    def __init__(self, replicas: int) -> None:
        super().__init__(f"{replicas} replicas were lost while they worked on this request")
        self.replicas = replicas


class ReplicaSilentError(RoutingError):
    """A replica did not answer in time."""

    def __init__(self, name: str, within_s: float) -> None:
        super().__init__(f"The replica '{name}' did not answer within {within_s:g} seconds. Please retry.")


class UnknownModelError(RoutingError):
    """No route has this model id, or none that the request's tier may use."""

    def __init__(self, model_id: str) -> None:
        super().__init__(model_id)
        self.model_id = model_id


class UnableError(RoutingError):
    """No pool of the model has the abilities that the request needs."""

    def __init__(self, model_id: str) -> None:
        super().__init__(f"No pool of the model `{model_id}` can do what the request asks for.")
