"""A tokenizer from a Hugging Face model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from engine.errors import ModelFileError
from engine.text.vocabulary import OTHER_NAMES, Vocabulary, byte_level_bytes, sentencepiece_bytes, unspelled_bytes


def read_hf_vocabulary(path: Path) -> Vocabulary:
    """Raises ModelFileError naming the directory or file at fault."""
    backend = _read_backend(path)
    backend.no_truncation()
    backend.no_padding()
    config = _read_json(path / "tokenizer_config.json")
    named = {**_read_json(path / "special_tokens_map.json"), **config}
    pieces, unspelled = _pieces(backend, path)
    bos_id = _named_id(backend, named, "bos_token")
    if "bos_token" not in named:
        ids = _ids(_read_json(path / "config.json").get("bos_token_id"))
        bos_id = min(ids) if ids else None
    add_bos = config.get("add_bos_token")
    if not isinstance(add_bos, bool):
        # Newer files say it only by what the post-processor adds.
        add_bos = bos_id is not None and backend.encode("a").ids[:1] == [bos_id]
    eos_id = _named_id(backend, named, "eos_token")
    eos_ids = generation_eos_ids(path) | (frozenset() if eos_id is None else frozenset({eos_id}))
    templates = _chat_templates(path, config)
    return Vocabulary(
        backend=backend,
        pieces=pieces,
        unspelled=unspelled,
        bos_id=bos_id,
        eos_id=eos_id,
        eos_ids=eos_ids or _ids(_read_json(path / "config.json").get("eos_token_id")),
        add_bos=add_bos,
        chat_template=templates.get("default"),
        tool_template=templates.get("tool_use"),
        named={name: text for name in OTHER_NAMES if (text := _text_of(named.get(name)))},
    )


def generation_eos_ids(path: Path) -> frozenset[int]:
    """The ids that generation_config.json says end a text; empty when there is no such file."""
    return _ids(_read_json(path / "generation_config.json").get("eos_token_id"))


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    file = path / "tokenizer.json"
    if file.exists():
        try:
            return tokenizers.Tokenizer.from_file(str(file))
        except Exception as e:  # the Rust library raises bare Exception
            raise ModelFileError(f"{file}: {e}") from e
    from transformers import AutoTokenizer

    try:
        backend = getattr(AutoTokenizer.from_pretrained(path, local_files_only=True), "backend_tokenizer", None)
    except Exception as e:  # whatever a missing or odd file makes it raise
        raise ModelFileError(f"{path}: no tokenizer.json, and no other tokenizer could be read: {e}") from e
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelFileError(f"{path}: no tokenizer.json, and the tokenizer has no fast form")
    return backend


def _pieces(backend: tokenizers.Tokenizer, path: Path) -> tuple[tuple[bytes, ...], bytes | None]:
    vocab = backend.get_vocab(with_added_tokens=True)
    unspelled: bytes | None
    kinds = _component_types(backend.decoder) | _component_types(backend.pre_tokenizer)
    if "ByteLevel" in kinds:
        decode, unspelled = byte_level_bytes, unspelled_bytes(vocab)
    elif kinds & {"Metaspace", "ByteFallback", "Replace"}:
        decode = sentencepiece_bytes
        unspelled = b"" if getattr(backend.model, "byte_fallback", False) else None
    else:
        raise ModelFileError(f"{path}: neither a byte-level nor a SentencePiece tokenizer (found {sorted(kinds)})")
    added = {i: t.content for i, t in backend.get_added_tokens_decoder().items()}
    pieces = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, i in vocab.items():
        pieces[i] = added[i].encode() if i in added else decode(token)
    return tuple(pieces), unspelled


def _component_types(component: Any) -> set[str]:
    """Type names in a pre-tokenizer or decoder, also inside a Sequence."""
    if component is None:
        return set()
    state = json.loads(component.__getstate__())
    parts = [state, *state.get("decoders", []), *state.get("pretokenizers", [])]
    return {part["type"] for part in parts}


def _chat_templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """By name; the usual one is called `default`."""
    found = config.get("chat_template", _read_json(path / "chat_template.json").get("chat_template"))
    named = {t.get("name"): t.get("template") for t in found} if isinstance(found, list) else {"default": found}
    templates = {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}
    for name, file in [
        ("default", path / "chat_template.jinja"),
        *((file.stem, file) for file in sorted((path / "additional_chat_templates").glob("*.jinja"))),
    ]:
        if file.exists():
            templates[name] = file.read_text(encoding="utf-8")
    return templates


def _named_id(backend: tokenizers.Tokenizer, named: dict[str, Any], name: str) -> int | None:
    token = _text_of(named.get(name))
    return None if token is None else backend.token_to_id(token)


def _text_of(token: Any) -> str | None:
    """A control token's text, as configs write it."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _ids(value: Any) -> frozenset[int]:
    """An id, a list of ids or nothing, as configs write it."""
    return frozenset(i for i in (value if isinstance(value, list) else [value]) if type(i) is int)


def _read_json(file: Path) -> dict[str, Any]:
    """The object in `file`; empty when there is no file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        raise ModelFileError(f"{file}: {e}") from e
    if not isinstance(value, dict):
        raise ModelFileError(f"{file}: expected a JSON object, got {type(value).__name__}")
    return value
