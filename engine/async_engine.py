"""The engine on a thread of its own, for asyncio callers."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from engine.engine import Engine
from engine.errors import EngineDeadError
from engine.kv.transfer import KVBlocks
from engine.types import EngineStats, FinishReason, GenerateRequest, TokenDelta

log = logging.getLogger(__name__)
T = TypeVar("T")

_STATS_EVERY_S = 0.05  # how old stats() may be while busy: a snapshot goes through all running sequences


class DeltaSink(Protocol):
    """Receives what the engine makes for the calls of one event loop, on that loop.

    Calls are known by the numbers that were given to AsyncEngine.open().
    """

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Where the two methods are called."""

    def on_step(self, arrived: Sequence[tuple[int, list[TokenDelta]]]) -> None:
        """What one step has made, by call; each call appears once. Also for calls that have just been aborted."""

    def on_error(self, call: int, error: Exception) -> None:
        """Nothing more comes for this call: its requests are refused, or the engine is dead."""


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """Where the deltas of some requests go. Equal to itself alone, which makes it a quick key."""

    sink: DeltaSink
    number: int


@dataclass(frozen=True, slots=True)
class _Add:
    requests: tuple[GenerateRequest, ...]
    call: _Call
    arrival_s: float


@dataclass(frozen=True, slots=True)
class _Abort:
    request_ids: tuple[str, ...]
    sink: DeltaSink | None


@dataclass(frozen=True, slots=True)
class _Work:
    """Something else for the step thread, between two steps."""

    work: Callable[[], Any]
    outcome: Future[Any]


_Command = _Add | _Abort | _Work | None  # None stops the thread


