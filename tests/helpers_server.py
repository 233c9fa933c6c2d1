"""`sluice serve` as a user starts it, and what a user can see of it: HTTP, its output, its processes, its metrics."""

from __future__ import annotations

import contextlib
import http.client as http_client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from deployments.cli.local_ray import free_port
from deployments.cli.processes import command, descendants
from load_tests.processes import end_with_parent

ROOT = Path(__file__).parents[1]
MODEL = "smollm2-135m-instruct"
KEY = "sk-demo-sluicegate"
ADMIN = f"gateway.api_keys=[{{key: {KEY}, scopes: [models.read, inference, admin]}}]"  # a setting
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WAIT_S = 120.0  # generous: a busy machine must not fail a test
RUNNING, WAITING, USABLE = "sluicegate_requests_running", "sluicegate_requests_waiting", "sluicegate_usable_replicas"
# Answers do not wait for the successor of the only replica.
NO_WAIT = (
    "applications.0.deployments=[{name: ModelRouter, user_config: {routes: {smollm2-135m-instruct: "
    "{pools: [smollm2-135m-instruct], resume_within_s: 0}}}}]"
)
COUNT = "Count: 1, 2, 3, 4,"
COUNT_24 = " 5, 6, 7, 8, 9, 10, 11, "
SLUICE = [sys.executable, "-c", "from deployments.cli.main import main; raise SystemExit(main())"]


