"""Real servers, started when first needed, shared by the tests that follow, and started again after a test that stops
one. Those that only one file uses end with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers_server import Server

# A pool of 1536 tokens, chunks of 16, four at a time: what only happens under load happens at once.
_TIGHT = (
    "engine.num_kv_blocks=96",
    "engine.max_num_batched_tokens=16",
    "engine.max_num_seqs=4",
    "graceful_shutdown_timeout_s=2",
)


_LIMIT_S = 1200  # of a test with the start of its server: each of its waits may take two minutes on a busy machine
_KEPT = 2  # servers at a time: even an idle one costs a twentieth of a core and 2 GiB
_TRIES = 2  # of starting servers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(_LIMIT_S))


class _Servers:
    """By their settings, the last used last."""

    def __init__(self, logs: pytest.TempPathFactory) -> None:
        self._logs = logs.mktemp("servers")
        self._running: dict[tuple[str, ...], Server] = {}
        self._started = 0
        self._broken: list[BaseException] = []

    def get(self, *settings: str) -> Server:
        server = self._running.pop(settings, None)
        if server is None or server.process.poll() is not None:
            if len(self._broken) >= _TRIES:
                pytest.fail(f"servers have not started before: {self._broken[-1]}", pytrace=False)
            while len(self._running) >= _KEPT:
                self._running.pop(next(iter(self._running))).end()
            self._started += 1
            try:
                server = Server.start(self._logs / f"{self._started}.log", *settings)
            except BaseException as error:
                self._broken.append(error)
                raise
        self._running[settings] = server
        server.until_known()
        return server

    def stop(self, *but: tuple[str, ...]) -> None:
        """All but those with these settings."""
        ending = [self._running.pop(settings) for settings in list(self._running) if settings not in but]
        for server in ending:
            server.terminate()
        for server in ending:
            server.kill()


@pytest.fixture(scope="session")
def _servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Servers]:
    servers = _Servers(tmp_path_factory)
    yield servers
    servers.stop()


@pytest.fixture(scope="module", autouse=True)
def _ends_with_its_file(_servers: _Servers) -> Iterator[None]:
    yield
    _servers.stop((), _TIGHT)


@pytest.fixture
def server(_servers: _Servers) -> Server:
    """The demo model with the demo config."""
    return _servers.get()


@pytest.fixture
def serves_proxy(_servers: _Servers) -> Server:
    """The same behind Serve's own proxy, where HAProxy is not installed or not wanted."""
    return _servers.get("RAY_SERVE_ENABLE_HA_PROXY=0")


@pytest.fixture
def tight(_servers: _Servers) -> Server:
    """The same with hardly any room."""
    return _servers.get(*_TIGHT)
