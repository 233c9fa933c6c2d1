"""System prompts that a config names to be kept in the prefix cache, and the tokens they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, Self

from pydantic import Field, model_validator

from deployments.config.gateway import AccountName
from deployments.config.strict import StrictModel
from engine.config import EngineConfig
from engine.errors import EngineError, InvalidRequestError
from engine.models.locate import resolve
from engine.pins import check_length
from engine.text import TextModel, load_text


class PinnedPrompt(StrictModel):
    """The beginning of prompts, which is computed once and kept in the prefix cache. Organisations share no cache, so
    it takes room for each of them. Either `text` or `messages` must be given."""

    text: str | None = Field(None, min_length=1)
    """How prompts of /v1/completions begin."""
    messages: tuple[Mapping[str, Any], ...] | None = Field(None, min_length=1)
    """How conversations of /v1/chat/completions without tools begin, usually with one system message."""
    orgs: tuple[AccountName, ...] | None = Field(None, min_length=1)
    """The organisations that are to have it. By default those of all `api_keys`, or everybody where no keys are asked
    for. Needed where keys are in a database and there are no `api_keys`."""
    cache_salt: str | None = Field(None, max_length=1024)
    """The `cache_salt` of the requests, if they bring one."""

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.text is None) == (self.messages is None):
            raise ValueError("must have either text or messages")
        return self


def prefix_ids(text: TextModel, prompt: PinnedPrompt) -> list[int]:
    """The tokens with which all prompts begin that begin like this one. Raises InvalidRequestError."""
    if prompt.text is not None:
        return text.tokenizer.encode(prompt.text)
    if text.chat_template is None:
        raise InvalidRequestError("the model has no chat template: give text instead", "messages")
    messages = list(prompt.messages or ())
    role = "assistant" if messages[-1].get("role") == "user" else "user"
    # Wherever the template lets it show what comes next: what two conversations that go on differently share.
    one, other = (text.chat_template.encode([*messages, {"role": role, "content": c}]) for c in ("A", "7 b"))
    return [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]


def faults(prompts: Sequence[PinnedPrompt], engine: EngineConfig) -> Iterator[tuple[int, str]]:
    """What the model's text files show to be wrong with its prompts: index and message. Loads them if there are
    any."""
    if not prompts:
        return
    try:
        text = load_text(str(resolve(engine.model)), engine.tokenizer)
    except EngineError:
        return  # that is another check's to say
    for i, prompt in enumerate(prompts):
        try:
            check_length(len(prefix_ids(text, prompt)), engine.block_size)
        except InvalidRequestError as error:
            yield i, str(error)
