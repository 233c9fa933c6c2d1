"""The bodies that are answered, as types: for the API's description, and to hold the answers to it."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

_exact = with_config(ConfigDict(extra="forbid", strict=True))
Finish = Literal["stop", "length"]


@_exact
class ErrorDetail(TypedDict):
    """What is wrong: for people, and for programs by `type`, `param` and `code`."""

    message: str
    type: str
    param: str | None
    code: str | None


@_exact
class Error(TypedDict):
    """Every error, and the last event of a stream that broke."""

    error: ErrorDetail


@_exact
class PromptDetails(TypedDict):
    """`cached_tokens` were found in the prefix cache."""

    cached_tokens: int
    audio_tokens: int


@_exact
class CompletionDetails(TypedDict):
    """All 0: there is nothing of this kind here."""

    reasoning_tokens: int
    audio_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


@_exact
class Usage(TypedDict):
    """A prompt counts once, whatever its number of choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


@_exact
class TopToken(TypedDict):
    """`bytes` are the UTF-8 of `token`; a token that is not whole characters is written `bytes:` and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


@_exact
class Token(TopToken):
    """The chosen token, and the likeliest ones at its place."""

    top_logprobs: list[TopToken]


@_exact
class ChatLogprobs(TypedDict):
    """One entry for each token of the answer."""

    content: list[Token]
    refusal: None


@_exact
class ChatMessage(TypedDict):
    """The answer of one choice."""

    role: Literal["assistant"]
    content: str
    refusal: None
    annotations: list[Any]


@_exact
class ChatChoice(TypedDict):
    """One of the `n` answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


@_exact
class _Head(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: str | None


@_exact
class PromptToken(TypedDict):
    """What the model thought of a token at this place of the prompt."""

    logprob: float
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]
"""For each token of the prompt: by token id. The first has none."""


@_exact
class ChatCompletion(_Head):
    """The answer to a chat that is not streamed."""

    object: Literal["chat.completion"]
    service_tier: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[PromptLogprobs]


@_exact
class ChatDelta(TypedDict):
    """What a chunk adds to a choice."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    refusal: NotRequired[None]


@_exact
class ChatChunkChoice(TypedDict):
    """`finish_reason` is null but in the last chunk of a choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


@_exact
class ChatCompletionChunk(_Head):
    """An event of a streamed chat completion. `usage` is there when asked for, and null but in the last."""

    object: Literal["chat.completion.chunk"]
    service_tier: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]


@_exact
class TextLogprobs(TypedDict):
    """One entry for each token, of the prompt too with `echo`. `text_offset` counts characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


@_exact
class TextChoice(TypedDict):
    """One of the `n` answers of one prompt."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish
    prompt_logprobs: NotRequired[PromptLogprobs]


@_exact
class Completion(_Head):
    """The answer to prompts that is not streamed."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage


@_exact
class TextChunkChoice(TypedDict):
    """`finish_reason` is null but in the last chunk of a choice."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish | None


@_exact
class CompletionChunk(_Head):
    """An event of a streamed completion. `usage` is there when asked for, and null but in the last."""

    object: Literal["text_completion"]
    choices: list[TextChunkChoice]
    usage: NotRequired[Usage | None]


@_exact
class SamplingDefaults(TypedDict, total=False):
    """What the model samples with where a request does not say. What is absent is OpenAI's default."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float


@_exact
class Model(TypedDict):
    """`max_model_len` is null until the model has loaded. `sampling_defaults` is absent where all are OpenAI's."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    sampling_defaults: NotRequired[SamplingDefaults]


@_exact
class ModelList(TypedDict):
    """The models that the key may use."""

    object: Literal["list"]
    data: list[Model]


@_exact
class Tokens(TypedDict):
    """`max_model_len`: the longest prompt and answer together."""

    tokens: list[int]
    count: int
    max_model_len: int


@_exact
class Health(TypedDict):
    """The status is `live` where only the process is asked for."""

    status: Literal["live", "ready", "not ready"]
