"""Prompts of /v1/completions: text or token ids, one or many, and how long they may be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from deployments.api.errors import ApiError, invalid
from deployments.api.integers import as_integer
from deployments.api.options import check_token_id
from deployments.api.validation_errors import missing, wrong_type
from deployments.routing.served_model import ServedModel
from engine.errors import ContextLengthError

_SHAPES = "a string, an array of strings, an array of token ids or an array of arrays of token ids"


def read_prompts(value: Any, model: ServedModel, max_prompts: int) -> list[tuple[int, ...]]:
    """The token ids of every prompt, none of them empty. Raises ApiError 400, or ContextLengthError for what is
    too long to be worth tokenizing."""
    if value is None:
        raise missing("prompt")
    if isinstance(value, str):
        return [_encode("prompt", value, model)]
    if not isinstance(value, list):
        raise wrong_type("prompt", _SHAPES, value)
    if not value:
        raise _empty("prompt")
    match value[0]:
        case str():
            _same_kind(value, str, "a string")
            _cap(value, max_prompts)
            return [_encode(f"prompt[{i}]", text, model) for i, text in enumerate(value)]
        case bool():
            raise wrong_type("prompt[0]", "a string, a token id or an array of token ids", value[0])
        case int() | float():
            return [_ids("prompt", value, model)]
        case list():
            _same_kind(value, list, "an array of token ids")
            _cap(value, max_prompts)
            return [_ids(f"prompt[{i}]", ids, model) for i, ids in enumerate(value)]
    raise wrong_type("prompt[0]", "a string, a token id or an array of token ids", value[0])


def refuse_too_long(texts: Iterable[str], model: ServedModel, param: str | None) -> None:
    """Raises ContextLengthError for text that cannot fit, however it is tokenized: no tokenizing of megabytes."""
    least = sum(model.text.tokenizer.min_tokens_of(text) for text in texts)
    if least > model.max_model_len:
        raise ContextLengthError(
            f"This model's maximum context length is {model.max_model_len} tokens. However, your input is at least "
            f"{least} tokens long. Please reduce its length.",
            param,
        )


def room(model: ServedModel, num_prompt: int, asked: int | None, default: int | None, param: str | None) -> int:
    """How many tokens a prompt may be continued by: `asked`, or `default` cut to what the context leaves (None:
    all of it). Raises ContextLengthError when it does not fit."""
    limit = model.max_model_len
    left = limit - num_prompt
    if asked is None and left >= 1:
        return left if default is None else min(default, left)
    if asked is not None and asked <= left:
        return asked
    if asked is None or left < 0:
        detail = f"your input is {num_prompt} tokens long and leaves no room for an answer. Please reduce its length."
    else:
        detail = (
            f"you requested {num_prompt + asked} tokens ({num_prompt} in the input, {asked} in the completion). "
            "Please reduce the length of the input or of the completion."
        )
    raise ContextLengthError(f"This model's maximum context length is {limit} tokens. However, {detail}", param)


def _encode(param: str, text: str, model: ServedModel) -> tuple[int, ...]:
    if not text:
        raise _empty(param)
    refuse_too_long((text,), model, None)
    ids = tuple(model.text.tokenizer.encode(text))
    if not ids:
        raise _empty(param)
    return ids


def _ids(param: str, ids: list[Any], model: ServedModel) -> tuple[int, ...]:
    if not ids:
        raise _empty(param)
    if set(map(type, ids)) != {int}:
        ids = [as_integer(token_id) for token_id in ids]
    vocab_size = model.text.tokenizer.vocab_size
    for i, token_id in enumerate(ids):
        if type(token_id) is not int:
            raise wrong_type(f"{param}[{i}]", "a token id", token_id)
        if not 0 <= token_id < vocab_size:
            check_token_id(f"{param}[{i}]", token_id, vocab_size)
    return tuple(ids)


def _same_kind(items: list[Any], kind: type, expected: str) -> None:
    for i, item in enumerate(items):
        if not isinstance(item, kind):
            raise wrong_type(f"prompt[{i}]", expected, item)


def _cap(prompts: list[Any], limit: int) -> None:
    if len(prompts) > limit:
        message = f"Invalid 'prompt': array too long. Expected at most {limit} prompts, but got {len(prompts)} instead."
        raise invalid(message, "prompt", "array_above_max_length")


def _empty(param: str) -> ApiError:
    return invalid(f"Invalid '{param}': a prompt may not be empty.", param, "empty_prompt")
