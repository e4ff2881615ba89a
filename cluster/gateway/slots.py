"""The model deployments of a gateway: each one's frontend is built when its first engine is ready."""

from __future__ import annotations

import asyncio
import logging
from traceback import format_exc
from typing import Any

import grpc

from ..router.picker import NoEngine, Picker
from .frontend import Frontend, load_frontend
from .heap import settle
from .http import Receive, Scope, Send
from .metrics import GatewayMetrics
from .settings import GatewaySettings, ModelSpec

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_RETRY_S = 3.0


class Slot:
    """One model deployment: waiting for an engine, ready, or failed with a reason (and tried again)."""

    def __init__(
        self, spec: ModelSpec, picker: Picker, settings: GatewaySettings, metrics: GatewayMetrics
    ) -> None:
        self.spec = spec
        self.frontend: Frontend | None = None
        self.problem = "no engine of it has been ready yet"
        self.answering = 0  # requests that the frontend has
        self._picker = picker
        self._settings = settings
        self._metrics = metrics
        self._loaded = asyncio.Event()
        self._task = asyncio.create_task(self._load(), name=f"gateway load {spec.name}")

    @property
    def engines(self) -> int:
        """Engines that can take a request now."""
        return len(self._picker.pool.pickable(self.spec.name))

    async def wait(self) -> Frontend:
        """The frontend, once it is ready."""
        await self._loaded.wait()
        assert self.frontend is not None
        return self.frontend

    async def cards(self) -> list[dict[str, Any]]:
        """Its entries in /v1/models, also while it is not ready."""
        if self.frontend is not None:
            return await self.frontend.model_cards()
        return [{"id": self.spec.name, "object": "model", "created": 0, "owned_by": "npufleet"}]

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have the frontend, which must be there, answer a request."""
        assert self.frontend is not None
        self.answering += 1
        try:
            await self.frontend.app(scope, receive, send)
        finally:
            self.answering -= 1

    async def leave(self) -> None:
        """Let running requests end within ``shutdown_grace``, then close."""
        deadline = asyncio.get_running_loop().time() + self._settings.shutdown_grace
        try:
            while self.answering:
                if asyncio.get_running_loop().time() > deadline:
                    logger.warning(
                        "model %s: %d requests that still run are ended", self.spec.name, self.answering
                    )
                    break
                await asyncio.sleep(_POLL_S)
        finally:
            await self.close()

    async def close(self) -> None:
        """Stop loading and end running requests."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self.frontend is not None:
            self.frontend.close()

    async def _load(self) -> None:
        while self.frontend is None:
            if not self.engines:
                await asyncio.sleep(_POLL_S)
                continue
            try:
                self.frontend = await load_frontend(self.spec, self._picker, self._settings, self._metrics)
            except (NoEngine, grpc.aio.AioRpcError) as error:
                self.problem = "its engine could not be asked for the model's files"
                logger.info("model %s: %s: %s", self.spec.name, self.problem, error)
                await asyncio.sleep(_POLL_S)
            except Exception as error:  # noqa: BLE001 - supervisor: one model's fault leaves the others alone
                self.problem = f"its frontend could not be built: {error}"
                logger.error("model %s: %s\n%s", self.spec.name, self.problem, format_exc())
                await asyncio.sleep(_RETRY_S)
        settle()
        self._loaded.set()
