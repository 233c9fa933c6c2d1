"""A policy by name or from a YAML file, with its settings and guardrails.

policy: slo                     # a name in base.POLICIES
min_replicas: 2
max_replicas: 12
params: {ttft_slo_s: 0.5}       # the policy's own settings
guardrails: {downscale_window_s: 120}

The two bounds may also stand among the guardrails. A model's `autoscaling` in a config file is the same mapping.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoscaling.base import POLICIES, ScalingPolicy
from autoscaling.controller import Controller
from autoscaling.guardrails import GuardrailParams, Guardrails
from autoscaling.settings import PolicyError, Settings

BOUNDS = ("min_replicas", "max_replicas")
KEYS = ("policy", *BOUNDS, "params", "guardrails")


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """Checked; `controller()` makes a new one, with no past, each time. `label` is for tables and plots."""

    label: str
    policy: str
    params: Settings
    guardrails: GuardrailParams

    @classmethod
    def from_dict(cls, given: Any, label: str, guardrails: Mapping[str, Any] | None = None) -> PolicySpec:
        """`guardrails` are defaults for those the mapping does not set. Raises PolicyError."""
        if not isinstance(given, Mapping) or "policy" not in given:
            raise PolicyError(f"{label}: must be a mapping with {', '.join(KEYS)}; got {given!r}")
        if unknown := [str(key) for key in given if key not in KEYS]:
            raise PolicyError(f"{label}: unknown setting {', '.join(unknown)}; known: {', '.join(KEYS)}")
        name = given["policy"]
        kind = policy_class(name, label)
        own = given.get("guardrails") or {}
        if not isinstance(own, Mapping):
            raise PolicyError(f"{label}.guardrails: must be a mapping, got {own!r}")
        bounds = {key: given[key] for key in BOUNDS if key in given}
        if twice := [key for key in bounds if key in own]:
            raise PolicyError(f"{label}.{twice[0]}: is given twice, also among guardrails")
        return cls(
            label,
            name,
            kind.Params.from_dict(given.get("params"), f"{label}.params"),
            GuardrailParams.from_dict({**(guardrails or {}), **own, **bounds}, f"{label}.guardrails"),
        )

    @classmethod
    def load(cls, name_or_file: str, guardrails: Mapping[str, Any] | None = None) -> PolicySpec:
        """`name_or_file`: a registry name, or a path that ends in .yaml or .yml. Raises PolicyError."""
        if not name_or_file.endswith((".yaml", ".yml")):
            return cls.from_dict({"policy": name_or_file}, name_or_file, guardrails)
        import yaml

        path = Path(name_or_file)
        try:
            given = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise PolicyError(f"{path}: {error.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise PolicyError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
        try:
            return cls.from_dict(given, path.stem, guardrails)
        except PolicyError as error:
            raise PolicyError(f"{path}: {error}") from None

    def controller(self) -> Controller:
        """A new one, without a past."""
        kind = POLICIES.get(self.policy)
        return Controller(kind.build(self.params), Guardrails(self.guardrails, bounds_only=kind.raw))

    def with_params(self, label: str, **changes: Any) -> PolicySpec:
        """The same with other settings of the policy. Raises PolicyError."""
        return replace(self, label=label, params=replace(self.params, **changes))


def policy_class(name: Any, where: str) -> type[ScalingPolicy]:
    """Raises PolicyError that lists the known names."""
    if name not in POLICIES.names():
        raise PolicyError(f"{where}.policy: unknown autoscaling policy {name!r}; known: {', '.join(POLICIES.names())}")
    return POLICIES.get(name)
