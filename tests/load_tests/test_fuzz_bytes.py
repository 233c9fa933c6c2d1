"""Damaged bytes: a few hundred of each target here, ten thousand by the command."""

from __future__ import annotations

import pytest

from load_tests.fuzz_bytes import TARGETS, fuzz_all, main


@pytest.mark.sockets
@pytest.mark.parametrize("target", ["http", *TARGETS])
async def test_damaged_bytes_are_refused_as_declared(target: str) -> None:
    assert await fuzz_all([target], cases=300, seed=1, only=None) == []


def test_an_unknown_target_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["gif"])
    assert "unknown target 'gif'; known: http, events" in capsys.readouterr().err
