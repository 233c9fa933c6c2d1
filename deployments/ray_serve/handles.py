"""How calls over Serve's handles fail."""

from __future__ import annotations

from grpc import RpcError  # type: ignore[import-untyped]
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

CALL_ERRORS = (RayError, RayServeException, RpcError)
"""What a call raises that did not reach its replica, or whose replica has died. Serve documents the first two; where
calls travel by gRPC, as here, its own errors come through too."""
