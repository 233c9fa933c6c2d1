"""engine_bench kv_quality --calibrate FILE."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers_models import make_gguf

from engine.kv.scales import read_scales
from load_tests.engine_bench.__main__ import main

torch.set_num_threads(1)


def test_writes_a_file_that_an_engine_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "scales.json"
    model = str(make_gguf(tmp_path))
    assert main(["kv_quality", model, "--calibrate", str(file)]) == 0
    assert "from 255 tokens" in capsys.readouterr().err  # the context is 256
    scales = read_scales(file, 2)
    assert all(0.1 < x < 100 for x in (*scales.keys, *scales.values))


def test_goes_with_kv_quality_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decode", "absent", "--calibrate", str(tmp_path / "s")]) == 2
    assert "--calibrate goes with kv_quality, not decode" in capsys.readouterr().err
    assert main(["kv_quality", str(tmp_path / "absent.gguf"), "--calibrate", str(tmp_path / "s")]) == 2
