"""A Kubernetes API server for EndpointSlices: list with pages, watch with versions, bookmarks and 410 Gone.

Speaks the wire protocol of the real one for one resource: see Kubernetes API Concepts.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from typing import Any

from aiohttp import web

PATH = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"


def endpoint_slice(
    name: str, service: str, *pods: dict[str, Any], port: int = 50051, **more: Any
) -> dict[str, Any]:
    """An EndpointSlice as the control plane writes it."""
    labels = {"kubernetes.io/service-name": service, **more.pop("labels", {})}
    return {
        "kind": "EndpointSlice",
        "apiVersion": "discovery.k8s.io/v1",
        "metadata": {"name": name, "namespace": "serving", "labels": labels},
        "addressType": "IPv4",
        "ports": [{"name": "grpc", "protocol": "TCP", "port": port}],
        "endpoints": list(pods),
        **more,
    }


def pod(name: str, address: str = "127.0.0.1", **conditions: bool | None) -> dict[str, Any]:
    """An endpoint of one."""
    conditions = {"ready": True, "serving": True, "terminating": False, **conditions}
    target = {"kind": "Pod", "name": name, "uid": f"{name}0000-1111"}
    return {"addresses": [address], "conditions": conditions, "targetRef": target, "nodeName": "node-1"}


class FakeKubernetes:
    """The server. Its attributes make it misbehave."""

    def __init__(self, token: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.token = token
        self.page = 500  # items of one page of a list at most
        self.down = False  # every request gets 503
        self.lists = 0
        self.watches: list[str] = []  # the versions that watches began from
        self._tls = tls
        self._version = 100
        self._oldest = 0  # versions before this are gone
        self._items: dict[str, dict[str, Any]] = {}
        self._events: list[tuple[int, str, dict[str, Any]]] = []
        self._changed = asyncio.Event()
        self._streams: set[web.StreamResponse] = set()
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self) -> FakeKubernetes:
        app = web.Application()
        app.router.add_get(PATH, self._get)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=self._tls).start()
        scheme = "http" if self._tls is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def stop(self) -> None:
        self.cut()
        if self._runner is not None:
            await self._runner.cleanup()

    def put(self, piece: dict[str, Any]) -> None:
        """Add or change an object."""
        name = piece["metadata"]["name"]
        self._happen("MODIFIED" if name in self._items else "ADDED", piece)
        self._items[name] = self._events[-1][2]

    def delete(self, name: str) -> None:
        self._happen("DELETED", self._items.pop(name))

    def bookmark(self) -> None:
        """Tell all watchers how young they are."""
        self._happen("BOOKMARK", {"kind": "EndpointSlice", "metadata": {}})

    def compact(self) -> None:
        """Forget all history, as etcd does in time."""
        self._version += 1
        self._oldest = self._version

    def cut(self) -> None:
        """Break all watches."""
        for stream in self._streams:
            if stream.task is not None:
                stream.task.cancel()

    def _happen(self, kind: str, piece: dict[str, Any]) -> None:
        self._version += 1
        made = json.loads(json.dumps(piece))
        made["metadata"]["resourceVersion"] = str(self._version)
        self._events.append((self._version, kind, made))
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _get(self, request: web.Request) -> web.StreamResponse:
        if self.down:
            return web.json_response({"kind": "Status", "code": 503}, status=503)
        if self.token is not None and request.headers.get("authorization") != f"Bearer {self.token}":
            return web.json_response({"kind": "Status", "code": 401, "message": "Unauthorized"}, status=401)
        if request.query.get("watch"):
            return await self._watch(request)
        self.lists += 1
        found = [piece for _, piece in sorted(self._items.items()) if self._selected(request, piece)]
        first = int(request.query.get("continue") or 0)
        size = min(int(request.query.get("limit", 500)), self.page)
        metadata = {"resourceVersion": str(self._version)}
        if first + size < len(found):
            metadata["continue"] = str(first + size)
        return web.json_response(
            {"kind": "EndpointSliceList", "metadata": metadata, "items": found[first : first + size]}
        )

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        version = int(request.query["resourceVersion"])
        self.watches.append(request.query["resourceVersion"])
        stream = web.StreamResponse(headers={"content-type": "application/json"})
        await stream.prepare(request)
        self._streams.add(stream)
        try:
            if version < self._oldest:
                gone = {
                    "kind": "Status",
                    "code": 410,
                    "reason": "Expired",
                    "message": "too old resource version",
                }
                await stream.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
                return stream
            while True:
                changed = self._changed
                for number, kind, piece in self._events:
                    if number > version and (kind == "BOOKMARK" or self._selected(request, piece)):
                        await stream.write(json.dumps({"type": kind, "object": piece}).encode() + b"\n")
                version = self._version
                await changed.wait()
        finally:
            self._streams.discard(stream)

    @staticmethod
    def _selected(request: web.Request, piece: dict[str, Any]) -> bool:
        key, _, values = request.query["labelSelector"].partition(" in ")
        wanted = values.strip("()").split(",")
        return (
            request.match_info["namespace"] == piece["metadata"]["namespace"]
            and piece["metadata"]["labels"].get(key) in wanted
        )
