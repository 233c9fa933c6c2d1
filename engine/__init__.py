"""The inference engine: a library without Ray, HTTP or pydantic.

    from engine import Engine, EngineConfig, SamplingParams
    print(Engine(EngineConfig(model="model.gguf")).generate(["Count: 1, 2, 3,"], SamplingParams(max_tokens=8)))

Vocabulary: a *sequence* is one choice of one request; a *step* runs some pending tokens of some sequences;
a *block* holds K/V of `block_size` tokens; a *slot* is one token's place in a block; a *rank* is one
tensor-parallel worker; a *draft* is an unverified token.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.async_engine import AsyncEngine as AsyncEngine
    from engine.config import EngineConfig as EngineConfig
    from engine.engine import Engine as Engine
    from engine.types import GenerateRequest as GenerateRequest
    from engine.types import SamplingParams as SamplingParams
    from engine.types import TokenDelta as TokenDelta

_HOMES = {
    "AsyncEngine": "engine.async_engine",
    "Engine": "engine.engine",
    "EngineConfig": "engine.config",
    "GenerateRequest": "engine.types",
    "SamplingParams": "engine.types",
    "TokenDelta": "engine.types",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    # Lazy: the gateway and the CLI use engine.types and engine.text without paying for torch.
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(name)
    return getattr(import_module(_HOMES[name]), name)
