"""Where a router alone finds its engines: a file that may change, a DNS name, and what engines say of themselves."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from npufleet.cluster.endpoints import EndpointSource, EngineEndpoint, EngineState, Role, Snapshot
from npufleet.cluster.router.split.base import KV_ROLES
from npufleet.cluster.router.split.registry import handoff_of
from npufleet.cluster.router.wire import path, pb
from npufleet.cluster.transport.base import LinkSettings, Tls
from npufleet.cluster.transport.registry import open_channel

_log = logging.getLogger(__name__)
_POLL = 1.0
_ASK_TIMEOUT = 3.0


def endpoint_of(text: str, model: str) -> EngineEndpoint:
    """The endpoint that ``[MODEL@][grpc://]HOST:PORT`` names; ``model`` where it names none ("": ask the engine).

    ValueError for what does not parse.
    """
    name, _, address = text.rpartition("@")
    name, address = name.removeprefix("grpc://") or model, address.removeprefix("grpc://")
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"engine {text!r} is not [MODEL@][grpc://]HOST:PORT")
    return EngineEndpoint(
        engine_id=address, model=name, address=address, metrics_url="", state=EngineState.READY
    )


def endpoints_of(texts: Iterable[str], model: str) -> list[EngineEndpoint]:
    """As :func:`endpoint_of`, for many; none of them twice."""
    made = [endpoint_of(text, model) for text in texts]
    if len({endpoint.engine_id for endpoint in made}) < len(made):
        raise ValueError("an engine is given twice")
    return made


class FileSource:
    """Engines listed in a file, one a line (``#`` begins a comment). The file is looked at every second."""

    def __init__(self, file: Path, model: str) -> None:
        self._file = file
        self._model = model
        self._read()  # a file that cannot be used is said at once

    async def watch(self) -> AsyncIterator[Snapshot]:
        """Yield the list now and after each change; a file that cannot be read leaves the last list as it is."""
        last: list[EngineEndpoint] | None = None
        version = 0
        while True:
            try:
                found = await asyncio.to_thread(self._read)
            except ValueError as error:
                _log.warning("the list of engines stays as it was: %s", error)
                found = last or []
            if found != last:
                last, version = found, version + 1
                yield Snapshot(epoch="file", version=version, endpoints=tuple(found))
            await asyncio.sleep(_POLL)

    def _read(self) -> list[EngineEndpoint]:
        try:
            lines = self._file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"the list of engines {self._file} cannot be read: {error}") from error
        return endpoints_of((line.strip() for line in lines if line.split("#")[0].strip()), self._model)


class DnsSource:
    """All addresses of one name, such as that of a headless Kubernetes service, asked for every second."""

    def __init__(self, name: str, port: int, model: str) -> None:
        self._name, self._port, self._model = name, port, model

    async def watch(self) -> AsyncIterator[Snapshot]:
        """Yield the addresses now and after each change; while the name does not resolve the last ones stay."""
        last: list[str] | None = None
        version = 0
        while True:
            try:
                found = await self._resolve()
            except OSError as error:
                _log.warning("%s does not resolve, its engines stay as they were: %s", self._name, error)
                found = last if last is not None else []
            if found != last:
                last, version = found, version + 1
                engines = tuple(endpoint_of(address, self._model) for address in found)
                yield Snapshot(epoch="dns", version=version, endpoints=engines)
            await asyncio.sleep(_POLL)

    async def _resolve(self) -> list[str]:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(self._name, self._port, type=socket.SOCK_STREAM)
        hosts = {str(address[0]) for *_, address in found}
        return sorted(f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}" for host in hosts)


class ToldBySelf:
    """``source`` with what each engine says of itself: its model, where the source does not name it, its data-parallel
    ranks, and how it hands prompts to other engines.

    An engine whose model nobody told yet is left out; engines without an answer are asked again every second.
    """

    def __init__(self, source: EndpointSource, transport: str, tls: Tls | None = None) -> None:
        self._source = source
        self._transport = transport
        self._tls = tls
        self._names: dict[str, str] = {}
        self._more: dict[str, dict[str, Any]] = {}

    async def watch(self) -> AsyncIterator[Snapshot]:
        """Yield what is known after each change of the source or of what is known."""
        version = 0
        latest: Snapshot | None = None
        told: tuple[EngineEndpoint, ...] | None = None
        async with aclosing(self._snapshots()) as snapshots:
            async for snapshot in snapshots:
                latest = snapshot or latest
                if latest is None:
                    continue
                await self._ask(latest.endpoints)
                named = tuple(self._named(latest.endpoints))
                if named != told:
                    told, version = named, version + 1
                    yield Snapshot(epoch=latest.epoch, version=version, endpoints=named)

    async def _snapshots(self) -> AsyncGenerator[Snapshot | None, None]:
        """The source's snapshots, and None each second between them."""
        news: asyncio.Queue[Snapshot] = asyncio.Queue()

        async def follow() -> None:
            async for snapshot in self._source.watch():
                news.put_nowait(snapshot)

        following = asyncio.create_task(follow(), name="router engines' names")
        try:
            while not following.done():
                try:
                    async with asyncio.timeout(_POLL):
                        told = await news.get()
                except TimeoutError:
                    told = None
                yield told
            following.result()  # what ended it goes to whoever follows us
        finally:
            following.cancel()

    def _named(self, endpoints: Sequence[EngineEndpoint]) -> Iterable[EngineEndpoint]:
        for endpoint in endpoints:
            name = endpoint.model or self._names.get(endpoint.engine_id)
            if name:
                told = dict(self._more.get(endpoint.engine_id, {}))
                if endpoint.role != Role.BOTH:  # the source knows better
                    told.pop("role", None)
                yield replace(endpoint, model=name, **told)

    async def _ask(self, endpoints: Sequence[EngineEndpoint]) -> None:
        present = {endpoint.engine_id for endpoint in endpoints}
        self._names = {key: name for key, name in self._names.items() if key in present}
        self._more = {key: told for key, told in self._more.items() if key in present}
        silent = [
            e
            for e in endpoints
            if e.engine_id not in self._more or not (e.model or e.engine_id in self._names)
        ]
        await asyncio.gather(*map(self._ask_one, silent))

    async def _ask_one(self, endpoint: EngineEndpoint) -> None:
        channel = open_channel(self._transport, endpoint.address, LinkSettings(), self._tls)
        name, server = (channel.unary_unary(path(method)) for method in ("GetModelInfo", "GetServerInfo"))
        try:
            if not endpoint.model:
                raw = await name(pb.GetModelInfoRequest().SerializeToString(), timeout=_ASK_TIMEOUT)
                info = pb.GetModelInfoResponse.FromString(raw)
                self._names[endpoint.engine_id] = info.served_model_name or info.model_path or "default"
            raw = await server(pb.GetServerInfoRequest().SerializeToString(), timeout=_ASK_TIMEOUT)
            self._more[endpoint.engine_id] = _of_server(pb.GetServerInfoResponse.FromString(raw))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                self._more[endpoint.engine_id] = {}
            _log.info("engine %s does not tell of itself yet: %s", endpoint.engine_id, error.code().name)
        finally:
            await channel.close()


def _of_server(info: pb.GetServerInfoResponse) -> dict[str, Any]:
    """The fields of an endpoint that a GetServerInfo answer tells."""
    told: dict[str, Any] = {"ranks": max(1, info.data_parallel_size)}
    if handoff_of(info.kv_connector) is not None:
        roles = {kv_role: str(role) for role, kv_role in KV_ROLES.items()}
        told |= {
            "kv_connector": info.kv_connector,
            "kv_engine_id": info.kv_engine_id,
            "role": roles.get(info.kv_role, str(Role.BOTH)),
        }
    return told
