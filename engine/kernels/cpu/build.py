"""The C++ kernels as a loaded library."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path

from engine import cpp_build

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "src"
# No contraction: the compiler must not choose where to fuse, or tile shapes would round differently.
FLAGS = ("-std=c++20", "-O3", "-march=native", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-pthread")


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, built if need be (seconds); None, after one warning, where they cannot be."""
    try:
        return load(FLAGS)
    except (cpp_build.BuildError, OSError) as error:
        logger.warning("the compiled CPU kernels are unavailable, torch runs instead (slower): %s", error)
        return None


def load(flags: tuple[str, ...]) -> ctypes.CDLL:
    """Build with `flags` or take the cached build. Raises BuildError or OSError."""
    return cpp_build.load("kernels", sorted(path for path in SOURCES.iterdir() if path.is_file()), flags)
