from __future__ import annotations

import pytest

from load_tests.worst_bodies import main


def test_no_body_costs_much_memory_or_ends_in_a_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert len(rows) > 15
    for name, _, _, mib, outcome in rows:
        assert float(mib) < 256, name
        assert outcome.startswith(("accepted", "400", "413")), (name, outcome)
