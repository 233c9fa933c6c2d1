"""From a parsed body to the engine's requests. Synchronous, and pure but for ids and clock: runs on any thread."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from deployments.accounts.tenant import Tenant, cache_salt
from deployments.api.errors import invalid, model_not_found, unsupported
from deployments.api.messages import Message, read_messages
from deployments.api.options import (
    logit_biases,
    refuse_unsupported_chat,
    refuse_unsupported_completion,
    stops,
    token_ids,
    tools,
)
from deployments.api.prompts import read_prompts, refuse_too_long, room
from deployments.api.request_types import ChatBody, CompletionBody, GenerationBody, TokenizeBody, parse, understood
from deployments.api.tier_limits import check_ceiling, default_tokens
from deployments.api.token_text import Echo, echo
from deployments.api.validation_errors import unsupported_choice
from deployments.config.gateway import GatewayConfig
from deployments.config.tiers import DEFAULT_TIER, UNLIMITED, Tier
from deployments.routing.errors import ModelUnavailableError
from deployments.routing.hints import RoutingHints
from deployments.routing.served_model import ServedModel
from engine.errors import InvalidRequestError
from engine.types import GenerateRequest, SamplingParams

_DEFAULT_COMPLETION_TOKENS = 16
_LOADING_RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class Caller:
    """What a request is read against. `ignored` collects the fields of the body that nobody knows."""

    config: GatewayConfig
    models: Mapping[str, ServedModel]
    tenant: Tenant
    tier_name: str = DEFAULT_TIER
    tier: Tier = UNLIMITED
    ignored: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """One HTTP request, ready to run, for `tenant` in the tier called `tier`. Choice `i * n + j` is choice j of
    `requests[i]`. `logprobs`: how many alternatives each reported token has, None for no report. `prompt_logprobs`:
    the same for the prompt, where the client asked for it by that name. `echoes`: one per request when prompts are to
    be repeated. `hints`: for routing."""

    id: str
    created: int
    tenant: Tenant
    tier: str
    model: ServedModel
    requests: tuple[GenerateRequest, ...]
    stream: bool
    include_usage: bool
    logprobs: int | None
    prompt_logprobs: int | None
    echoes: tuple[Echo, ...] = ()
    hints: RoutingHints = field(default_factory=RoutingHints)

    @property
    def most_tokens(self) -> int:
        """Of all prompts and their longest answers."""
        return sum(len(r.prompt) + r.sampling.max_tokens * r.sampling.n for r in self.requests)

    @property
    def n(self) -> int:
        """Choices of each of `requests`."""
        return self.requests[0].sampling.n


T = TypeVar("T")
Prepare = Callable[[dict[str, Any], Caller], PreparedRequest]


def prepare_chat(fields: dict[str, Any], caller: Caller) -> PreparedRequest:
    """Raises ApiError, InvalidRequestError and its kin, or ModelUnavailableError."""
    body = parse(ChatBody, fields, caller.config.unknown_fields, caller.ignored)
    model = find_model(caller, body.model)
    refuse_unsupported_chat(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("'top_logprobs' is only allowed when 'logprobs' is true.", "top_logprobs", "invalid_value")
    _check_service_tier(body.service_tier, caller)
    param, asked = _max_chat_tokens(body)
    check_ceiling(caller.tier, param, asked)
    prompt = _render(model, read_messages(body.messages), body)
    default = default_tokens(caller.tier, None, len(prompt), body.n or 1)
    max_tokens = room(model, len(prompt), asked, default, "messages")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    prepared = _prepared("chatcmpl", body, model, caller, [prompt], [max_tokens], logprobs, False)
    return replace(prepared, hints=RoutingHints("/chat/completions", understood(ChatBody, fields), prepared.tier))


def prepare_completion(fields: dict[str, Any], caller: Caller) -> PreparedRequest:
    """Raises as prepare_chat does."""
    body = parse(CompletionBody, fields, caller.config.unknown_fields, caller.ignored)
    model = find_model(caller, body.model)
    refuse_unsupported_completion(body)
    prompts = read_prompts(body.prompt, model, caller.config.max_prompts)
    check_ceiling(caller.tier, "max_tokens", body.max_tokens)
    num_prompt, num_choices = sum(map(len, prompts)), len(prompts) * (body.n or 1)
    default = default_tokens(caller.tier, _DEFAULT_COMPLETION_TOKENS, num_prompt, num_choices)
    max_tokens = [room(model, len(prompt), body.max_tokens, default, None) for prompt in prompts]
    prepared = _prepared("cmpl", body, model, caller, prompts, max_tokens, body.logprobs, bool(body.echo))
    return replace(prepared, hints=RoutingHints("/completions", understood(CompletionBody, fields), prepared.tier))


def tokenize(fields: dict[str, Any], caller: Caller) -> dict[str, Any]:
    """What a prompt or a chat becomes, ids in order."""
    body = parse(TokenizeBody, fields, caller.config.unknown_fields, caller.ignored)
    model = find_model(caller, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("Exactly one of 'prompt' and 'messages' must be given.", "prompt")
    if body.prompt is not None:
        if body.tools is not None:
            raise invalid("'tools' is only allowed together with 'messages'.", "tools")
        refuse_too_long((body.prompt,), model, "prompt")
        ids: Sequence[int] = model.text.tokenizer.encode(body.prompt)
    else:
        ids = _render(model, read_messages(body.messages), body)
    return {"tokens": list(ids), "count": len(ids), "max_model_len": model.max_model_len}


def find_model(caller: Caller, model_id: str) -> ServedModel:
    """The model as the caller's tier may use it. Raises ApiError 404 for one that is unknown to the caller and
    ModelUnavailableError for one that has not loaded yet."""
    model = caller.models.get(model_id)
    if model is None:
        raise model_not_found(model_id)
    if model.max_model_len < 1:
        raise ModelUnavailableError(_LOADING_RETRY_S)
    longest = caller.tier.max_context
    return model if longest is None or longest >= model.max_model_len else replace(model, max_model_len=longest)


def _check_service_tier(asked: str | None, caller: Caller) -> None:
    """A key has one tier: the name of another is refused rather than quietly served by this one."""
    own = caller.tier_name
    if asked not in (None, "auto", "default", own):
        names = ("auto", "default") if own == "default" else ("auto", "default", own)
        raise unsupported_choice("service_tier", asked or "", names)


def _max_chat_tokens(body: ChatBody) -> tuple[str, int | None]:
    """The setting, and under which of its two names it was given."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        message = "'max_tokens' and 'max_completion_tokens' are the same setting: they may not differ."
        raise invalid(message, "max_tokens", "invalid_value")
    return ("max_completion_tokens", new) if old is None else ("max_tokens", old)


