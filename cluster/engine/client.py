"""What an engine says to the controller. The controller may be away: then it waits a little and goes on
without.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from ..controller.progress import Phase

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger(__name__)

TELL_TIMEOUT_S = 5.0
GOODBYE_TIMEOUT_S = 1.0  # when a whole fleet stops, the controller may be gone first
ASK_TIMEOUT_S = 30.0


class ControllerClient:
    """One engine's line to the controller."""

    def __init__(self, controller: DeploymentHandle, engine_id: str, model: str, generation: str) -> None:
        self._controller = controller
        self._engine_id = engine_id
        self._model = model
        self._generation = generation

    async def place(self, home: str) -> dict[str, Any]:
        """Ask for NPUs, from the node ``home``; a controller that does not answer is a refusal for now."""
        call = self._controller.place.remote(self._engine_id, self._model, home)
        answer = await self._answer(call, ASK_TIMEOUT_S)
        return answer or {"refused": "the controller does not answer", "never": False, "wait": True}

    async def report(self, phase: Phase, detail: str, seconds: dict[str, float]) -> None:
        """Say how far the start has come."""
        call = self._controller.report.remote(
            self._engine_id, self._model, str(phase), detail, dict(seconds), self._generation
        )
        await self._answer(call, TELL_TIMEOUT_S)

    async def heartbeat(
        self, endpoint: dict[str, Any], load: dict[str, float] | None = None, seconds: float = TELL_TIMEOUT_S
    ) -> str | None:
        """Register this engine, or keep it registered, and say how busy it is; wait for the controller at most
        ``seconds``.

        Returns why the engine has to end, None if it may stay.
        """
        why: str | None = await self._answer(self._controller.heartbeat.remote(endpoint, load), seconds)
        return why

    async def unregister(self) -> None:
        """Say goodbye."""
        await self._answer(self._controller.unregister.remote(self._engine_id), GOODBYE_TIMEOUT_S)

    async def died(self, why: str) -> None:
        """Say goodbye, and why."""
        await self._answer(self._controller.died.remote(self._engine_id, why), GOODBYE_TIMEOUT_S)

    async def _answer(self, call: Any, seconds: float) -> Any:
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        try:
            return await asyncio.wait_for(call, seconds)
        except (RayError, RayServeException, TimeoutError) as error:
            logger.warning("engine %s: the controller does not answer: %r", self._engine_id, error)
            return None
