"""A router alone: the command line of ``npufleet route``, and what it starts."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server

from npufleet.cluster import checks
from npufleet.cluster.addresses import netloc
from npufleet.cluster.admission.settings import AdmissionSettings
from npufleet.cluster.admission.tenants import Keys, read_key_file
from npufleet.cluster.config import DATA_PLANES
from npufleet.cluster.endpoints import EndpointSource
from npufleet.cluster.router.command import add_engines, stop_asked
from npufleet.cluster.router.discovery import kubernetes
from npufleet.cluster.router.envoy import command as envoy
from npufleet.cluster.router.envoy.server import serve_endpoint_picker
from npufleet.cluster.router.hedge import HedgeSettings
from npufleet.cluster.router.lookaside.tokens import read_secret
from npufleet.cluster.router.pool import StaticSource
from npufleet.cluster.router.processes.exporter import on_port
from npufleet.cluster.router.processes.setup import Setup
from npufleet.cluster.router.processes.supervisor import RouterProcesses
from npufleet.cluster.router.registry import DEFAULT_POLICY, known_policies
from npufleet.cluster.router.replay.rules import MODES
from npufleet.cluster.router.server import RouterHandle, serve_router
from npufleet.cluster.router.settings import WARM_SECONDS, RouterSettings, front_of
from npufleet.cluster.router.sources import DnsSource, FileSource, ToldBySelf, endpoints_of
from npufleet.cluster.tls import ServerTls
from npufleet.cluster.transport.base import Tls
from npufleet.cluster.transport.registry import DEFAULT_TRANSPORT, known_transports

EPILOG = """\
examples:
  npufleet route --engine grpc://10.0.0.1:50051 --engine grpc://10.0.0.2:50051
  npufleet route --engines-file engines.txt --api-keys keys.txt
  npufleet route --engines-dns engines.default.svc:50051 --host 0.0.0.0 --tls-cert tls.crt --tls-key tls.key
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that :func:`main` reads."""
    add_engines(parser)
    parser.add_argument(
        "--engines-file",
        type=Path,
        metavar="FILE",
        help="engines, one a line as for --engine; may change while the router runs",
    )
    parser.add_argument(
        "--engines-dns",
        metavar="NAME:PORT",
        help="every address of a name is an engine, such as a headless Kubernetes service",
    )
    parser.add_argument(
        "--engines-kubernetes",
        action="append",
        metavar="[NAMESPACE/]SERVICE[:PORT]",
        help="every endpoint of a Kubernetes service is an engine; repeat it for more services of the namespace",
    )
    parser.add_argument(
        "--kubernetes-api", metavar="URL", help="API server outside a pod, such as that of kubectl proxy"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument("--port", type=int, default=50051, help="gRPC port, 0 = any (default %(default)s)")
    names = ", ".join(known_policies())
    parser.add_argument("--policy", default=DEFAULT_POLICY, help=f"{names} (default %(default)s)")
    parser.add_argument(
        "--transport",
        default=DEFAULT_TRANSPORT,
        choices=known_transports(),
        help="gRPC client towards engines (default %(default)s)",
    )
    parser.add_argument(
        "--data-plane",
        default=DATA_PLANES[0],
        choices=DATA_PLANES,
        help="what clients connect to: grpcio's server, our own, or Envoy (default %(default)s)",
    )
    _add_ways(parser)
    parser.add_argument("--metrics-port", type=int, help="serve Prometheus metrics here, on the same address")
    parser.add_argument(
        "--grace", type=float, default=30.0, help="seconds for running calls to end on SIGTERM"
    )
    parser.add_argument(
        "--reuse-port", action="store_true", help="share the port with other routers on this machine"
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="router processes that share the port (default 1)",
    )
    parser.add_argument(
        "--endpoint-picker",
        metavar="HOST:PORT",
        help="also answer gateways that speak the Endpoint Picker Protocol (ext_proc) here",
    )
    envoy.add_arguments(parser)
    parser.add_argument("--access-log", action="store_true", help="write a line of JSON for each call")
    parser.add_argument(
        "--otlp-endpoint", metavar="URL", help="collector of OpenTelemetry traces, http://HOST:4317"
    )
    _add_safety(parser)


def _add_ways(parser: argparse.ArgumentParser) -> None:
    """When a second engine has to do with a request."""
    parser.add_argument(
        "--split-tokens",
        type=int,
        default=RouterSettings.split_tokens,
        metavar="N",
        help="uncached prompt tokens from which on a prefill engine computes a prompt (default %(default)s)",
    )
    parser.add_argument(
        "--hedge-tokens",
        type=int,
        default=0,
        metavar="N",
        help="ask a second engine for slow answers without a stream of at most so many tokens (default: never)",
    )
    parser.add_argument(
        "--resume",
        default=RouterSettings.resume,
        choices=MODES,
        help="which streams go on with another engine when theirs is lost: none, those that take the most likely"
        " token, or also those that draw tokens without a seed (default %(default)s)",
    )


def _add_safety(parser: argparse.ArgumentParser) -> None:
    safety = parser.add_argument_group("who may ask, and how much")
    safety.add_argument("--api-keys", metavar="FILE", help="keys and their tenants, one a line")
    safety.add_argument("--tls-cert", metavar="FILE", help="certificate of this router (PEM)")
    safety.add_argument("--tls-key", metavar="FILE", help="its key")
    safety.add_argument("--tls-client-ca", metavar="FILE", help="clients must show a certificate of this CA")
    safety.add_argument("--engine-ca", type=Path, metavar="FILE", help="engines speak TLS, signed by this CA")
    safety.add_argument("--engine-cert", type=Path, metavar="FILE", help="what this router shows to engines")
    safety.add_argument("--engine-key", type=Path, metavar="FILE", help="its key")
    safety.add_argument("--engine-name", metavar="NAME", help="name in the engines' certificates")
    safety.add_argument(
        "--secret", metavar="FILE", help="the fleet's secret: calls to engines are signed with it"
    )
    safety.add_argument(
        "--ttft-objective",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="refuse requests whose first token would come later than this, with a time to return",
    )
    safety.add_argument(
        "--engine-slots", type=int, default=AdmissionSettings.engine_slots, metavar="N",
        help="requests on one engine before further ones wait in the router (default %(default)s)",
    )  # fmt: skip
    safety.add_argument(
        "--max-queue", type=int, default=AdmissionSettings.max_queue, metavar="N",
        help="requests of a model that wait in the router before further ones are refused (default %(default)s)",
    )  # fmt: skip


def source_of(args: argparse.Namespace, tls: Tls | None) -> EndpointSource:
    """Where the engines come from; ValueError for none or for several places at once."""
    ways = (args.engine, args.engines_file, args.engines_dns, args.engines_kubernetes)
    if sum(map(bool, ways)) != 1:
        raise ValueError(
            "give engines in one way: --engine, --engines-file, --engines-dns or --engines-kubernetes"
        )
    model = args.model or ""
    source: EndpointSource
    if args.engine:
        source = StaticSource(endpoints_of(args.engine, model))
    elif args.engines_kubernetes:
        source = kubernetes.source_of(args.engines_kubernetes, model, args.kubernetes_api)
    elif args.engines_file is not None:
        source = FileSource(args.engines_file, model)
    else:
        name, _, port = args.engines_dns.rpartition(":")
        if not name or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"--engines-dns {args.engines_dns!r} is not NAME:PORT")
        source = DnsSource(name, int(port), model)
    return ToldBySelf(source, args.transport, tls)


def check(args: argparse.Namespace) -> None:
    """See that numbers and addresses can be meant. ValueError for the first that cannot."""
    checks.host(args.host, "--host")
    checks.port(args.port, "--port")
    checks.number(args.grace, "--grace", 0.0, 86400.0)
    checks.integer(args.processes, "--processes", 1, 256)
    checks.integer(args.envoy_workers, "--envoy-workers", 1, 256)
    checks.collector(args.otlp_endpoint, "--otlp-endpoint")
    if args.metrics_port is not None:
        checks.port(args.metrics_port, "--metrics-port")
    if args.kubernetes_api is not None:
        checks.server(args.kubernetes_api, "--kubernetes-api")
    if args.endpoint_picker is not None:
        checks.address(args.endpoint_picker, "--endpoint-picker")
    if args.engine_name is not None and args.engine_ca is None and args.engine_cert is None:
        raise ValueError("--engine-name is of engines that speak TLS: give their --engine-ca too")


def link_of(args: argparse.Namespace) -> Tls | None:
    """How engines are reached; ValueError for files that cannot be used."""
    if not (args.engine_ca or args.engine_cert or args.engine_key):
        return None
    made = Tls(
        ca=args.engine_ca, certificate=args.engine_cert, key=args.engine_key, server_name=args.engine_name
    )
    made.context()
    return made


def own_tls_of(args: argparse.Namespace) -> ServerTls | None:
    """What this router shows to clients; ValueError for files that cannot be used or do not belong together."""
    if bool(args.tls_cert) != bool(args.tls_key):
        raise ValueError("--tls-cert and --tls-key are given together or not at all")
    if args.tls_cert:
        return ServerTls(certificate=args.tls_cert, key=args.tls_key, client_ca=args.tls_client_ca).check()
    if args.tls_client_ca:
        raise ValueError("--tls-client-ca needs --tls-cert and --tls-key")
    return None


async def serve(args: argparse.Namespace) -> None:
    """Serve until SIGINT or SIGTERM."""
    check(args)
    tls = link_of(args)
    own = own_tls_of(args)
    admission = AdmissionSettings(
        ttft_objective=args.ttft_objective, engine_slots=args.engine_slots, max_queue=args.max_queue
    )
    settings = RouterSettings(
        access_log=args.access_log,
        otlp_endpoint=args.otlp_endpoint,
        transport=args.transport,
        tls=tls,
        admission=admission,
        split_tokens=args.split_tokens,
        hedging=HedgeSettings(max_tokens=args.hedge_tokens),
        resume=args.resume,
        secret=read_secret(args.secret) if args.secret else None,
        front=front_of(args.data_plane),
    )
    if args.envoy_config:
        print(envoy.configuration(args, settings, own), end="")
        return
    registry = CollectorRegistry()
    stop = stop_asked()
    keys = Keys(read_key_file(args.api_keys, "--api-keys"))
    source = source_of(args, tls)
    if args.processes > 1:
        await _serve_many(args, source, setup_of(args, admission, own, tls), stop)
        return
    async with AsyncExitStack() as running:
        handle: RouterHandle | envoy.OwnFolder
        if args.data_plane == "envoy":
            handle = await envoy.start(args, source, settings, keys, own, registry)
            router = handle.handle.router
        else:
            router = handle = await serve_router(
                source,
                host=args.host,
                port=args.port,
                policy=args.policy,
                registry=registry,
                settings=settings,
                reuse_port=args.reuse_port,
                warm=WARM_SECONDS if args.reuse_port else 0.0,
                keys=keys,
                tls=own,
            )
        running.push_async_callback(handle.close, args.grace)
        if args.endpoint_picker is not None:
            picker = await serve_endpoint_picker(router, settings, args.endpoint_picker, keys=keys, tls=own)
            running.push_async_callback(picker.close)
        if args.metrics_port is not None and isinstance(handle, envoy.OwnFolder):
            exporter = await on_port(args.host, args.metrics_port, handle.handle.series)
            running.push_async_callback(exporter.cleanup)
        elif args.metrics_port is not None:
            try:
                start_http_server(args.metrics_port, addr=args.host, registry=registry)
            except OSError as error:
                where = netloc(args.host, args.metrics_port)
                raise OSError(f"the metrics cannot listen on {where}: {error.strerror}") from error
        print(f"router listens on {handle.address}", flush=True)
        await stop.wait()


def setup_of(
    args: argparse.Namespace, admission: AdmissionSettings, own: ServerTls | None, link: Tls | None
) -> Setup:
    """What each of several processes is told; ValueError for what only one process can do."""
    if args.data_plane == "envoy":
        raise ValueError("--processes is not for --data-plane envoy; Envoy's threads are --envoy-workers")
    if args.endpoint_picker is not None:
        raise ValueError("--endpoint-picker is for one process: start further routers for more")
    return Setup(
        host=args.host,
        port=args.port,
        policy=args.policy,
        transport=args.transport,
        admission=admission,
        split_tokens=args.split_tokens,
        hedging=HedgeSettings(max_tokens=args.hedge_tokens),
        resume=args.resume,
        access_log=args.access_log,
        otlp_endpoint=args.otlp_endpoint,
        keys=args.api_keys,
        secret=args.secret,
        tls=own,
        engine_tls=link,
        grace=args.grace,
        front=front_of(args.data_plane),
    )


async def _serve_many(
    args: argparse.Namespace, source: EndpointSource, setup: Setup, stop: asyncio.Event
) -> None:
    async with AsyncExitStack() as running:
        processes = RouterProcesses(source, setup, args.processes)
        await processes.start()
        running.push_async_callback(processes.close)
        if args.metrics_port is not None:
            exporter = await on_port(args.host, args.metrics_port, processes.metrics)
            running.push_async_callback(exporter.cleanup)
        print(f"router listens on {processes.address}", flush=True)
        await stop.wait()


def main(args: argparse.Namespace) -> int:
    """Run it; 2 for a command line that cannot be served."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        try:
            import uvloop
        except ImportError:  # a faster loop where it is installed, nothing else
            asyncio.run(serve(args))
        else:
            uvloop.run(serve(args))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