def _render(model: ServedModel, messages: list[Message], body: ChatBody | TokenizeBody) -> tuple[int, ...]:
    continues = bool(body.continue_final_message)
    opens = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    if continues and opens:
        message = "'continue_final_message' and 'add_generation_prompt' may not both be true."
        raise invalid(message, "continue_final_message", "invalid_value")
    if continues and messages[-1]["role"] != "assistant":
        message = "'continue_final_message' needs a last message with role 'assistant'."
        raise invalid(message, "continue_final_message", "invalid_value")
    if model.text.chat_template is None:
        message = f"The model `{model.id}` has no chat template: use /v1/completions."
        raise invalid(message, "model", "unsupported_value")
    shown = tools(body.tools, body.tool_choice if isinstance(body, ChatBody) else None)
    if shown and not model.text.chat_template.supports_tools:
        message = f"The chat template of the model `{model.id}` does not show 'tools' to the model."
        raise unsupported("tools", message, "unsupported_parameter")
    if shown and isinstance(body, ChatBody) and body.parallel_tool_calls is False:
        message = "Unsupported value: 'parallel_tool_calls' may only be true with this model."
        raise unsupported("parallel_tool_calls", message, "unsupported_value")
    refuse_too_long((m["content"] for m in messages), model, "messages")
    try:
        ids = model.text.chat_template.encode(
            messages, tools=shown, add_generation_prompt=opens, continue_final_message=continues
        )
    except InvalidRequestError as error:
        raise invalid(str(error), error.param or "messages") from None
    return tuple(ids)


