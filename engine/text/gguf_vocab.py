"""A tokenizer from a GGUF file's metadata: byte-level BPE ("gpt2") and SentencePiece BPE ("llama")."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from engine.errors import ModelFileError
from engine.text.vocabulary import OTHER_NAMES, Vocabulary, byte_level_bytes, sentencepiece_bytes, unspelled_bytes

log = logging.getLogger(__name__)


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is cut into words before merging. `split` None: GPT-2's own rule. `ignore_merges`: a word that is
    itself a token is taken whole."""

    split: str | None = None
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


def _letters_and_digits(digits: str) -> str:
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = PreTokenizer()
_SMOLLM = PreTokenizer(single_digits=True)
_CL100K = PreTokenizer(_letters_and_digits(r"\p{N}{1,3}"))
_LLAMA3 = PreTokenizer(_letters_and_digits(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer(_letters_and_digits(r"\p{N}"), nfc=True)
_TEKKEN = PreTokenizer(_CASED, ignore_merges=True, add_bos=True)

# `tokenizer.ggml.pre`, the writer's name for the original tokenizer's rule.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "command-r": _SMOLLM,
    "dbrx": _CL100K,
    "smaug-bpe": _CL100K,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "tekken": _TEKKEN,
}

_NAMES = dict(
    zip(
        OTHER_NAMES,
        ("padding_token_id", "unknown_token_id", "seperator_token_id", "cls_token_id", "mask_token_id"),  # sic
        strict=True,
    )
)
# Control tokens that end a turn whatever eos_token_id says: many files name only one of two enders.
_TURN_ENDERS = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>"})


def read_gguf_vocabulary(path: Path) -> Vocabulary:
    """Raises ModelFileError naming the file and the key at fault."""
    from engine.models.gguf_file import read_gguf

    return build_vocabulary(read_gguf(path).metadata, str(path))


def build_vocabulary(metadata: Mapping[str, Any], source: str) -> Vocabulary:
    """`source` names the file in errors."""
    return _Builder(metadata, source).build()


class _Builder:
    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self.metadata, self.source = metadata, source
        self.tokens: Sequence[str] = self.key("tokens", [])
        if not self.tokens:
            raise self.bad("tokens", "no tokens: the file has no tokenizer")
        self.types: Sequence[int] = self.key("token_type", [])
        if self.types and len(self.types) != len(self.tokens):
            raise self.bad("token_type", f"{len(self.types)} entries for {len(self.tokens)} tokens")
        self.types = self.types or [TokenType.NORMAL] * len(self.tokens)
        # Of two tokens spelt alike the first is the one that text maps to.
        self.ids = {t: i for i, t in reversed(list(enumerate(self.tokens)))}

    def build(self) -> Vocabulary:
        model = self.key("model", None)
        if model == "gpt2":
            backend, add_bos, unspelled = self.byte_level()
        elif model == "llama":
            backend, add_bos, unspelled = self.sentencepiece()
        else:
            raise self.bad("model", f"tokenizer model {model!r} is not supported (known: gpt2, llama)")
        backend.add_tokens([AddedToken(t, normalized=False) for t in self.of_type(TokenType.USER_DEFINED)])
        special = self.of_type(TokenType.CONTROL, TokenType.UNKNOWN)
        backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
        decode = byte_level_bytes if model == "gpt2" else sentencepiece_bytes
        whole = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
        pieces = (t.encode() if k in whole else decode(t) for t, k in zip(self.tokens, self.types, strict=True))
        ends = (self.token_id(k) for k in ("eos_token_id", "eot_token_id", "eom_token_id"))
        enders = (self.ids[t] for t in special if t in _TURN_ENDERS)
        template = self.metadata.get("tokenizer.chat_template")
        tools = self.metadata.get("tokenizer.chat_template.tool_use")
        return Vocabulary(
            backend=backend,
            pieces=tuple(pieces),
            unspelled=unspelled,
            bos_id=self.token_id("bos_token_id"),
            eos_id=self.token_id("eos_token_id"),
            eos_ids=frozenset(i for i in (*ends, *enders) if i is not None),
            add_bos=bool(self.key("add_bos_token", add_bos)),
            chat_template=template if isinstance(template, str) else None,
            tool_template=tools if isinstance(tools, str) else None,
            named={name: self.tokens[i] for name, key in _NAMES.items() if (i := self.token_id(key)) is not None},
        )

    def byte_level(self) -> tuple[tokenizers.Tokenizer, bool, bytes | None]:
        """With the default of add_bos and the unspelled bytes, as sentencepiece()."""
        pre = self.key("pre", None)
        if pre is None:
            pre = "default"
            log.warning(
                "%s: no key 'tokenizer.ggml.pre': text is cut as for GPT-2, which is wrong for most newer models; "
                "convert the model anew",
                self.source,
            )
        if pre not in PRE_TOKENIZERS:
            raise self.bad("pre", f"pre-tokenizer {pre!r} is not supported (known: {', '.join(PRE_TOKENIZERS)})")
        rule = PRE_TOKENIZERS[pre]
        merges = []
        for merge in self.key("merges", []):
            cut = merge.find(" ", 1)
            left, right = merge[:cut], merge[cut + 1 :]
            if cut < 0 or left not in self.ids or right not in self.ids or left + right not in self.ids:
                raise self.bad("merges", f"merge {merge!r} is not of two tokens into a third")
            merges.append((left, right))
        backend = tokenizers.Tokenizer(models.BPE(self.ids, merges, ignore_merges=rule.ignore_merges))
        if rule.nfc:
            backend.normalizer = normalizers.NFC()
        steps: list[pre_tokenizers.PreTokenizer] = []
        if rule.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if rule.split:
            steps.append(pre_tokenizers.Split(Regex(rule.split), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.split is None))
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
        return backend, rule.add_bos, unspelled_bytes(self.ids)

    def sentencepiece(self) -> tuple[tokenizers.Tokenizer, bool, bytes | None]:
        scores = self.key("scores", [])
        if len(scores) != len(self.tokens):
            raise self.bad("scores", f"{len(scores)} entries for {len(self.tokens)} tokens")
        unk = self.token_id("unknown_token_id")
        has_bytes = all(f"<0x{b:02X}>" in self.ids for b in range(256))
        model = models.BPE(
            self.ids,
            self.merges_by_score(scores),
            unk_token=self.tokens[unk] if unk is not None else None,
            fuse_unk=True,
            byte_fallback=has_bytes,
        )
        backend = tokenizers.Tokenizer(model)
        spaces = normalizers.Replace(" ", "\u2581")
        prefix = [normalizers.Prepend("\u2581")] if self.key("add_space_prefix", True) else []
        backend.normalizer = normalizers.Sequence([*prefix, spaces])
        return backend, True, b"" if has_bytes else None

    def merges_by_score(self, scores: Sequence[float]) -> list[tuple[str, str]]:
        """SentencePiece merges whichever adjacent pair makes the best-scored token: every way to cut a token
        in two is a merge, ranked by the token's score."""
        usable = {t for t, k in zip(self.tokens, self.types, strict=True) if k == TokenType.NORMAL}
        order = sorted((i for t, i in self.ids.items() if t in usable), key=lambda i: (-scores[i], i))
        return [
            (left, right)
            for token in map(self.tokens.__getitem__, order)
            for cut in range(1, len(token))
            if (left := token[:cut]) in usable and (right := token[cut:]) in usable
        ]

    def of_type(self, *kinds: TokenType) -> list[str]:
        return [t for t, k in zip(self.tokens, self.types, strict=True) if k in kinds]

    def token_id(self, name: str) -> int | None:
        value = self.key(name, None)
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < len(self.tokens):
            raise self.bad(name, f"{value!r} is not one of {len(self.tokens)} tokens")
        return value

    def key(self, name: str, default: Any) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{name}", default)

    def bad(self, name: str, problem: str) -> ModelFileError:
        return ModelFileError(f"{self.source}: key 'tokenizer.ggml.{name}': {problem}")
