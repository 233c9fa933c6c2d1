"""Why somebody may not enter. The texts are for clients."""

from __future__ import annotations


class KeyRefusedError(Exception):
    """There is no API key in the request, or not one that may enter. `missing`: there is none at all."""

    def __init__(self, message: str, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing


class MissingScopeError(Exception):
    """The key is not for requests of this kind."""

    def __init__(self, scope: str) -> None:
        super().__init__(scope)
        self.scope = scope


class BudgetExhaustedError(Exception):
    """The project has used up its tokens of the month. `opens_in_s`: seconds until it has new ones."""

    def __init__(self, message: str, opens_in_s: float) -> None:
        super().__init__(message)
        self.opens_in_s = opens_in_s


class BudgetHeldError(Exception):
    """What is left of the project's budget is held for requests that run: it may be free again when they end."""