def count(**changes: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": COUNT, "max_tokens": 24, "temperature": 0, **changes}


def endless(**changes: Any) -> dict[str, Any]:
    """A stream that is still running whenever a test wants to break it."""
    return count(max_tokens=6000, ignore_eos=True, stream=True, **changes)


def until(condition: Callable[[], Any], what: str, wait_s: float = WAIT_S) -> Any:
    """The condition's first true value."""
    deadline = time.monotonic() + wait_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"after {wait_s:.0f} s still no {what}"
        time.sleep(0.06)
    return value


@dataclass(frozen=True, slots=True)
class Early:
    """An answer from the time before the server called itself ready. `status` 0: nobody listened yet."""

    path: str
    status: int
    retry_after: str | None = None
    text: str = ""


def run_beside(program: str) -> subprocess.CompletedProcess[str]:
    """A program in tests/integration, in a process of its own: Ray's switches are set once per process."""
    argv = [sys.executable, str(ROOT / "tests" / "integration" / program)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=5 * WAIT_S, check=False)


@dataclass
class Server:
    """One `sluice serve` process, its port and its output. Made by start(). `replicas`, in all its pools, and
    `gateways`: how many there are whenever nothing is being replaced."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    replicas: int = 1
    gateways: int = 1
    early: list[Early] = field(default_factory=list)

    @classmethod
    def start(cls, log: Path, *settings: str, config: str = "cluster_configs/local-cpu.yaml") -> Server:
        """`settings`: as for --set, or NAME=VALUE for the environment."""
        port = free_port()
        environment = dict(setting.split("=", 1) for setting in settings if setting.partition("=")[0].isupper())
        changes = [setting for setting in settings if setting.partition("=")[0] not in environment]
        sets = [part for change in changes for part in ("--set", change)]
        command = [*SLUICE, "serve", "--config", config, "--port", str(port), *sets]
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | environment,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        numbers = dict(setting.split("=", 1) for setting in settings)
        server = cls(process, port, log, int(numbers.get("replicas", 1)), int(numbers.get("gateway_replicas", 1)))
        try:
            server._watch_it_start()
        except BaseException:
            server.end()
            raise
        return server

    @classmethod
    @contextlib.contextmanager
    def running(cls, log: Path, *settings: str, config: str = "cluster_configs/local-cpu.yaml") -> Iterator[Server]:
        """One that is told to stop at the end, and made to if need be."""
        server = cls.start(log, *settings, config=config)
        try:
            yield server
        finally:
            server.end()

    def _watch_it_start(self) -> None:
        seen_ready = False
        with self.http() as http:
            while not seen_ready or not any(line.startswith("ready ") for line in self.output().splitlines()):
                assert self.process.poll() is None, f"it has ended: {self.output()}"
                if not seen_ready:
                    self._early(http, "GET", "/health/ready")
                    seen_ready = self.early[-1].status == 200
                    self._early(http, "POST", COMPLETIONS)
                time.sleep(0.1)

    def _early(self, http: httpx.Client, method: str, path: str) -> None:
        try:
            r = http.request(method, path, json=count() if method == "POST" else None)
            self.early.append(Early(path, r.status_code, r.headers.get("retry-after"), r.text))
        except httpx.TransportError:
            self.early.append(Early(path, 0))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def output(self) -> str:
        return self.log.read_text()

    def http(self, key: str = KEY) -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=WAIT_S, trust_env=False)

    def sdk(self, key: str = KEY) -> openai.OpenAI:
        http = httpx.Client(trust_env=False)
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=WAIT_S, http_client=http)

    def metrics(self) -> Metrics:
        with self.http() as http:
            return Metrics(http.get("/metrics").raise_for_status().text)

    def all_metrics(self) -> Metrics | None:
        """None when there are none, or a process is left out: it is being replaced, or was too busy to answer."""
        with contextlib.suppress(httpx.HTTPError):
            m = self.metrics()
            if (len(m.by_replica(RUNNING)), len(m.by_replica(USABLE))) == (self.replicas, self.gateways):
                return m
        return None

    def until_known(self, replicas: int | None = None) -> Metrics:
        """Waits until all its processes are there, and each gateway would send requests to that many replicas, by
        default to all: a server calls itself ready when one replica is known."""
        wanted = self.gateways * (self.replicas if replicas is None else replicas)

        def look() -> Metrics | None:
            return m if (m := self.all_metrics()) is not None and m.total(USABLE) == wanted else None

        found: Metrics = until(look, f"{wanted} replicas known to {self.gateways} gateways")
        return found

    def until_idle(self) -> Metrics:
        """Waits until all engines run nothing and hold no block. Looks twice: a look may be 50 ms old."""
        idle = 0

        def look() -> Metrics | None:
            nonlocal idle
            m = self.all_metrics()
            idle = idle + 1 if m and not any(m.total(name) for name in (RUNNING, WAITING, "sluicegate_kv_usage")) else 0
            return m if idle >= 2 else None

        found: Metrics = until(look, "idle engine")
        return found

    def tokens_in(self, seconds: float, at_least: int) -> int:
        """About as many as one stream gets in that time if it is alone, within what a context has room for."""
        began = time.monotonic()
        with self.http() as http:
            http.post(COMPLETIONS, json=count(max_tokens=64, ignore_eos=True)).raise_for_status()
        return min(6000, max(at_least, int(seconds * 64 / (time.monotonic() - began))))

    def processes(self, title: str = "") -> list[int]:
        """Its living descendants whose command line contains `title`."""
        return [pid for pid in descendants(self.process.pid) if title in command(pid)]

    @staticmethod
    def command(pid: int) -> str:
        """The command line of a process; empty when it has ended."""
        return command(pid)

    def kill_one(self, title: str) -> None:
        [pid] = self.processes(title)
        os.kill(pid, signal.SIGKILL)

    @contextlib.contextmanager
    def no_replacements(self) -> Iterator[None]:
        """What dies meanwhile stays away: the controller of Serve, which would start another, is stopped."""
        controllers = self.processes("ServeController")
        assert controllers
        for pid in controllers:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in controllers:
                os.kill(pid, signal.SIGCONT)

    def ready(self) -> bool:
        with self.http() as http, contextlib.suppress(httpx.TransportError):
            return http.get("/health/ready").status_code == 200
        return False

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        self.terminate()
        self.kill()

    def wait(self) -> int:
        """The exit status, after the process has ended by itself."""
        return self.process.wait(WAIT_S)

    def kill(self) -> None:
        """For clean-up, also after terminate(): ends everything, in good order if that does not take too long."""
        for wait_s in (5.0, 30.0):  # the second signal does not wait for running requests
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(wait_s)
                return
            self.terminate()
        self.process.kill()
        self.process.wait()


class Metrics:
    """One scrape."""

    def __init__(self, text: str) -> None:
        self.samples = [s for family in text_string_to_metric_families(text) for s in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """The sum over all samples of that name with at least these labels."""
        return sum(self.by_replica(name, **labels).values())

    def by_replica(self, name: str, **labels: str) -> dict[str, float]:
        """The same, of each replica or gateway that has any."""
        found: dict[str, float] = {}
        for s in self.samples:
            if s.name == name and labels.items() <= s.labels.items():
                found[s.labels["replica"]] = found.get(s.labels["replica"], 0.0) + s.value
        return found


@contextlib.contextmanager
def asked(server: Server, body: dict[str, Any]) -> Iterator[None]:
    """A request whose client stays until the end of the block and then leaves, without having read anything."""
    connection = http_client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    with contextlib.closing(connection):
        connection.request("POST", COMPLETIONS, json.dumps(body), headers)
        yield


def events(response: httpx.Response) -> Iterator[str]:
    """The payloads of an event stream as they come. Comments are left out. Dropping the iterator closes the
    connection."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")
        else:
            assert line == "" or line.startswith(":"), line


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if command(pid)]
