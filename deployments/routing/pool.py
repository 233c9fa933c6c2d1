"""One pool as one gateway sees it: which replicas there are, which would take a request, and which one gets it."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.channel.client import ChannelClient
from deployments.channel.replica_info import ReplicaInfo, ReplicaState, ReplicaStatus, UnavailableReason
from deployments.observe.log import log
from deployments.ray_serve.private import ask_all
from deployments.routing.backlog import ReplicaBacklog, ServiceRate, backlog_s
from deployments.routing.cold_start import ColdStart
from deployments.routing.errors import ReplicaSilentError
from deployments.routing.policies.base import Policy, ReplicaView, RouteHint
from deployments.routing.prefixes import PrefixIndex

POLL_S = 0.5  # seconds between two questions to Serve about which replicas there are
_AT_ONCE = 10  # replicas; with more, the questions come less often, as each goes to all of them
_PATIENCE_S = 5.0  # seconds that a busy replica may take to answer an operator
_LOOK_S = 2.0  # seconds that it may take to tell of itself; while it does not, its connection counts
_TTFT_WEIGHT = 0.2  # of the newest request in a replica's moving average: some five requests count
_ANSWER_WEIGHT = 0.05  # of the newest answer in the pool's average length: some twenty count
_ANSWER_TOKENS = 128.0  # until the pool has given an answer
_MAX_BLOCKS = 1 << 17  # blocks of one replica's prefix cache that are remembered here


@dataclass(slots=True)
class _Member:
    """A replica that Serve has named, and what requests to it have shown."""

    channel: ChannelClient
    rate: ServiceRate = field(default_factory=ServiceRate)
    last_chosen: int = 0
    ttft_s: float | None = None
    met: bool = False  # whether it has ever been connected

    def has(self, weights: str | None) -> bool:
        """Whether its weights are these; None: any."""
        return weights is None or self.channel.weights == weights


class Pool:
    """Asks Serve regularly which replicas there are, and keeps a connection to each, which shows a loss at once.

    `on_info` is called with what replicas tell of themselves whenever that changes, and `on_usable` with the number of
    replicas that would take a request now. `cold` starts a replica of a pool that may have none. `block_tokens`: size
    of a block of the prefix cache.
    """

    def __init__(
        self,
        name: str,
        handle: DeploymentHandle[Any],
        policy: Policy,
        on_info: Callable[[ReplicaInfo], None],
        rng: random.Random,
        block_tokens: int,
        cold: ColdStart | None = None,
        on_usable: Callable[[int], None] = lambda replicas: None,
        poll_s: float = POLL_S,
    ) -> None:
        self.name = name
        self.handle = handle
        self._policy = policy
        self._on_info = on_info
        self._rng = rng
        self._cold = cold
        self._on_usable = on_usable
        self._poll_s = poll_s
        self._info: ReplicaInfo | None = None
        self.prefixes = PrefixIndex(_MAX_BLOCKS, block_tokens)
        self._members: dict[str, _Member] = {}
        self._choices = 0
        self._answer_tokens = _ANSWER_TOKENS  # on average
        self._unfit: list[str] = []  # the errors that some gave instead of describing themselves
        self._was_up = False
        self._asked = False  # Serve, at least once
        self._taken = False  # the last replica has not failed: Serve has taken it out
        self._leaving: set[str] = set()
        self._departures = 0  # replicas that have said that they leave
        self._departures_heard = 0  # those of them before Serve was last asked

    @property
    def num_replicas(self) -> int:
        """How many replicas Serve has named, connected or not."""
        return len(self._members)

    @property
    def num_usable(self) -> int:
        """How many replicas would take a request now."""
        return sum(member.channel.usable for member in self._members.values())

    @property
    def up(self) -> bool:
        """Whether some replica would take a request now."""
        return any(member.channel.usable for member in self._members.values())

    def up_with(self, weights: str) -> bool:
        """Whether some replica with these weights would take a request now."""
        return any(member.channel.usable and member.has(weights) for member in self._members.values())

    def may_have(self, weights: str) -> bool:
        """Whether a replica with these weights runs, or would be started now, as far as is known."""
        current = self._info is not None and self._info.fingerprint == weights
        return current or any(member.has(weights) for member in self._members.values())

    @property
    def acquainted(self) -> bool:
        """Whether Serve has been asked, and all the replicas that it named are connected."""
        return self._asked and all(member.channel.connected for member in self._members.values())

    @property
    def drained(self) -> bool:
        """Whether there are replicas, and an operator has drained all of them."""
        return bool(self._members) and all(m.channel.status is ReplicaStatus.DRAINED for m in self._members.values())

    @property
    def may_recover(self) -> bool:
        """While it is down: whether Serve is about to replace replicas that have failed."""
        return not self._taken and not self.drained

    @property
    def successor_expected(self) -> bool:
        """While it is down: whether a new replica may be running that is not connected yet.

        It may when a replica has said that it leaves since Serve was last asked, as Serve starts a successor first
        where there is room for it; and when one that Serve has named is not connected yet.
        """
        if self._cold is not None:
            return False
        return self._departures > self._departures_heard or not all(member.met for member in self._members.values())

    @property
    def cold_start(self) -> ColdStart | None:
        """What starts a first replica, while the pool is down and may have been scaled to zero. None otherwise."""
        return None if self.up or self.drained or not self._asked else self._cold

    @property
    def unavailable_reason(self) -> UnavailableReason:
        """Why the pool is down. Only meaningful while it is."""
        if self._cold is None:
            return UnavailableReason.DOWN
        if self._cold.starting:
            return UnavailableReason.STARTING
        return UnavailableReason.FAILING if self._cold.failing else UnavailableReason.ASLEEP

    @property
    def wants_prefixes(self) -> bool:
        """Whether choose() would look at RouteHint.cached_tokens: the policy does, and there is a choice."""
        usable = (member for member in self._members.values() if member.channel.usable)
        return self._policy.wants_prefixes and len(list(islice(usable, 2))) == 2

    @property
    def info(self) -> ReplicaInfo | None:
        """What a replica last told of itself. None before the first one has."""
        return self._info

    def close(self) -> None:
        """Closes all connections, on which no stream may be open, and gives up a start that is under way."""
        self._was_up = False  # nobody is to be warned
        for member in self._members.values():
            member.channel.close()
        if self._cold is not None:
            self._cold.close()

    async def watch(self) -> None:
        """Asks Serve which replicas there are, and connects to them, until cancelled."""
        while True:
            try:
                await self._look()
            except Exception:  # without this task nothing is ever learnt of the pool again
                log.exception("pool %s: could not follow its replicas, and tries again", self.name)
            pause_s = self._poll_s * max(1.0, len(self._members) / _AT_ONCE)
            if self._cold is None:
                await asyncio.sleep(pause_s)
            else:
                await self._cold.answered(pause_s)

    async def _look(self) -> None:
        departures, now_s = self._departures, asyncio.get_running_loop().time()
        await self._ask()
        self._asked, self._departures_heard = True, departures
        for member in self._members.values():
            load = member.channel.load
            member.rate.observe(now_s, load.done_tokens, load.waiting > 0)
        if self._cold is not None:
            await self._cold.look()

    def choose(self, request: RouteHint, without: Collection[str], weights: str | None = None) -> ChannelClient | None:
        """The replica that gets a request: none whose id is in `without`, and one with these `weights` unless they are
        None. None: no replica would take it."""
        fit = [m for name, m in self._members.items() if m.channel.usable and name not in without and m.has(weights)]
        if not fit:
            return None
        chosen = fit[self._policy.choose([_view(m) for m in fit], request, self._rng) if len(fit) > 1 else 0]
        self._choices += 1
        chosen.last_chosen = self._choices
        return chosen.channel

    def note_first_token(self, replica_id: str, ttft_s: float) -> None:
        """Notes that a request has had its first token from this replica after `ttft_s` seconds."""
        if (member := self._members.get(replica_id)) is not None:
            old = member.ttft_s
            member.ttft_s = ttft_s if old is None else (1 - _TTFT_WEIGHT) * old + _TTFT_WEIGHT * ttft_s

    def backlog_s(self) -> float:
        """How many seconds a request that comes now would wait, see backlog.backlog_s()."""
        return backlog_s(self._backlogs(), self._answer_tokens)

    def _backlogs(self) -> Iterator[ReplicaBacklog]:
        """Yields the queue of each replica that would take a request."""
        for member in self._members.values():
            channel, load = member.channel, member.channel.load
            if channel.usable:
                yield ReplicaBacklog(
                    max(load.pending_tokens, channel.queued_tokens),
                    max(load.waiting, channel.num_streams - load.running),
                    member.rate.tokens_per_s,
                )

    async def states(self) -> list[ReplicaState]:
        """The states of all replicas, sorted by id. Those that do not answer in time are SILENT."""
        return await self._call("state")

    async def drain(self, replica_id: str | None, within_s: float | None) -> list[ReplicaState]:
        """Drains one replica, or all (None), for all gateways; see ChannelServer.take_out().

        Returns the states of all replicas after that. Raises ReplicaSilentError when the replica does not answer.
        """
        return self._answered(replica_id, await self._call("drain", replica_id, within_s))

    async def undrain(self, replica_id: str | None) -> list[ReplicaState]:
        """Undoes drain(), and returns and raises the same."""
        return self._answered(replica_id, await self._call("undrain", replica_id))

    @staticmethod
    def _answered(replica_id: str | None, states: list[ReplicaState]) -> list[ReplicaState]:
        if any(s.replica_id == replica_id and s.status is ReplicaStatus.SILENT for s in states):
            raise ReplicaSilentError(str(replica_id), _PATIENCE_S)
        return states

    async def _call(self, method: str, *args: Any) -> list[ReplicaState]:
        try:
            answers = await ask_all(self.handle, method, *args, within_s=_PATIENCE_S)
        except DeploymentUnavailableError:
            return []
        except TimeoutError:  # Serve itself does not answer
            answers = [TimeoutError()]
        states = {answer.replica_id: answer for answer in answers if isinstance(answer, ReplicaState)}
        if any(isinstance(answer, TimeoutError) for answer in answers):
            states = {name: _silent(name, member) for name, member in self._members.items()} | states
        return [states[name] for name in sorted(states)]

    async def _ask(self) -> None:
        answers: list[Any]
        try:
            answers = await ask_all(self.handle, "describe", within_s=_LOOK_S)
        except DeploymentUnavailableError:  # no replica, or none any more
            answers = []
        except Exception as error:  # too busy to say, or Serve is in trouble: the connections know better
            log.warning("pool %s: no word from Serve: %s", self.name, type(error).__name__)
            return
        silent = any(isinstance(answer, TimeoutError) for answer in answers)
        unfit = sorted({type(answer).__name__ for answer in answers if not isinstance(answer, ReplicaInfo)})
        if unfit != self._unfit:
            self._unfit = unfit
            log.warning("pool %s: unfit replicas: %s", self.name, ", ".join(unfit) or "none any more")
        infos = {info.address.replica_id: info for info in answers if isinstance(info, ReplicaInfo)}
        self._follow(infos, len(unfit), silent)
        if (info := next(iter(infos.values()), None)) is not None:
            said = (info.max_model_len, info.fingerprint)
            if self._info is None or said != (self._info.max_model_len, self._info.fingerprint):
                self._on_info(info)
            self._info = info
            if self._cold is not None:
                self._cold.said(info.startup_s)

    def _follow(self, infos: dict[str, ReplicaInfo], num_unfit: int, silent: bool) -> None:
        """Connects to the replicas that are new, and lets go of those that are unfit or gone.

        `silent`: some replica did not answer. Nobody says which, so those that are connected stay.
        """
        for name in list(self._members):
            if silent and name not in infos and self._members[name].channel.connected:
                continue
            if name not in infos or infos[name].address != self._members[name].channel.address:
                channel = self._members.pop(name).channel
                self._taken = channel.connected and not num_unfit  # one that fails breaks its connection
                channel.retire()
                self.prefixes.forget(name)
        for name in infos.keys() - self._members.keys():
            on_prefixes = partial(self._on_prefixes, name)
            self._members[name] = _Member(
                ChannelClient(
                    infos[name].address,
                    self._on_change,
                    self._rng,
                    on_prefixes,
                    self._on_answer,
                    infos[name].fingerprint,
                )
            )
        self._on_change()

    def _on_prefixes(self, replica_id: str, added: list[bytes], removed: list[bytes]) -> None:
        if not self._policy.wants_prefixes or replica_id not in self._members:  # its last streams may outlive it here
            return
        self.prefixes.add(replica_id, added)
        self.prefixes.remove(replica_id, removed)

    def _on_answer(self, tokens: int) -> None:
        self._answer_tokens += _ANSWER_WEIGHT * (tokens - self._answer_tokens)

    def _on_change(self) -> None:
        self._on_usable(self.num_usable)
        leaving = {name for name, member in self._members.items() if member.channel.status is ReplicaStatus.LEAVING}
        self._departures += len(leaving - self._leaving)
        self._leaving = leaving
        for member in self._members.values():
            member.met |= member.channel.connected
        if self._was_up and not self.up:
            left = self._taken or bool(leaving)
            log.log(logging.INFO if left and self._cold else logging.WARNING, "pool %s is down", self.name)
        self._was_up = self.up
        if self._was_up:
            self._taken = False
            if self._cold is not None:
                self._cold.up()
        elif leaving:
            self._taken = True


def _view(member: _Member) -> ReplicaView:
    channel = member.channel
    return ReplicaView(
        channel.address.replica_id,
        channel.load,
        channel.num_streams,
        channel.queued_tokens,
        member.last_chosen,
        member.ttft_s,
    )


def _silent(replica_id: str, member: _Member) -> ReplicaState:
    """Of a replica that does not answer: what is known of it here."""
    channel = member.channel
    return ReplicaState(
        replica_id, ReplicaStatus.SILENT, channel.num_streams, channel.load.running, channel.load.waiting
    )
