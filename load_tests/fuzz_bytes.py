"""python -m load_tests.fuzz_bytes: damaged bytes for everything that reads bytes of strangers.

Each target has good samples, which are cut, repeated, flipped and spliced, and numbers in them are replaced by extreme
ones. A reader may refuse, in the way that it declares; anything else that it raises, any answer of 500 or above, and
memory that grows without bound are faults. A case is told by its target, seed and number, and can be run again alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from deployments.channel.frames import FrameError, Reader, encode
from deployments.channel.messages import Kind, to_request, unpack_deltas
from deployments.upstream.answer import UpstreamAnswer
from deployments.upstream.errors import UpstreamError
from deployments.upstream.events import EventParser, EventTooLargeError
from engine.errors import ModelFileError
from engine.types import GenerateRequest, SamplingParams

_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**63 - 1, 2**63, 2**64 - 1)
_WORDS = (
    b"\r\n",
    b"\n\n",
    b"\r",
    b"\0",
    b"data:",
    b"\xef\xbb\xbf",
    b"{",
    b"[" * 100,
    b"\xff",
    b"9" * 40,
    b"-1",
    b"NaN",
)
_MAX_GROWTH_MIB = 300  # of the peak of resident memory, over all cases of a target


class Target(Protocol):
    """`run` gives damaged bytes to a reader and raises what is a fault."""

    @property
    def samples(self) -> Sequence[bytes]:
        """What is good."""

    async def run(self, data: bytes, rng: random.Random) -> None: ...


def damaged(sample: bytes, samples: Sequence[bytes], rng: random.Random) -> bytes:
    """One to six changes to a sample."""
    data = bytearray(sample)
    for _ in range(rng.randint(1, 6)):
        at = rng.randint(0, len(data))
        match rng.randrange(8):
            case 0:
                del data[at : at + rng.choice((1, 2, 4, 8, 100))]
            case 1 if data:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            case 2 if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
            case 3:
                number = rng.choice(_NUMBERS)
                form = rng.choice(("<I", ">I", "<Q", ">Q", "B"))
                size = struct.calcsize(form)
                data[at : at + size] = struct.pack(form, number & (256**size - 1))
            case 4:
                data[at:at] = rng.choice(_WORDS)
            case 5:
                end = min(len(data), at + rng.randint(1, 200))
                data[at:at] = data[at:end] * rng.randint(1, 3)
            case 6:
                other = rng.choice(samples)
                data[at:] = other[rng.randint(0, len(other)) :]
            case 7:
                del data[at:]
    return bytes(data)


def pieces(data: bytes, rng: random.Random) -> Iterator[bytes]:
    """The bytes as a network may cut them."""
    while data:
        size = rng.choice((1, 7, 64, 1000, len(data)))
        yield data[:size]
        data = data[size:]


# ------------------------------------------------------------------------------------------------------------ targets
class EventStreams:
    """Server-sent events of an upstream, and the chunks in them."""

    samples = (
        b'data: {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": null}]}\n\ndata: [DONE]\n\n',
        b': hi\r\n\r\nevent: x\r\ndata: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}}\r\n\r\n',
        b'data: {"choices": [{"index": 1, "text": "y", "finish_reason": "length"}]}\r\r'
        b'data: {"error": {"message": "m"}}\r\r',
    )

    async def run(self, data: bytes, rng: random.Random) -> None:
        parser, answer = EventParser(max_event_bytes=4096), UpstreamAnswer(["a", "b"], 1)
        try:
            for piece in pieces(data, rng):
                answer.read(parser.feed(piece))
                if answer.fault is not None:
                    return
            answer.finish()
        except (EventTooLargeError, UpstreamError):
            pass


class ChannelFrames:
    """Messages between gateways and replicas."""

    def __init__(self) -> None:
        request = GenerateRequest("r", (1, 2, 3), SamplingParams(stop=("x",), logit_bias=((3, 1.0),)))
        deltas = [(0, 0, (5,), "a", (), (), None, None, 3, 0, 1, None)]
        self.samples = (
            encode((Kind.OPEN, 7, True, (request,))),
            encode((Kind.DELTAS, [(7, deltas)])) + encode((Kind.ABORT, 7)),
            encode((Kind.ERROR, 7, "QueueFullError", "full", None)) + encode((Kind.TAKEN, 7, 3)),
        )

    async def run(self, data: bytes, rng: random.Random) -> None:
        reader = Reader(limit=1 << 16)
        try:
            for piece in pieces(data, rng):
                for message in reader.feed(piece):
                    match message:
                        case (Kind.OPEN, int(), bool(), tuple(requests)):
                            for values in requests:
                                to_request(values)
                        case (Kind.DELTAS, tuple(items)):
                            for _, packed in items:
                                unpack_deltas(packed, ["r"])
        except (FrameError, TypeError, ValueError, IndexError):  # links end the connection for all of these
            pass


class GgufHeaders:
    """GGUF files, up to the model and the tokenizer that they describe."""

    def __init__(self, folder: Path) -> None:
        from gguf import GGUFWriter

        path = folder / "good.gguf"
        writer = GGUFWriter(path, "llama")
        for add, value in (
            (writer.add_block_count, 1),
            (writer.add_context_length, 64),
            (writer.add_embedding_length, 32),
            (writer.add_head_count, 2),
            (writer.add_feed_forward_length, 32),
        ):
            add(value)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([f"t{i}" for i in range(32)])
        writer.add_token_types([1] * 32)
        writer.add_token_merges(["t 1", "t 2"])
        import numpy as np

        for name, shape in (("token_embd.weight", (32, 32)), ("output_norm.weight", (32,))):
            writer.add_tensor(name, np.zeros(shape, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        self.samples = (path.read_bytes(),)
        self._path = folder / "damaged.gguf"

    async def run(self, data: bytes, rng: random.Random) -> None:
        from engine.models.checkpoint import open_checkpoint
        from engine.text.gguf_vocab import read_gguf_vocabulary

        self._path.write_bytes(data)
        for read in (open_checkpoint, read_gguf_vocabulary):
            with suppress(ModelFileError):
                read(self._path)


class SafetensorsHeaders:
    """Directories of safetensors."""

    def __init__(self, folder: Path) -> None:
        header = json.dumps(
            {
                "__metadata__": {"format": "pt"},
                "model.norm.weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
                "lm_head.weight": {"dtype": "BF16", "shape": [2, 4], "data_offsets": [16, 32]},
            }
        ).encode()
        self.samples = (struct.pack("<Q", len(header)) + header + bytes(32),)
        self._folder = folder / "directory"
        self._folder.mkdir()
        (self._folder / "config.json").write_text("{}")

    async def run(self, data: bytes, rng: random.Random) -> None:
        from engine.models.safetensors_dir import read_safetensors

        (self._folder / "model.safetensors").write_bytes(data)
        try:
            found = read_safetensors(self._folder)
            for name in found.tensors:
                found.read(name)
        except ModelFileError:
            pass


_POST = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
_GET = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"


@dataclass
class HttpHeads:
    """Requests to a gateway's own HTTP server, heads and bodies, chunked ones too."""

    port: int
    samples: Sequence[bytes] = (
        _POST + b'content-length: 13\r\n\r\n{"prompt":[]}',
        _POST + b'transfer-encoding: chunked\r\n\r\n6\r\n{"a":1\r\n1\r\n}\r\n0\r\ntrailer: x\r\n\r\n',
        b"GET /v1/models HTTP/1.1\r\nhost: a\r\nauthorization: Bearer x\r\nx-request-id: y\r\n\r\n" + _GET,
    )
    statuses: dict[int, int] = field(default_factory=dict)

    async def run(self, data: bytes, rng: random.Random) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            for piece in pieces(data, rng):
                writer.write(piece)
            await writer.drain()
            writer.write_eof()
            raw = await reader.read(1 << 16)
        except ConnectionError:
            return
        finally:
            writer.close()
        if raw:
            status = int(raw.split(b" ", 2)[1])
            self.statuses[status] = self.statuses.get(status, 0) + 1
            if status >= 500:
                raise RuntimeError(f"status {status}: {raw[:300]!r}")


