"""Server-sent events out of bytes, however they were cut."""

from __future__ import annotations

from collections.abc import AsyncIterator

from deployments.upstream.errors import UpstreamDownError

_MAX_BYTES = 4 * 2**20  # of one event


async def payloads(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each event; a last event that was not ended is dropped. Raises UpstreamDownError for one that is too
    large."""
    rest = b""
    data: list[bytes] = []
    async for chunk in chunks:
        *lines, rest = (rest + chunk).replace(b"\r\n", b"\n").split(b"\n")
        for line in lines:
            if not line:
                if data:
                    yield b"\n".join(data)
                    data = []
            elif line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
        if len(rest) + sum(map(len, data)) > _MAX_BYTES:
            raise UpstreamDownError(f"an event of more than {_MAX_BYTES} bytes")
