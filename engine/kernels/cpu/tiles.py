"""Whether the processor's matrix tiles (AMX) can be relied on here."""

from __future__ import annotations

import ctypes
import logging
import subprocess
import sys
from functools import cache

logger = logging.getLogger(__name__)

_CHECK = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).sluice_tiles_check())"
_TIMEOUT_S = 30
_ALLOWED, _REFUSED, _NONE = range(3)  # what sluice_tiles_allow() answers


@cache
def usable(lib: ctypes.CDLL) -> bool:
    """Asks the kernel for them, which holds for this process from then on, and has another process try them: if
    they give wrong numbers or kill it, one line is logged and they stay unused."""
    allowed = lib.sluice_tiles_allow()
    if allowed == _NONE:
        return False
    found = "the kernel refuses them" if allowed == _REFUSED else _trouble(lib._name)
    if found:
        logger.warning("the processor's matrix tiles stay unused (slower): %s", found)
    return not found


def _trouble(library: str) -> str:
    """Why a process that tried them did not succeed; empty if it did."""
    try:
        done = subprocess.run([sys.executable, "-I", "-S", "-c", _CHECK, library], timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"they could not be tried: {error}"
    return f"a process that tried them ended with {done.returncode}" if done.returncode else ""