async def _endpoint(scope: Any, receive: Any, send: Any) -> None:
    from deployments.api.body import content_coding, decode, read_body
    from deployments.api.middleware import send_json

    coding = content_coding(scope["headers"])
    raw = await read_body(receive, scope["headers"], 1 << 16, 5.0)
    if scope["method"] == "POST":
        decode(raw, coding, 1 << 16)
    await send_json(send, 200, b"{}")


@asynccontextmanager
async def _http_server() -> Any:
    import uvicorn

    from deployments.api.middleware import RequestMiddleware
    from deployments.ray_serve.head_bounds import BoundedHeadProtocol

    app = RequestMiddleware(_endpoint)
    config = uvicorn.Config(app, port=0, log_level="critical", lifespan="off", http=BoundedHeadProtocol)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await serving


# --------------------------------------------------------------------------------------------------------------- runs
async def fuzz(name: str, target: Target, cases: int, seed: int, only: int | None = None) -> list[str]:
    """The faults. `only`: this case alone."""
    faults: list[str] = []
    before_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    began_s, slowest = time.monotonic(), (0.0, 0)
    for number in range(cases) if only is None else (only,):
        rng = random.Random(f"{name} {seed} {number}")
        data = damaged(rng.choice(target.samples), target.samples, rng)
        case_s = time.monotonic()
        try:
            await target.run(data, rng)
        except Exception:
            faults.append(f"{name} --seed {seed} --only {number}:\n{traceback.format_exc(limit=-4)}")
        slowest = max(slowest, (time.monotonic() - case_s, number))
    grown_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before_mib
    if grown_mib > _MAX_GROWTH_MIB:
        faults.append(f"{name}: the peak of memory grew by {grown_mib:.0f} MiB")
    print(
        f"{name}: {cases} cases in {time.monotonic() - began_s:.0f} s, {len(faults)} faults, slowest "
        f"{slowest[0] * 1000:.0f} ms (case {slowest[1]}), peak of memory {grown_mib:+.0f} MiB",
        flush=True,
    )
    return faults


