"""Runs a scenario against an endpoint.

The open loop sends each request when it is due, whatever became of the others: no waiting, no limit on how many are
under way but that of open files, which is raised as far as the system allows. A latency counts from when its request
was due. So a server that stalls for a second is charged for every request of that second (no coordinated omission),
and so is a generator that comes late; how late it was is part of the result.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from load_tests.arrivals import Closed
from load_tests.calibrate import calibrate, first_model
from load_tests.client import Endpoint
from load_tests.outcome import RequestOutcome
from load_tests.prompts import Form, PromptWriter
from load_tests.scenario import Phase, Scenario
from load_tests.workload import Job, jobs, rows_of

_TICK_S = 1.0


@dataclass(slots=True)
class PhaseRun:
    """Times of time.perf_counter(). `end`: when the next phase began, or the last answer came."""

    name: str
    measured: bool
    start: float
    end: float = 0.0


@dataclass(slots=True)
class Run:
    """A scenario under way, and afterwards its result; `outcomes` are in the order in which they ended. `cpu_s`: what
    this process spent on it."""

    scenario: Scenario
    base_url: str
    model: str
    form: Form
    started_at: float  # time.time()
    phases: list[PhaseRun] = field(default_factory=list)
    outcomes: list[RequestOutcome] = field(default_factory=list)
    num_sent: int = 0
    num_planned: int | None = None
    cpu_s: float = 0.0


Progress = Callable[[Run], None]


@dataclass(frozen=True, slots=True)
class Target:
    """`model` None takes the first the server lists. `keep_alive` False connects anew for each request."""

    base_url: str
    model: str | None = None
    api_key: str | None = None
    keep_alive: bool = True


async def run(scenario: Scenario, target: Target, progress: Progress) -> Run:
    """Calls `progress` before the load and every second; a caller that is interrupted has the run so far from there.
    Raises LoadError before any load when the scenario or the endpoint cannot be used."""
    rows = [rows_of(phase) for phase in scenario.phases]
    endpoint = Endpoint(
        target.base_url,
        model=target.model or "",
        api_key=target.api_key,
        kind=scenario.endpoint,
        body=scenario.body,
        timeout_s=scenario.timeout_s,
        keep_alive=target.keep_alive,
    )
    try:
        endpoint.model = endpoint.model or await first_model(endpoint)
        wanted = "text" if scenario.needs_text else scenario.prompt_form
        form = await calibrate(endpoint, wanted, scenario.ignore_eos)
        current = Run(scenario, endpoint.base_url, endpoint.model, form, time.time())
        loads = [_Load(i, phase, jobs(phase, scenario.seed, rows[i])) for i, phase in enumerate(scenario.phases)]
        await _Runner(endpoint, PromptWriter(form, scenario.seed), current).run(loads, progress)
        return current
    finally:
        endpoint.close()


@dataclass(slots=True)
class _Load:
    index: int
    phase: Phase
    jobs: Iterator[Job]


class _Runner:
    def __init__(self, endpoint: Endpoint, writer: PromptWriter, current: Run) -> None:
        self._endpoint = endpoint
        self._writer = writer
        self._run = current
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, loads: Sequence[_Load], progress: Progress) -> None:
        # Written beforehand: nothing but sending is left to do when a request is due. About 6 bytes a token.
        ready = {load.index: self._written(load) for load in loads if load.phase.is_open}
        counts = [len(ready[load.index]) if load.phase.is_open else load.phase.requests for load in loads]
        single = all(load.phase.conversations is None for load in loads)
        self._run.num_planned = sum(c for c in counts if c is not None) if single and None not in counts else None
        raise_open_files_limit()
        progress(self._run)
        gc.collect()
        gc.freeze()  # the prepared requests are no work for the collector while it counts
        cpu = time.process_time()
        ticker = asyncio.create_task(self._tick(progress))
        try:
            start = time.perf_counter()
            for load in loads:
                start = await self._phase(load, ready.pop(load.index, []), start)
            await self._drain()
        finally:
            ticker.cancel()
            for task in self._tasks:
                task.cancel()
            self._run.cpu_s = time.process_time() - cpu
            for phase in self._run.phases:
                phase.end = phase.end or time.perf_counter()
            gc.unfreeze()

    def _written(self, load: _Load) -> list[tuple[Job, bytes]]:
        return [(job, self._first_request(job)) for job in load.jobs]

    async def _phase(self, load: _Load, ready: Sequence[tuple[Job, bytes]], start: float) -> float:
        """Returns when the next phase starts."""
        window = PhaseRun(load.phase.name, load.phase.measured, start)
        self._run.phases.append(window)
        last = load.index == len(self._run.scenario.phases) - 1
        if load.phase.is_open:
            end = await self._open(load, ready, start)
            if load.phase.drain or last:
                await self._drain()
                end = max(end, time.perf_counter())
            else:
                await asyncio.sleep(max(0.0, end - time.perf_counter()))
        else:
            await self._closed(load, start)
            end = time.perf_counter()
        window.end = end
        return end

    async def _open(self, load: _Load, ready: Sequence[tuple[Job, bytes]], start: float) -> float:
        """Returns when the phase is over by its own clock."""
        due = start
        for job, request in ready:
            assert job.at_s is not None
            due = start + job.at_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            self._spawn(self._job(load, job, request, due))
        return due if load.phase.duration_s is None else start + load.phase.duration_s

    async def _closed(self, load: _Load, start: float) -> None:
        arrivals, duration_s = load.phase.arrivals, load.phase.duration_s
        assert isinstance(arrivals, Closed)
        until = float("inf") if duration_s is None else start + duration_s

        async def user() -> None:
            for job in load.jobs:
                request = self._first_request(job)
                await self._job(load, job, request, time.perf_counter())
                if time.perf_counter() >= until:
                    return

        users = arrivals.concurrency if load.phase.requests is None else min(arrivals.concurrency, load.phase.requests)
        async with asyncio.TaskGroup() as group:
            for _ in range(users):
                group.create_task(user())

    async def _job(self, load: _Load, job: Job, request: bytes, due: float) -> None:
        said: list[tuple[str, str]] = []  # (role, content)
        for number, turn in enumerate(job.turns):
            if number:
                said.append(("user", self._writer.text(turn.segments)))
                request = self._endpoint.prepare(self._conversation(said), turn.output_tokens)
                due += turn.pause_s
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
            outcome = RequestOutcome(due, phase=load.index, turn=number)
            more = number + 1 < len(job.turns)
            if more:
                outcome.text = []
            self._run.num_sent += 1
            await self._endpoint.send(request, outcome)
            self._run.outcomes.append(outcome)
            if outcome.error is not None or not more:
                return
            if not number:
                said.append(("user", self._writer.text(turn.segments)))
            said.append(("assistant", "".join(outcome.text or ())))
            outcome.text = None
            due = outcome.end

    def _first_request(self, job: Job) -> bytes:
        turn = job.turns[0]
        if self._endpoint.kind == "chat":
            prompt = self._conversation([("user", self._writer.text(turn.segments))])
        else:
            prompt = self._writer.json(turn.segments)
        return self._endpoint.prepare(prompt, turn.output_tokens)

    def _conversation(self, said: Sequence[tuple[str, str]]) -> bytes:
        if self._endpoint.kind == "chat":
            return orjson.dumps([{"role": role, "content": content} for role, content in said])
        return orjson.dumps("\n".join(content for _, content in said))

    def _spawn(self, job: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drain(self) -> None:
        while self._tasks:
            await asyncio.gather(*self._tasks)

    async def _tick(self, progress: Progress) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            progress(self._run)


def raise_open_files_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
