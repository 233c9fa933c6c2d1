from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import ray

from deployments.cli import processes
from deployments.cli.local_ray import LocalRay, StartError, lock, remove_stale
from deployments.ray_serve import haproxy
from deployments.ray_serve.way_in import SWITCH, WayIn

pytestmark = pytest.mark.sockets


class FailingRay:
    """ray.init() that fails at first, as often as told, the way Ray does."""

    def __init__(self, failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failures = failures
        self.settings: list[dict[str, Any]] = []
        self.ended = 0
        monkeypatch.setattr(ray, "init", self._init)
        monkeypatch.setattr(ray, "shutdown", lambda: None)
        monkeypatch.setattr(processes, "end_all", self._end_all)

    def _init(self, **settings: Any) -> None:
        self.settings.append(settings)
        if len(self.settings) <= self.failures:
            raise Exception("The current node timed out during startup.\nMore on that")

    def _end_all(self, grace_s: float) -> None:
        self.ended += 1


def test_a_node_that_did_not_come_up_is_ended_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = FailingRay(1, monkeypatch)
    node = LocalRay(num_cpus=2)
    node.start()
    assert len(failing.settings) == 2 and failing.ended == 1
    assert failing.settings[1]["_metrics_export_port"] == node.metrics_port
    assert failing.settings[0]["_temp_dir"] == failing.settings[1]["_temp_dir"]
    node.stop(None)
    assert failing.ended == 2 and not Path(failing.settings[1]["_temp_dir"]).exists()


def test_one_that_never_comes_up_is_one_line_for_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = FailingRay(9, monkeypatch)
    node = LocalRay(num_cpus=2)
    with pytest.raises(StartError, match=r"^Ray did not start: The current node timed out during startup\.$"):
        node.start()
    assert len(failing.settings) == 2 and failing.ended == 2
    node.stop(None)
    assert not Path(failing.settings[0]["_temp_dir"]).exists()


def test_what_ray_starts_as_haproxy_is_our_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the user has set otherwise stays."""
    FailingRay(0, monkeypatch)
    environment = {haproxy.PROGRAM: "/opt/haproxy", "RAY_SERVE_HAPROXY_STATS_PORT": "8404"}
    monkeypatch.setattr(os, "environ", environment)
    node = LocalRay(2, "0.0.0.0", WayIn("asked for", "/opt/haproxy"))
    node.start()
    launcher = Path(environment[haproxy.PROGRAM])
    assert os.access(launcher, os.X_OK) and "/opt/haproxy 0.0.0.0 " in launcher.read_text()
    assert environment[SWITCH] == "1" and environment["RAY_SERVE_HAPROXY_STATS_PORT"] == "8404"
    node.stop(None)
    assert not launcher.exists()


def test_only_the_leavings_of_runs_that_are_gone_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of another container's, whose processes are not seen here."""
    unseen = 2**22 + 1  # above the largest number of a process
    gone, elsewhere, new, ours = (tmp_path / f"sluice-{pid}-x" for pid in (unseen, unseen + 1, unseen + 2, os.getpid()))
    for folder in (gone, elsewhere, new, ours):
        folder.mkdir()
    for folder in (gone, elsewhere, ours):
        os.utime(folder, (1.0, 1.0))
    held = lock(elsewhere)
    assert held is not None
    remove_stale(tmp_path)
    assert not gone.exists() and elsewhere.exists() and new.exists() and ours.exists()
    os.close(held)
    os.utime(elsewhere, (1.0, 1.0))
    remove_stale(tmp_path)
    assert not elsewhere.exists()
