"""A model directory's generation_config.json, up to what the engine is asked and what clients are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers_gateway import COUNT, HI, MODEL, FakeBackend, client, demo_model

from deployments.config.application import ModelConfig
from deployments.config.sampling_defaults import sampling_defaults

FILE = {
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "do_sample": False,
    "max_new_tokens": 5,
    "eos_token_id": 2,
}


def backend_of(directory: Path, generation_config: str = "auto") -> FakeBackend:
    """Serves what a pool of the model in `directory` would be served as."""
    given = {"name": "m", "generation_config": generation_config, "engine": {"model": str(directory)}}
    return FakeBackend({MODEL: demo_model(defaults=sampling_defaults(ModelConfig.model_validate(given)))})


def write(directory: Path, **values: Any) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(values))
    return directory


async def sampled(backend: FakeBackend, path: str = "/v1/completions", **fields: Any) -> tuple[float, ...]:
    """What the engine is asked to sample with: temperature, top_p, top_k, min_p and repetition_penalty."""
    body = {"model": MODEL, "max_tokens": 2, **({"messages": HI} if "chat" in path else {"prompt": COUNT}), **fields}
    async with client(backend) as http:
        assert (await http.post(path, json=body)).status_code == 200
    sampling = backend.calls[-1][0].sampling
    return sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.repetition_penalty


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_what_a_request_leaves_out_is_the_models(tmp_path: Path, path: str) -> None:
    backend = backend_of(write(tmp_path, **FILE))
    assert await sampled(backend, path) == (0.6, 0.9, 20, 0.1, 1.1)


async def test_what_a_request_says_wins(tmp_path: Path) -> None:
    backend = backend_of(write(tmp_path, **FILE))
    own = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert await sampled(backend, **own) == (1.0, 1.0, 0, 0.0, 1.0)
    assert await sampled(backend, temperature=0) == (0.0, 0.9, 20, 0.1, 1.1)


async def test_a_null_in_a_request_or_in_the_file_is_no_value(tmp_path: Path) -> None:
    backend = backend_of(write(tmp_path, temperature=0.6, top_p=None))
    assert await sampled(backend, temperature=None) == (0.6, 1.0, 0, 0.0, 1.0)


async def test_max_new_tokens_is_no_default(tmp_path: Path) -> None:
    backend = backend_of(write(tmp_path, max_new_tokens=5))
    async with client(backend) as http:
        body = {"model": MODEL, "messages": HI}
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
    assert backend.calls[-1][0].sampling.max_tokens > 5


async def test_a_config_may_say_that_openais_defaults_hold(tmp_path: Path) -> None:
    backend = backend_of(write(tmp_path, **FILE), generation_config="none")
    assert await sampled(backend) == (1.0, 1.0, 0, 0.0, 1.0)


async def test_clients_are_told_the_defaults(tmp_path: Path) -> None:
    async with client(backend_of(write(tmp_path, temperature=0.6, top_p=1.0, top_k=20))) as http:
        told = {"temperature": 0.6, "top_k": 20}  # top_p is OpenAI's
        assert (await http.get(f"/v1/models/{MODEL}")).json()["sampling_defaults"] == told
        assert (await http.get("/v1/models")).json()["data"][0]["sampling_defaults"] == told


@pytest.mark.parametrize("values", [None, {}, {"eos_token_id": 2}, {"temperature": 1.0, "top_k": 0}])
async def test_a_model_without_any_is_shown_without_any(tmp_path: Path, values: dict[str, Any] | None) -> None:
    if values is not None:
        write(tmp_path, **values)
    async with client(backend_of(tmp_path)) as http:
        assert "sampling_defaults" not in (await http.get(f"/v1/models/{MODEL}")).json()