def _prepared(
    kind: str,
    body: GenerationBody,
    model: ServedModel,
    caller: Caller,
    prompts: list[tuple[int, ...]],
    max_tokens: list[int],
    logprobs: int | None,
    repeat: bool,
) -> PreparedRequest:
    if body.stream_options is not None and not body.stream:
        raise invalid("The 'stream_options' parameter is only allowed when 'stream' is enabled.", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("'prompt_logprobs' is not available when 'stream' is enabled.", "prompt_logprobs")
    sampling = _sampling(body, model, logprobs, repeat)
    if sampling.n * len(prompts) > caller.config.max_choices:
        message = f"{sampling.n} choices for each of {len(prompts)} prompts are more than {caller.config.max_choices}."
        raise invalid(message, "n", "integer_above_max_value")
    for limit in max_tokens:
        if sampling.min_tokens > limit:
            message = f"Invalid 'min_tokens': {sampling.min_tokens} is more than the {limit} tokens of the answer."
            raise invalid(message, "min_tokens", "integer_above_max_value")
    unique = f"{kind}-{uuid.uuid4().hex}"
    salt = cache_salt(caller.tenant.org, body.cache_salt)
    priority = caller.tier.priority + caller.tenant.priority + (body.priority or 0)  # bodies cannot go below 0
    org = caller.tenant.org
    echoes = tuple(echo(model.text, p, sampling.skip_special_tokens) for p in prompts) if repeat else ()
    own = [replace(sampling, max_tokens=limit) for limit in max_tokens]
    if repeat:
        own = [replace(params, text_before=before.held) for params, before in zip(own, echoes, strict=True)]
    requests = tuple(
        GenerateRequest(f"{unique}-{i}", prompt, params, priority, None, salt, org)
        for i, (prompt, params) in enumerate(zip(prompts, own, strict=True))
    )
    return PreparedRequest(
        id=unique,
        created=int(time.time()),
        tenant=caller.tenant,
        tier=caller.tier_name,
        model=model,
        requests=requests,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        echoes=echoes,
    )


def _sampling(body: GenerationBody, model: ServedModel, logprobs: int | None, repeat: bool) -> SamplingParams:
    defaults, vocab_size = model.defaults, model.text.tokenizer.vocab_size
    temperature = _or(body.temperature, defaults.temperature)
    top_p = _or(body.top_p, defaults.top_p)
    if top_p == 0.0:  # the smallest nucleus is the best token alone
        temperature, top_p = 0.0, 1.0
    top_k = _or(body.top_k, defaults.top_k)
    asked = [k for k in (body.prompt_logprobs, logprobs if repeat else None) if k is not None]
    return SamplingParams(
        min_tokens=body.min_tokens or 0,
        n=_or(body.n, 1),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k if 0 < top_k < vocab_size else 0,
        min_p=_or(body.min_p, defaults.min_p),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_or(body.repetition_penalty, defaults.repetition_penalty),
        logit_bias=logit_biases(body.logit_bias, vocab_size),
        seed=body.seed,
        stop=stops(body.stop),
        stop_token_ids=token_ids("stop_token_ids", body.stop_token_ids or [], vocab_size),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        skip_special_tokens=body.skip_special_tokens is not False,
        logprobs=logprobs,
        prompt_logprobs=max(asked, default=None),
    )


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
