"""What router and gateway read before they open their doors: API keys, TLS files, secret, Envoy's program."""

from __future__ import annotations

from .admission.tenants import read_key_file
from .config import GatewayConfig, RouterConfig
from .router.lookaside.tokens import read_secret


def check(gateway: GatewayConfig, router: RouterConfig) -> None:
    """See that this machine can open the doors.

    Raises:
        ValueError: naming the key of the configuration, the file and what is wrong with it.
    """
    read_key_file(gateway.api_keys, "gateway.api_keys")
    read_key_file(router.api_keys, "router.api_keys")
    for name, door in (("gateway", gateway), ("router", router)):
        if door.tls is not None:
            try:
                door.tls.check()
            except ValueError as error:
                raise ValueError(f"{name}.tls: {error}") from error
    if router.engine_tls is not None:
        try:
            router.engine_tls.engine()
            router.engine_tls.router().context()
        except ValueError as error:
            raise ValueError(f"router.engine_tls: {error}") from error
    if router.secret is not None:
        try:
            read_secret(router.secret)
        except ValueError as error:
            raise ValueError(f"router.secret: {error}") from error
    if router.data_plane == "envoy":
        from .router.envoy.process import find_envoy

        try:
            find_envoy()
        except ValueError as error:
            raise ValueError(f"router.data_plane: {error}") from error
