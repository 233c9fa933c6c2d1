"""The request log: one JSON line per finished HTTP request, in a file of its own beside Serve's logs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from logging.handlers import RotatingFileHandler
from pathlib import Path

import orjson

from deployments.observe.request_log import RequestLog

_MAX_BYTES = 64 * 2**20  # of one file, before a new one is begun
_KEPT = 4  # old files


class AccessLog:
    """Appends to `directory`/requests_NAME.log; rotates at 64 MiB and keeps four old files.

    Not one of Serve's loggers: those wrap lines in their own format and may hold back a thousand of them.
    """

    def __init__(self, directory: Path, name: str, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        directory.mkdir(parents=True, exist_ok=True)
        self._file = RotatingFileHandler(directory / f"requests_{name}.log", maxBytes=_MAX_BYTES, backupCount=_KEPT)

    def write(self, record: RequestLog) -> None:
        """`time` is when the request ended, seconds since 1970."""
        line = orjson.dumps({"time": round(self._clock(), 3), **asdict(record)}).decode()
        self._file.emit(logging.LogRecord("requests", logging.INFO, "", 0, line, None, None))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
