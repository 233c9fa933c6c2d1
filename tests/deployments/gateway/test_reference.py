"""docs/api.md describes every parameter of the API."""

from __future__ import annotations

from pathlib import Path

from deployments.gateway.reference import BODIES, PARAMETERS, reference

PAGE = Path(__file__).parents[3] / "docs" / "api.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == reference(), "python -m deployments.gateway.reference > docs/api.md"


def test_every_parameter_is_described_and_no_other() -> None:
    assert PARAMETERS.keys() == {name for body in BODIES for name in body.model_fields}
