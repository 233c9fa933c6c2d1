"""Where the time of a piece of work goes, by timing wrappers around methods."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from load_tests.engine_bench.patch import Method, replaced


class Timers:
    """`kinds`: method -> the kind of work it is. `seconds` and `calls` are by kind; a timed call within another counts
    for its own kind only. The wrappers cost time themselves (about half a microsecond a call), outside of what they
    measure except where timed calls nest."""

    def __init__(self, kinds: Mapping[Method, str]) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._kinds = dict(kinds)
        self._threads = threading.local()  # an engine may overlap scheduling with the forward pass

    @contextmanager
    def on(self) -> Iterator[None]:
        with replaced(list(self._kinds), self._timed):
            yield

    def take(self) -> tuple[Counter[str], Counter[str]]:
        """(seconds, calls) since the last take."""
        taken = self.seconds, self.calls
        self.seconds, self.calls = Counter(), Counter()
        return taken

    def _timed(self, method: Method, original: Callable[..., Any]) -> Callable[..., Any]:
        kind = self._kinds[method]
        threads, clock = self._threads, time.perf_counter

        def call(*args: Any, **kwargs: Any) -> Any:
            outer = getattr(threads, "inner", 0.0)
            threads.inner = 0.0  # seconds of timed calls within this one
            start = clock()
            try:
                return original(*args, **kwargs)
            finally:
                elapsed = clock() - start
                self.seconds[kind] += elapsed - threads.inner
                self.calls[kind] += 1
                threads.inner = outer + elapsed

        return call
