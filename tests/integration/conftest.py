"""Real servers, started when first needed, shared by the tests that follow, and started again after a test that stops
one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers_server import Server

# A pool of 1536 tokens, chunks of 16, four at a time: what only happens under load happens at once.
_TIGHT = (
    "engine.num_kv_blocks=96",
    "engine.max_num_batched_tokens=16",
    "engine.max_num_seqs=4",
    "graceful_shutdown_timeout_s=2",
)


_KEPT = 2  # servers at a time: even an idle one costs a twentieth of a core and 2 GiB


class _Servers:
    """By their settings, the last used last."""

    def __init__(self, logs: pytest.TempPathFactory) -> None:
        self._logs = logs.mktemp("servers")
        self._running: dict[tuple[str, ...], Server] = {}
        self._started = 0
        self._broken: BaseException | None = None

    def get(self, *settings: str) -> Server:
        server = self._running.pop(settings, None)
        if server is None or server.process.poll() is not None:
            if self._broken is not None:
                pytest.fail(f"a server has not started before: {self._broken}", pytrace=False)
            while len(self._running) >= _KEPT:
                self._running.pop(next(iter(self._running))).end()
            self._started += 1
            try:
                server = Server.start(self._logs / f"{self._started}.log", *settings)
            except BaseException as error:
                self._broken = error
                raise
        self._running[settings] = server
        return server

    def stop(self) -> None:
        for server in self._running.values():
            server.terminate()
        for server in self._running.values():
            server.kill()


@pytest.fixture(scope="session")
def _servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Servers]:
    servers = _Servers(tmp_path_factory)
    yield servers
    servers.stop()


@pytest.fixture
def server(_servers: _Servers) -> Server:
    """The demo model with the demo config."""
    return _servers.get()


@pytest.fixture
def tight(_servers: _Servers) -> Server:
    """The same with hardly any room."""
    return _servers.get(*_TIGHT)
