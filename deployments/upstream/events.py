"""Server-sent events out of bytes, however they were cut."""

from __future__ import annotations

from collections.abc import AsyncIterator

from deployments.upstream.errors import UpstreamDownError

_MAX_BYTES = 4 * 2**20  # of one event


async def payloads(chunks: AsyncIterator[bytes]) -> AsyncIterator[list[bytes]]:
    """The data of each event, of all together that end in the same chunk; a last event that was not ended is dropped.
    Raises UpstreamDownError for one that is too large."""
    rest = b""
    data: list[bytes] = []
    async for chunk in chunks:
        *lines, rest = (rest + chunk).replace(b"\r\n", b"\n").split(b"\n")
        ended: list[bytes] = []
        for line in lines:
            if not line:
                if data:
                    ended.append(b"\n".join(data))
                    data = []
            elif line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
        if ended:
            yield ended
        if len(rest) + sum(map(len, data)) > _MAX_BYTES:
            raise UpstreamDownError(f"an event of more than {_MAX_BYTES} bytes")
