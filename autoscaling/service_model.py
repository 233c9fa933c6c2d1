"""How long an engine's steps take, as a handful of numbers that `sluice autoscale fit` finds."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autoscaling.settings import PolicyError, Settings, setting

PROFILES = Path(__file__).parent / "profiles"


@dataclass(frozen=True, slots=True)
class ServiceModel(Settings):
    """How long one replica takes, and what it holds.

    A step with P prompt tokens, whose pairs with the tokens before them are A, and B sequences that
    decode over C tokens of context in all, takes

        base_s + prefill_token_s P + prefill_pair_s A + decode_seq_s B + decode_context_s C    seconds.

    and 1 + `contention` x N times that while N other replicas of its host are in a step or starting: they share cores
    and memory bandwidth. Up to `replicas_per_host` are on one host; the default, 1, is no contention.
    `overhead_s`: what a request costs outside of the engine before its first token, at no one else's expense.
    `startup_s`: from the decision to start a replica until it takes requests. The other four are the engine's limits:
    tokens of a step, sequences at once, tokens of K/V, requests that may wait. `about`: what was measured, where."""

    base_s: float = setting(0.005, above=0)
    prefill_token_s: float = setting(0.0005, above=0)
    prefill_pair_s: float = setting(0.0, 0)
    decode_seq_s: float = setting(0.001, 0)
    decode_context_s: float = setting(0.0, 0)
    contention: float = setting(0.0, 0)
    replicas_per_host: int = setting(1, 1)
    overhead_s: float = setting(0.0, 0)
    startup_s: float = setting(8.0, 0)
    max_num_batched_tokens: int = setting(512, 1)
    max_num_seqs: int = setting(64, 1)
    kv_tokens: int = setting(160_000, 1)
    max_num_waiting: int = setting(4096, 0)
    about: str = ""

    def step_s(self, prompt_tokens: float, pairs: float, decodes: float, context: float) -> float:
        """On a host of its own."""
        return (
            self.base_s
            + self.prefill_token_s * prompt_tokens
            + self.prefill_pair_s * pairs
            + self.decode_seq_s * decodes
            + self.decode_context_s * context
        )

    def alone_s(self, prompt_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Time to first token of such prompts on a replica that has nothing else to do: no fleet is faster."""
        tokens = prompt_tokens.astype(np.float64)
        steps = np.ceil(tokens / self.max_num_batched_tokens)
        work_s: NDArray[np.float64] = self.prefill_token_s * tokens + self.prefill_pair_s * tokens**2 / 2
        return self.base_s * steps + work_s + self.overhead_s

    @classmethod
    def load(cls, name_or_file: str) -> ServiceModel:
        """A shipped profile by name, or a JSON file. Raises PolicyError."""
        path = Path(name_or_file) if name_or_file.endswith(".json") else PROFILES / f"{name_or_file}.json"
        try:
            given = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            known = ", ".join(sorted(p.stem for p in PROFILES.glob("*.json")))
            raise PolicyError(f"profile {name_or_file}: {error.strerror}; shipped: {known}, or a .json file") from None
        except ValueError as error:
            raise PolicyError(f"profile {path}: not JSON: {error}") from None
        return cls.from_dict(given, f"profile {path.name}")

    def save(self, path: Path) -> None:
        """As JSON that load() reads. Raises OSError."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
