"""The bodies of the generation endpoints: which fields there are, of which types, in which ranges.

Only what can be said without the model is checked here. Fields whose shapes vary (prompt, messages, tools, stop,
response_format, ...) come through as they are and are read in prompts.py, messages.py and options.py;
field_schemas.py has their shapes for the API's description. A null is the same as an absent field. Fields that are
accepted and ignored are hints (user, store, ...): ignoring them changes no answer. Fields of other servers that would
change it are refused (CHANGING_FIELDS).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from deployments.api import field_schemas as shapes
from deployments.api.errors import clip, invalid, unsupported
from deployments.api.integers import Body, Integer
from deployments.api.validation_errors import from_pydantic, missing, too_many_members

_INT64 = 2**63
_MetadataKey = Annotated[str, Field(max_length=64)]
_MetadataValue = Annotated[str, Field(max_length=512)]
_Refused = Annotated[Any, WithJsonSchema(shapes.UNSUPPORTED)]


_UNREAD = """
    allowed_token_ids bad_words chat_template chat_template_kwargs documents early_stopping ebnf enable_thinking grammar
    guided_choice guided_decoding_backend guided_grammar guided_json guided_regex guided_whitespace_pattern json_schema
    logits_processors mirostat mm_processor_kwargs options reasoning regex structural_tag structured_outputs thinking
    truncate_prompt_tokens typical_p use_beam_search
"""
CHANGING_FIELDS: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(_UNREAD.split(), ()),
    "add_special_tokens": (True,),
    "best_of": (1,),
    "length_penalty": (1,),
    "spaces_between_special_tokens": (True,),
}
"""Fields of other servers that change their answers and that nothing here reads, and which values of each are what
happens anyhow (besides null, and for most of them what is empty). Other values are refused whatever `unknown_fields`
says."""
_FALSE_MATTERS = frozenset({"add_special_tokens", "spaces_between_special_tokens", "enable_thinking"})


class StreamOptions(Body):
    """`include_obfuscation` is a hint and not used."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Prediction(Body):
    """A hint: what the answer will likely be. Not used."""

    type: Literal["content"]
    content: Any


class GenerationBody(Body):
    """What chat and completions have in common, then the extensions that other servers made customary."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]] | None, Field(json_schema_extra=shapes.LOGIT_BIAS)
    ] = None
    seed: Annotated[int, Field(ge=-_INT64, le=_INT64 - 1)] | None = None
    stop: Annotated[Any, WithJsonSchema(shapes.STOP)] = None
    user: str | None = None

    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=100.0)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Integer], Field(max_length=128)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    priority: Annotated[int, Field(ge=0, le=1000)] | None = None


class ChatBody(GenerationBody):
    """Of POST /v1/chat/completions."""

    model_config = ConfigDict(json_schema_extra={"required": ["model", "messages"]})

    messages: Annotated[Any, WithJsonSchema(shapes.MESSAGES)] = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[Any, WithJsonSchema(shapes.TOOLS)] = None
    tool_choice: Annotated[Any, WithJsonSchema(shapes.TOOL_CHOICE)] = None
    parallel_tool_calls: bool | None = None
    response_format: Annotated[Any, WithJsonSchema(shapes.RESPONSE_FORMAT)] = None
    modalities: Annotated[list[str] | None, WithJsonSchema(shapes.MODALITIES)] = None
    metadata: Annotated[dict[_MetadataKey, _MetadataValue], Field(max_length=16)] | None = None
    service_tier: Annotated[str | None, WithJsonSchema(shapes.SERVICE_TIER)] = None
    store: bool | None = None
    safety_identifier: Annotated[str, Field(max_length=64)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=64)] | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prediction: Prediction | None = None
    reasoning_effort: _Refused = None
    verbosity: Literal["medium"] | None = None
    audio: _Refused = None
    web_search_options: _Refused = None
    functions: _Refused = None
    function_call: _Refused = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionBody(GenerationBody):
    """Of POST /v1/completions."""

    model_config = ConfigDict(json_schema_extra={"required": ["model", "prompt"]})

    prompt: Annotated[Any, WithJsonSchema(shapes.PROMPT)] = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=0, le=20)] | None = None
    suffix: str | None = None


class TokenizeBody(Body):
    """Of POST /tokenize: either a prompt or messages."""

    model: str
    prompt: str | None = None
    messages: Annotated[Any, WithJsonSchema({"anyOf": [shapes.MESSAGES, {"type": "null"}]})] = None
    tools: Annotated[Any, WithJsonSchema(shapes.TOOLS)] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class EmbeddingsBody(Body):
    """Of POST /v1/embeddings."""

    model: str
    input: Annotated[Any, WithJsonSchema(shapes.PROMPT)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None


B = TypeVar("B", bound=BaseModel)

# Checked before the members are: validation reports every wrong member, which takes a second for a million of them.
_MOST_MEMBERS = {"logit_bias": 4096, "metadata": 16, "modalities": 16, "stop_token_ids": 128}


def parse(
    kind: type[B],
    body: dict[str, Any],
    unknown_fields: Literal["ignore", "reject"],
    ignored: list[str] | None = None,
) -> B:
    """`body` as a `kind`. The names of its own fields (not of objects in them) that were passed over are added to
    `ignored`. Raises ApiError 400 that names the first offending parameter."""
    unknown = [name for name in body if name not in kind.model_fields]
    for name in unknown:
        if _changes_answer(name, body[name]):
            raise unsupported(name, f"Unsupported parameter: '{name}' is not supported with this model.")
    if unknown_fields == "reject":
        for at in shapes.unknown_members(body, _shape(kind), ""):
            name = clip(at.removeprefix("."))
            raise invalid(f"Unknown parameter: '{name}'.", name, "unknown_parameter")
    if ignored is not None:
        ignored += unknown
    if body.get("model", "") is None:
        raise missing("model")
    for name, most in _MOST_MEMBERS.items():
        value = body.get(name)
        if name in kind.model_fields and isinstance(value, list | dict) and len(value) > most:
            raise too_many_members(name, value, most)
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise from_pydantic(error) from None


def understood(kind: type[BaseModel], body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a body that was parsed as a `kind`, without those that were passed over."""
    return {name: value for name, value in body.items() if name in kind.model_fields}


def _changes_answer(name: str, value: Any) -> bool:
    harmless = CHANGING_FIELDS.get(name)
    if harmless is None or value is None or value in harmless:
        return False
    return name in _FALSE_MATTERS or bool(value)


@cache
def _shape(kind: type[BaseModel]) -> shapes.Schema:
    """The JSON Schema of a body, references to its parts resolved."""
    schema = kind.model_json_schema()
    parts = schema.pop("$defs", {})
    fields = {name: _resolved(field, parts) for name, field in schema["properties"].items()}
    return {**schema, "properties": fields}


def _resolved(schema: Any, parts: dict[str, Any]) -> Any:
    match schema:
        case {"$ref": str(ref)}:
            return parts[ref.rpartition("/")[2]]
        case dict():
            return {key: _resolved(value, parts) for key, value in schema.items()}
        case list():
            return [_resolved(value, parts) for value in schema]
    return schema
