"""Block rows in a file that goes with the process."""

from __future__ import annotations

import mmap
import os
import tempfile

import numpy as np

from engine.errors import ConfigError


def rows_on_disk(folder: str | None, num_rows: int, width: int) -> np.ndarray:
    """uint8 [num_rows, width] in one file in `folder` (None: the system's for temporary files), all of it allocated
    now. The file has no name any more, so that nothing is left of it however the process ends. Raises ConfigError."""
    place, size = folder or tempfile.gettempdir(), num_rows * width
    try:
        fd, path = tempfile.mkstemp(prefix="sluicegate-kv-", dir=place)
        try:
            os.unlink(path)
            os.posix_fallocate(fd, 0, size)
            mapped = mmap.mmap(fd, size)
        finally:
            os.close(fd)
    except OSError as error:
        raise ConfigError(f"disk_kv_cache_dir {place!r} cannot hold {size} bytes: {error.strerror or error}") from None
    return np.frombuffer(mapped, dtype=np.uint8).reshape(num_rows, width)
