"""Tells gateways which blocks a replica's prefix cache holds, by sending the changes since the last message."""

from __future__ import annotations

from collections.abc import Iterable

KEY_BYTES = 8  # of a block's digest are sent: if two are equal, one choice of a replica is less good


class PrefixNews:
    """The keys in one replica's prefix cache at the last update(). Keys are returned joined, KEY_BYTES each."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()

    @property
    def all(self) -> bytes:
        """All keys, joined."""
        return b"".join(self._keys)

    def update(self, digests: Iterable[bytes]) -> tuple[bytes, bytes] | None:
        """Takes all digests in the cache. Returns the joined keys added and removed since the last call, or None."""
        now = {digest[:KEY_BYTES] for digest in digests}
        if now == self._keys:
            return None
        news = (b"".join(now - self._keys), b"".join(self._keys - now))
        self._keys = now
        return news


def split(joined: bytes) -> list[bytes]:
    """Joined keys as a list. Raises ValueError when the length is no multiple of KEY_BYTES."""
    if len(joined) % KEY_BYTES:
        raise ValueError("not a string of keys")
    return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]
