"""docs/configuration.md describes every key that a config file may have."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from pydantic import Field

from deployments.config.application import ServeConfig
from deployments.config.reference import attribute_docs, reference, sections
from deployments.config.routing import RoutingConfig
from deployments.config.strict import StrictModel

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"
KINDS = sorted({kind for root in (ServeConfig, RoutingConfig) for _, kind in sections("args", root)}, key=str)


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == reference(), "python -m deployments.config.reference > docs/configuration.md"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_key_has_a_description(kind: type) -> None:
    names = {f.name for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set(kind.model_fields)
    assert names == set(attribute_docs(kind))
    assert kind.__doc__


def test_sections_follow_the_types() -> None:
    assert [path for path, _ in sections("args", ServeConfig)][:3] == [
        "args",
        "args.models[]",
        "args.models[].autoscaling",
    ]
    assert ("args.gateway.tiers.NAME", "Tier") in [(p, kind.__name__) for p, kind in sections("args", ServeConfig)]


def test_a_base_class_gives_its_descriptions_too() -> None:
    assert attribute_docs(Derived) == {"first": "Replaced.", "second": "Of two lines."}


class Base(StrictModel):
    """For the test."""

    first: int = Field(1, ge=1)
    """Described."""
    second: str = ""
    """Of
    two lines."""


class Derived(Base):
    """For the test."""

    first: int = 2
    """Replaced."""
