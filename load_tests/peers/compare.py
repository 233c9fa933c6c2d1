"""The rounds: one server at a time, everything that is missing measured on it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from deployments.cli.local_ray import free_port
from engine.errors import EngineError
from load_tests.errors import LoadError
from load_tests.machine import busy_cores
from load_tests.peers.base import FOLDERS, PEERS, Models, Peer, Say
from load_tests.peers.demo import prepare_models
from load_tests.peers.measure import Measurement, measure
from load_tests.peers.server import running
from load_tests.peers.store import PeerRow, Store
from load_tests.peers.workloads import PeerWorkload


class PeerRounds:
    """`cache` holds the engines and the converted models. What fails for one engine is a row of the store, and the
    others go on."""

    def __init__(self, cache: Path, store: Store, workloads: Sequence[PeerWorkload], say: Say) -> None:
        self._cache = cache
        self._store = store
        self._workloads = workloads
        self._say = say

    def prepare(self, names: Sequence[str]) -> tuple[Models, dict[str, Peer]]:
        """The models and those of the engines that could be installed. Raises LoadError."""
        try:
            models = prepare_models(self._cache, self._say)
        except EngineError as error:
            raise LoadError(f"the demo model: {error}") from None
        ready = {}
        for name in names:
            peer = PEERS.get(name)(self._cache / FOLDERS.get(name, name))
            try:
                peer.prepare(models, partial(self._say_of, name))
                ready[name] = peer
            except LoadError as error:
                self._failed(name, "", 1, str(error))
        return models, ready

    def run(self, models: Models, peers: dict[str, Peer], rounds: int) -> None:
        todo = [
            (number, name, missing)
            for number in range(1, rounds + 1)
            for name, peer in peers.items()
            if (missing := self._missing(name, peer, number))
        ]
        took: dict[str, float] = {}
        for i, (number, name, missing) in enumerate(todo):
            left = sum(took.get(n, peers[n].round_s * len(m) / 4) for _, n, m in todo[i:])
            self._say(f"== round {number} of {rounds}, {name}; about {left / 60:.0f} min left")
            began = time.monotonic()
            self._serve_and_measure(name, peers[name], models, number, missing)
            took[name] = time.monotonic() - began

    def _say_of(self, name: str, text: str) -> None:
        self._say(f"{name}: {text}")

    def _missing(self, name: str, peer: Peer, number: int) -> list[PeerWorkload]:
        fits = [w for w in self._workloads if peer.most is None or w.concurrency <= peer.most]
        return [w for w in fits if not self._store.has(name, w.name, number)]

    def _serve_and_measure(
        self, name: str, peer: Peer, models: Models, number: int, workloads: Sequence[PeerWorkload]
    ) -> None:
        version, busy, began = peer.version(), busy_cores(), time.time()
        port = free_port()
        launch = peer.launch(models, port)
        log = self._cache / "logs" / f"{name}.log"
        try:
            with running(launch, port, log) as url:
                start_s = round(time.time() - began, 1)
                self._say(f"{name} {version} is up after {start_s:.0f} s")
                for workload in workloads:
                    at = time.time()
                    try:
                        got = measure(workload, number, url, launch.model, peer.keep_alive)
                    except LoadError as error:
                        self._failed(name, workload.name, number, str(error), version)
                        continue
                    self._store.add(PeerRow(name, version, workload.name, number, at, busy, start_s, measurement=got))
                    self._say(f"{name} {workload.name}: {_line(got)}")
        except LoadError as error:
            self._failed(name, "", number, f"did not start: {error}", version)

    def _failed(self, name: str, workload: str, number: int, why: str, version: str = "") -> None:
        """`workload` empty: none could be measured."""
        self._say(f"{name}{f' {workload}' if workload else ''}: {why}")
        self._store.add(PeerRow(name, version, workload, number, time.time(), 0.0, error=why))


def _line(got: Measurement) -> str:
    text = f"{got.output_tokens_per_s:.1f} tokens/s, ttft {got.ttft_ms:.0f} ms, itl {got.itl_ms:.1f} ms"
    return text + (f", FAILED {got.errors}" if got.errors else "")
