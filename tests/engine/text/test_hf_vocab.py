from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from engine.errors import ModelFileError
from engine.text import Tokenizer, load_text, load_tokenizer
from engine.text.tokenizer import read_vocabulary


@pytest.fixture
def directory(tmp_path: Path, demo_path: Path) -> Path:
    backend = read_vocabulary(demo_path).backend
    backend.decoder = decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config", bos_token="<|im_start|>", eos_token={"content": "<|im_end|>"})
    return tmp_path


def write(path: Path, name: str, **values: Any) -> None:
    (path / f"{name}.json").write_text(json.dumps(values))


def test_same_as_the_gguf(directory: Path, tokenizer: Tokenizer) -> None:
    loaded = load_tokenizer(directory)
    text = "Count: 1, 2,  33<|im_end|>\n🦉"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.encode(text, parse_special=False) == tokenizer.encode(text, parse_special=False)
    assert (loaded.bos_id, loaded.eos_ids, loaded.vocab_size) == (1, {2}, 49152)
    assert loaded.special_tokens == tokenizer.special_tokens
    assert all(loaded.token_bytes(i) == tokenizer.token_bytes(i) for i in range(49152))


@pytest.mark.slow
def test_bos_by_config_or_by_post_processor(directory: Path) -> None:
    assert load_tokenizer(directory).encode("hi") == [6004]
    write(directory, "tokenizer_config", bos_token="<|im_start|>", add_bos_token=True)
    assert load_tokenizer(directory).encode("hi") == [1, 6004]
    write(directory, "tokenizer_config", bos_token="<|im_start|>")
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    backend.enable_truncation(1)
    backend.save(str(directory / "tokenizer.json"))
    assert load_tokenizer(directory).encode("hi hi") == [1, 6004, 15876]


@pytest.mark.slow
def test_eos_from_generation_config(directory: Path) -> None:
    write(directory, "generation_config", eos_token_id=[2, 30])
    assert load_tokenizer(directory).eos_ids == {2, 30}
    write(directory, "generation_config", eos_token_id=0)
    loaded = load_tokenizer(directory)
    assert loaded.eos_ids == {0, 2}
    assert loaded.eos_token == "<|im_end|>"  # the tokenizer's own, as transformers gives it to chat templates


def test_chat_template_places(directory: Path) -> None:
    assert load_text(str(directory)).chat_template is None
    named = [{"name": "tools", "template": "T"}, {"name": "default", "template": "{{ bos_token }}D"}]
    write(directory, "tokenizer_config", bos_token="<|im_start|>", chat_template=named)
    chat = load_text(str(directory)).chat_template
    assert chat is not None
    assert chat.render([{"role": "user", "content": "x"}]) == "<|im_start|>D"
    (directory / "chat_template.jinja").write_text("file")
    chat = load_text(str(directory)).chat_template
    assert chat is not None
    assert chat.render([{"role": "user", "content": "x"}]) == "file"


def test_missing_or_broken_files(directory: Path, tmp_path: Path) -> None:
    (directory / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelFileError, match=r"tokenizer_config\.json"):
        load_tokenizer(directory)
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        load_tokenizer(directory)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ModelFileError, match=r"no tokenizer\.json"):
        load_tokenizer(directory)


def metaspace(path: Path, scheme: str) -> Tokenizer:
    """A SentencePiece-like tokenizer with a control token that swallows blanks on its right."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Metaspace()
    specials = ["<unk>", "<s>", "</s>", *[f"<0x{b:02X}>" for b in range(256)]]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=specials, show_progress=False)
    backend.train_from_iterator(["one two three four", "two three\n four five"] * 5, trainer)
    backend.add_special_tokens([AddedToken("<|end|>", rstrip=True, normalized=False, special=True)])
    state = json.loads(backend.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if not t["content"].startswith("<0x")]
    (path / "tokenizer.json").write_text(json.dumps(state))
    write(path, "tokenizer_config", bos_token="<s>", eos_token="</s>")
    return load_tokenizer(path)


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_prefix_spaces_and_swallowed_blanks_in_pieces(tmp_path: Path, scheme: str) -> None:
    tokenizer = metaspace(tmp_path, scheme)
    for text in ("two three", "<s>two<|end|>\n  three</s> four", "one<|end|><|end|> x", " two", "", "é<s>é"):
        assert tokenizer.encode_pieces(tokenizer.split_special(text)) == tokenizer.encode_rendered(text), text
        assert tokenizer.min_tokens_of(text) <= len(tokenizer.encode(text))
    ids = tokenizer.encode("two<s>", parse_special=False)
    assert not any(map(tokenizer.is_special, ids))
    assert tokenizer.decode(ids).strip() == "two<s>"
