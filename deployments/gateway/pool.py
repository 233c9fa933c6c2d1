"""One pool of replicas as one gateway sees it: which there are, which would take a request, and which one gets it."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection
from typing import Any

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.channel.client import ChannelClient
from deployments.replica_info import ReplicaInfo
from deployments.router.policies.base import Policy, ReplicaView, RouteHint

log = logging.getLogger("ray.serve")

_POLL_S = 0.5
_PATIENCE_S = 10.0  # a busy replica may take this long to describe itself


class Pool:
    """Serve says which replicas there are, by being asked again and again; a connection to each says at once when one
    is lost. `on_info` is told what the replicas say of themselves whenever that changes."""

    def __init__(
        self,
        name: str,
        handle: DeploymentHandle[Any],
        policy: Policy,
        on_info: Callable[[ReplicaInfo], None],
        rng: random.Random,
    ) -> None:
        self.name = name
        self.handle = handle
        self._policy = policy
        self._on_info = on_info
        self._rng = rng
        self._info: ReplicaInfo | None = None
        self._replicas: dict[str, ChannelClient] = {}
        self._last_chosen: dict[str, int] = {}
        self._choices = 0
        self._unfit: list[str] = []  # the errors that some gave instead of describing themselves
        self._was_up = False

    @property
    def up(self) -> bool:
        """Whether some replica would take a request now."""
        return any(replica.usable for replica in self._replicas.values())

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            await self._ask()
            await asyncio.sleep(_POLL_S)

    def choose(self, request: RouteHint, without: Collection[str]) -> ChannelClient | None:
        """A replica whose id is not in `without`; None: there is none that would take the request."""
        fit = [replica for name, replica in self._replicas.items() if replica.usable and name not in without]
        if not fit:
            return None
        views = [self._view(replica) for replica in fit]
        chosen = fit[self._policy.choose(views, request, self._rng) if len(fit) > 1 else 0]
        self._choices += 1
        self._last_chosen[chosen.address.replica_id] = self._choices
        return chosen

    def _view(self, replica: ChannelClient) -> ReplicaView:
        name = replica.address.replica_id
        return ReplicaView(
            name, replica.load, replica.num_streams, replica.queued_tokens, self._last_chosen.get(name, 0)
        )

    async def _ask(self) -> None:
        answers: list[Any]
        try:
            answers = await self.handle.broadcast("describe").results_async(
                timeout_s=_PATIENCE_S, return_exceptions=True
            )
        except DeploymentUnavailableError:  # no replica, or none any more
            answers = []
        except Exception as error:  # too busy to say, or Serve is in trouble: the connections know better
            log.warning("pool %s: no word from Serve: %s", self.name, type(error).__name__)
            return
        unfit = sorted({type(answer).__name__ for answer in answers if not isinstance(answer, ReplicaInfo)})
        if unfit != self._unfit:
            self._unfit = unfit
            log.warning("pool %s: unfit replicas: %s", self.name, ", ".join(unfit) or "none any more")
        infos = {info.address.replica_id: info for info in answers if isinstance(info, ReplicaInfo)}
        self._follow(infos)
        if (info := next(iter(infos.values()), None)) is not None:
            said = (info.max_model_len, info.fingerprint)
            if self._info is None or said != (self._info.max_model_len, self._info.fingerprint):
                self._on_info(info)
            self._info = info

    def _follow(self, infos: dict[str, ReplicaInfo]) -> None:
        """Connects to the replicas that are new, and lets go of those that are unfit or gone."""
        for name in list(self._replicas):
            if name not in infos or infos[name].address != self._replicas[name].address:
                self._replicas.pop(name).retire()
                self._last_chosen.pop(name, None)
        for name in infos.keys() - self._replicas.keys():
            self._replicas[name] = ChannelClient(infos[name].address, self._note, self._rng)
        self._note()

    def _note(self) -> None:
        if self._was_up and not self.up:
            log.warning("pool %s is down", self.name)
        self._was_up = self.up