class AsyncEngine:
    """Steps `engine` on one thread; that thread alone touches it. Any number of loops may call.

    An exception in a step is an internal fault: every open request gets a terminal error delta, the engine
    is dead from then on (EngineDeadError), and check_health() says so.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine = engine
        self._clock = clock
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._calls: dict[str, _Call] = {}  # by request id; step thread only
        self._dead: BaseException | None = None
        self._busy_since: float | None = None  # start of the step in progress
        self._slowest_s = 0.0
        self._ended = False  # the step thread looks at no more commands; set before it refuses those that wait
        self._stats, self._stats_at = engine.stats(), clock()
        self._thread = threading.Thread(target=self._run, name="engine-step", daemon=True)
        self._thread.start()

    # -------------------------------------------------------------------------------------------- callers

    async def generate(self, requests: tuple[GenerateRequest, ...]) -> AsyncIterator[list[TokenDelta]]:
        """Run requests together; yields lists of their deltas, multiplexed, until each choice has ended.

        The library's own streaming call; the replica uses open(), which needs no task per call.

        All are accepted or none: the first refusal (InvalidRequestError, QueueFullError) is raised.
        Leaving the iterator early, for whatever reason, aborts what still runs.
        """
        sink = _QueueSink(asyncio.get_running_loop())
        unfinished = sum(request.sampling.n for request in requests)
        self.open(requests, sink, 0)
        try:
            while unfinished > 0:
                deltas = await sink.next()
                unfinished -= sum(delta.finish_reason is not None for delta in deltas)
                yield deltas
        finally:
            self.abort(*(request.request_id for request in requests), sink=sink)

    def open(self, requests: tuple[GenerateRequest, ...], sink: DeltaSink, call: int) -> None:
        """generate() without a task: deltas and refusals go to `sink`, with the number `call`. The caller ends it with
        abort(). Raises EngineDeadError."""
        if self._dead is not None:
            raise EngineDeadError("the engine has stopped after an internal fault")
        self._command(_Add(requests, _Call(sink, call), self._clock()))

    def abort(self, *request_ids: str, sink: DeltaSink | None = None) -> None:
        """Ends requests; with `sink`, only those that were accepted for it. Thread-safe, idempotent, returns at once;
        blocks are free before the next step."""
        self._commands.put(_Abort(request_ids, sink))

    async def pin(self, token_ids: Sequence[int], salt: str = "") -> int:
        """See Engine.pin(). For users of the library; the replica pins before the engine runs (engine.pins)."""
        return await self._between_steps(lambda: self.engine.pin(token_ids, salt))

    async def unpin(self, token_ids: Sequence[int], salt: str = "") -> None:
        """See Engine.unpin()."""
        await self._between_steps(lambda: self.engine.unpin(token_ids, salt))

    async def export_prefix(self, token_ids: Sequence[int], salt: str = "") -> KVBlocks:
        """See KVTransfer. Raises ConfigError where Engine.transfer() does. Steps wait while the blocks are copied."""
        return await self._between_steps(lambda: self.engine.transfer().export_prefix(token_ids, salt))

    async def import_prefix(self, blocks: KVBlocks) -> int:
        """See KVTransfer.import_prefix(); errors and waiting as of export_prefix()."""
        return await self._between_steps(lambda: self.engine.transfer().import_prefix(blocks))

    async def _between_steps(self, work: Callable[[], T]) -> T:
        """Have the step thread do something between two steps. Its exception is the caller's, not a fault of the
        engine. One that the caller no longer waits for may still be done. Raises EngineDeadError."""
        outcome: Future[T] = Future()
        self._command(_Work(work, outcome))
        return await asyncio.wrap_future(outcome)

    def _command(self, command: _Command) -> None:
        self._commands.put(command)
        if self._ended or not self._thread.is_alive():  # nobody would ever look at it
            self._refuse_commands()

    def stats(self) -> EngineStats:
        """At most 50 ms old while busy; exact when idle."""
        return self._stats

    def stalled_s(self) -> float:
        """How long the step in progress has been running; 0 when idle between steps."""
        since = self._busy_since
        return self._clock() - since if since is not None else 0.0

    @property
    def slowest_step_s(self) -> float:
        """How long the slowest step so far took."""
        return self._slowest_s

    def check_health(self) -> None:
        """Raises EngineDeadError when the step thread has died."""
        if self._dead is not None or not self._thread.is_alive():
            raise EngineDeadError(f"the engine has stopped: {self._dead}")
        self.engine.check_health()

    def close(self) -> None:
        """Ends open requests with an abort delta, then the thread, then the executor."""
        self._commands.put(None)
        self._thread.join()
        self.engine.close()

    # ---------------------------------------------------------------------------------------- step thread

    def _run(self) -> None:
        try:
            while self._run_commands():
                self._busy_since = self._clock()
                deltas = self.engine.step()
                self._slowest_s = max(self._slowest_s, self.stalled_s())
                self._busy_since = None
                self._refresh_stats()
                self._deliver(deltas)
            self._deliver(self.engine.abort_all(FinishReason.ABORT))
            self._ended = True
            self._refuse_commands()
        except BaseException as error:
            log.exception("engine step failed")
            self._dead = error
            self._busy_since = None
            self._end_after_fault()

    def _run_commands(self) -> bool:
        """Carry out waiting commands; sleep while there is neither command nor work. False: stop."""
        while True:
            try:
                command = self._commands.get(block=not self.engine.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            if isinstance(command, _Abort):
                self._abort_requests(command)
            elif isinstance(command, _Work):
                _run_work(command)
            else:
                self._add_requests(command)
            self._refresh_stats()

    def _refresh_stats(self) -> None:
        now = self._clock()
        if now - self._stats_at > _STATS_EVERY_S or not self.engine.has_work:
            self._stats, self._stats_at = self.engine.stats(), now

    def _add_requests(self, command: _Add) -> None:
        accepted = []
        try:
            for request in command.requests:
                self.engine.add(request, command.arrival_s)
                accepted.append(request.request_id)
        except Exception as error:
            for request_id in accepted:
                self.engine.abort(request_id)
            _fail(command.call, error)
            return
        self._calls.update(dict.fromkeys(accepted, command.call))

    def _abort_requests(self, command: _Abort) -> None:
        for request_id in command.request_ids:
            call = self._calls.get(request_id)
            # A call that was refused, for using the id of another one perhaps, has nothing to end.
            if call is not None and command.sink in (None, call.sink):
                self.engine.abort(request_id)
                del self._calls[request_id]

    def _deliver(self, deltas: list[TokenDelta]) -> None:
        """Hand deltas to their sinks, in one call per event loop and step: each call costs a system call."""
        by_call: dict[_Call, list[TokenDelta]] = {}
        for delta in deltas:
            if (call := self._calls.get(delta.request_id)) is not None:
                by_call.setdefault(call, []).append(delta)
        by_sink: dict[DeltaSink, list[tuple[int, list[TokenDelta]]]] = {}
        for call, arrived in by_call.items():
            by_sink.setdefault(call.sink, []).append((call.number, arrived))
        for sink, calls in by_sink.items():
            _call_soon(sink.loop, sink.on_step, calls)

    def _end_after_fault(self) -> None:
        """After a fault: end every stream, then refuse whatever still arrives."""
        try:
            self._deliver(self.engine.abort_all(FinishReason.ERROR, "internal error"))
        except Exception:
            for call in set(self._calls.values()):
                _fail(call, EngineDeadError("the engine has stopped after an internal fault"))
        while (command := self._commands.get()) is not None:
            _refuse(command)
        self._ended = True
        self._refuse_commands()

    def _refuse_commands(self) -> None:
        """Answer the commands that nobody will carry out any more. Any thread may call it."""
        with suppress(queue.Empty):
            while True:
                _refuse(self._commands.get_nowait())


def _run_work(command: _Work) -> None:
    if command.outcome.set_running_or_notify_cancel():
        try:
            command.outcome.set_result(command.work())
        except Exception as error:
            command.outcome.set_exception(error)


def _refuse(command: _Command) -> None:
    error = EngineDeadError("the engine has stopped")
    if isinstance(command, _Add):
        _fail(command.call, error)
    elif isinstance(command, _Work) and command.outcome.set_running_or_notify_cancel():
        command.outcome.set_exception(error)


def _fail(call: _Call, error: Exception) -> None:
    _call_soon(call.sink.loop, call.sink.on_error, call.number, error)


def _call_soon(loop: asyncio.AbstractEventLoop, method: Callable[..., None], *args: object) -> None:
    try:
        loop.call_soon_threadsafe(method, *args)
    except RuntimeError:  # the caller's loop is closed: nobody is listening any more
        log.debug("a call's event loop is closed")


class _QueueSink:
    """The sink of generate(): one call, whose deltas wait until they are asked for."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._queue: asyncio.Queue[list[TokenDelta] | Exception] = asyncio.Queue()

    async def next(self) -> list[TokenDelta]:
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        return item

    def on_step(self, arrived: Sequence[tuple[int, list[TokenDelta]]]) -> None:
        for _, deltas in arrived:
            self._queue.put_nowait(deltas)

    def on_error(self, call: int, error: Exception) -> None:
        self._queue.put_nowait(error)
