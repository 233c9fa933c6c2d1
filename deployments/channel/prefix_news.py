"""What is in a replica's prefix cache, as the changes from one look to the next."""

from __future__ import annotations

from collections.abc import Iterable

KEY_BYTES = 8  # of a block's digest: enough to tell blocks apart, and wrong at worst about one choice of a replica


class PrefixNews:
    """Keys travel joined: `all` of the last look, and what update() gives."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()

    @property
    def all(self) -> bytes:
        return b"".join(self._keys)

    def update(self, digests: Iterable[bytes]) -> tuple[bytes, bytes] | None:
        """What has come and what has gone since the last time; None: nothing."""
        now = {digest[:KEY_BYTES] for digest in digests}
        if now == self._keys:
            return None
        news = (b"".join(now - self._keys), b"".join(self._keys - now))
        self._keys = now
        return news


def split(joined: bytes) -> list[bytes]:
    """Raises ValueError for what is no string of keys."""
    if len(joined) % KEY_BYTES:
        raise ValueError("not a string of keys")
    return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]
