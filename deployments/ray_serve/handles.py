"""How calls over Serve's handles travel."""

from __future__ import annotations

SERIALIZATION = "pickle"  # Serve's default would bring cloudpickle's start-up cost to each message
