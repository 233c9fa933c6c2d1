from __future__ import annotations

import json
from pathlib import Path

from deployments.observe.access_log import AccessLog
from deployments.observe.request_log import RequestTrace
from engine.types import Timings


def test_one_json_line_per_request_at_once(tmp_path: Path) -> None:
    journal = AccessLog(tmp_path / "logs", "abc", clock=lambda: 12.5)
    for i in range(2):
        trace = RequestTrace(i, f"req_{i}", "POST", "/v1/completions", 1.0, 1.0, 200, finish_reasons=("stop",))
        trace.timings = Timings(queue_s=0.25)
        journal.write(trace.record(now_s=3.0))
    lines = [json.loads(line) for line in (tmp_path / "logs" / "requests_abc.log").read_text().splitlines()]
    assert [line["request_id"] for line in lines] == ["req_0", "req_1"]
    assert lines[0]["time"] == 12.5 and lines[0]["queue_s"] == 0.25 and lines[0]["finish_reasons"] == ["stop"]
    journal.close()
