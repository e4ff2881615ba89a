"""The engines behind Kubernetes services, as an endpoint source."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from npufleet.cluster.endpoints import EngineEndpoint, Snapshot
from npufleet.cluster.env import kubernetes_api
from npufleet.cluster.router.discovery.api import ApiError, ApiServer, Gone
from npufleet.cluster.router.discovery.slices import engines_of

_log = logging.getLogger(__name__)
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_SHORTEST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0
_RELIST = 600.0  # seconds after which the list is made anew even where the watch has lost nothing
_AWAY = (ApiError, aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError)


@dataclass(frozen=True, kw_only=True)
class Services:
    """The services of one namespace whose endpoints are engines."""

    namespace: str
    names: tuple[str, ...]
    port: str = ""  # name or number; "": the only one, or "grpc"

    @classmethod
    def parse(cls, texts: Sequence[str], namespace: str) -> Services:
        """``[NAMESPACE/]SERVICE[:PORT]``, repeated; ValueError where they do not fit together."""
        spaces, names, ports = set(), [], set()
        for text in texts:
            space, _, rest = text.rpartition("/")
            name, _, port = rest.partition(":")
            if not name or "/" in space:
                raise ValueError(f"--engines-kubernetes {text!r} is not [NAMESPACE/]SERVICE[:PORT]")
            spaces.add(space or namespace)
            names.append(name)
            ports.add(port)
        if len(spaces) > 1 or len(ports) > 1:
            raise ValueError("--engines-kubernetes: all services must be of one namespace and have one port")
        return cls(namespace=spaces.pop(), names=tuple(names), port=ports.pop())

    @property
    def path(self) -> str:
        """Of their EndpointSlices."""
        return f"/apis/discovery.k8s.io/v1/namespaces/{self.namespace}/endpointslices"

    @property
    def selector(self) -> str:
        """Label selector of their EndpointSlices."""
        return f"kubernetes.io/service-name in ({','.join(self.names)})"


class KubernetesSource:
    """Follows the EndpointSlices of ``services``."""

    def __init__(self, server: ApiServer, services: Services, model: str = "") -> None:
        self._server = server
        self._services = services
        self._model = model
        self._told: tuple[EngineEndpoint, ...] | None = None
        self._version = 0

    async def watch(self) -> AsyncIterator[Snapshot]:
        """Yield the engines now and after each change; while the server is away the last ones stay."""
        pause = _SHORTEST_PAUSE
        self._told = None
        while True:
            try:
                slices, version = await self._server.list(self._services.path, self._services.selector)
                known = {_name(piece): piece for piece in slices}
                if snapshot := self._news(known):
                    yield snapshot
                pause = _SHORTEST_PAUSE
                async for snapshot in self._follow(known, version):
                    yield snapshot
            except Gone as error:
                _log.info("the watch of engines begins anew: %s", error)
            except _AWAY as error:
                _log.warning("Kubernetes does not tell the engines, the last ones stay: %s", error)
                await asyncio.sleep(pause * random.uniform(0.5, 1.5))
                pause = min(_LONGEST_PAUSE, 2 * pause)

    async def _follow(self, known: dict[str, Any], version: str) -> AsyncIterator[Snapshot]:
        """Watches, one after another, until it is time for a new list."""
        until = time.monotonic() + _RELIST
        while time.monotonic() < until:
            began = time.monotonic()
            async for event in self._server.watch(self._services.path, self._services.selector, version):
                piece = event["object"]
                version = piece["metadata"]["resourceVersion"]
                if event["type"] == "BOOKMARK":
                    continue
                if event["type"] == "DELETED":
                    known.pop(_name(piece), None)
                else:
                    known[_name(piece)] = piece
                if snapshot := self._news(known):
                    yield snapshot
            if time.monotonic() - began < _SHORTEST_PAUSE:  # a server that ends each watch at once
                await asyncio.sleep(_SHORTEST_PAUSE)

    def _news(self, known: dict[str, Any]) -> Snapshot | None:
        engines = engines_of(known.values(), self._services.port, self._model)
        if engines == self._told:
            return None
        self._told = engines
        self._version += 1
        return Snapshot(epoch="kubernetes", version=self._version, endpoints=engines)


def source_of(texts: Sequence[str], model: str, api: str | None) -> KubernetesSource:
    """The source of ``[NAMESPACE/]SERVICE[:PORT]`` in ``texts``.

    ``api`` is the URL of an API server that asks for nothing, such as one of ``kubectl proxy``; None: that of the pod
    this runs in. ValueError where there is neither.
    """
    namespace = "default"
    if api is None:
        server = ApiServer.in_cluster(*kubernetes_api(), SERVICE_ACCOUNT)
        own = SERVICE_ACCOUNT / "namespace"
        namespace = own.read_text().strip() if own.is_file() else namespace
    else:
        server = ApiServer(url=api.rstrip("/"))
    return KubernetesSource(server, Services.parse(texts, namespace), model)


def _name(piece: dict[str, Any]) -> str:
    return str(piece["metadata"]["name"])
