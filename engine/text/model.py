"""Everything about a model's text, loaded together."""

from __future__ import annotations

from dataclasses import dataclass

from engine.models.locate import resolve
from engine.text.chat_template import ChatTemplate
from engine.text.hf_vocab import generation_eos_ids
from engine.text.tokenizer import Tokenizer, read_vocabulary


@dataclass(frozen=True, slots=True, eq=False)
class TextModel:
    """`chat_template` None: the model has none. `eos_ids`: every id that ends a text by default."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    eos_ids: frozenset[int]


def load_text(path: str, tokenizer_path: str | None = None) -> TextModel:
    """Tokenizer and chat template of the model at `path`, or from `tokenizer_path` if given: each a directory, a
    .gguf file or pkg://package/file. Raises ModelFileError."""
    model = resolve(path)
    vocabulary = read_vocabulary(resolve(tokenizer_path) if tokenizer_path else model)
    tokenizer = Tokenizer(vocabulary)
    source = vocabulary.chat_template
    return TextModel(
        tokenizer=tokenizer,
        chat_template=ChatTemplate(source, tokenizer, vocabulary.tool_template) if source is not None else None,
        eos_ids=tokenizer.eos_ids | (generation_eos_ids(model) if model.is_dir() else frozenset()),
    )
