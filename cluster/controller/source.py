"""The controller as an endpoint source for routers: a long poll that survives the controller's restarts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from ..endpoints import Snapshot
from .wire import snapshot_from_dict

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger(__name__)

RETRY_S = 0.5
CALL_TIMEOUT_S = 30.0  # a watch answers after 10 s at the latest, so this one is lost
SETTLE_S = 10.0  # that a restarted controller gets to hear of every engine: five heartbeats


class ControllerSource:
    """Follows the controller's snapshots through its Serve handle."""

    def __init__(self, controller: DeploymentHandle) -> None:
        self._controller = controller

    async def watch(self) -> AsyncIterator[Snapshot]:
        """Yield the present snapshot at once, then every newer one.

        While the controller is away the last snapshot stays valid. A controller that has just restarted
        knows no engine until their heartbeats come in; its first snapshots are held back until it knows as
        many as before or had time to hear of them all.
        """
        last: Snapshot | None = None
        settled = 0.0
        while True:
            snapshot = await self._next(last)
            if snapshot is None:
                await asyncio.sleep(RETRY_S)
                continue
            now = asyncio.get_running_loop().time()
            if last is not None and snapshot.epoch != last.epoch:
                settled = settled or now + SETTLE_S
                if len(snapshot.endpoints) < len(last.endpoints) and now < settled:
                    await asyncio.sleep(RETRY_S)
                    continue
            settled = 0.0
            if last is None or (snapshot.epoch, snapshot.version) != (last.epoch, last.version):
                yield snapshot
            last = snapshot

    async def _next(self, last: Snapshot | None) -> Snapshot | None:
        epoch, version = (last.epoch, last.version) if last else ("", -1)
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        try:
            call = self._controller.watch.remote(epoch, version)
            return snapshot_from_dict(await asyncio.wait_for(call, CALL_TIMEOUT_S))
        except (RayError, RayServeException, TimeoutError) as error:
            logger.warning("the controller does not answer (%s); keeping the last snapshot", error)
            return None