async def fuzz_all(names: Sequence[str], cases: int, seed: int, only: int | None) -> list[str]:
    faults = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            if name == "http":
                async with _http_server() as port:
                    target = HttpHeads(port)
                    faults += await fuzz(name, target, cases, seed, only)
                    print("  answers: " + ", ".join(f"{s}: {n}" for s, n in sorted(target.statuses.items())))
            else:
                faults += await fuzz(name, TARGETS[name](Path(folder)), cases, seed, only)
    return faults


TARGETS: Mapping[str, Callable[[Path], Target]] = {
    "events": lambda _: EventStreams(),
    "channel": lambda _: ChannelFrames(),
    "gguf": GgufHeaders,
    "safetensors": SafetensorsHeaders,
}


def main(argv: Sequence[str] | None = None) -> int:
    """0: no fault. 1: faults."""
    names = ("http", *TARGETS)
    p = argparse.ArgumentParser(prog="python -m load_tests.fuzz_bytes", description=(__doc__ or "").split("\n")[0])
    p.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(names)} (default: all)")
    p.add_argument("--cases", type=int, default=10_000, help="of each target (default: %(default)s)")
    p.add_argument("--seed", type=int, default=0, help="other cases for another one (default: %(default)s)")
    p.add_argument("--only", type=int, metavar="CASE", help="this case alone")
    args = p.parse_args(argv)
    if unknown := [name for name in args.targets if name not in names]:
        p.error(f"unknown target {unknown[0]!r}; known: {', '.join(names)}")
    faults = asyncio.run(fuzz_all(args.targets or names, args.cases, args.seed, args.only))
    for fault in faults[:10]:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
