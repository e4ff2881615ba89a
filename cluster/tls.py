"""TLS of what clients connect to, the router's and the gateway's own ports, and of the links inside a fleet."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import checks

if TYPE_CHECKING:
    import grpc

    from .transport.base import Tls


def no_password() -> str:
    """For OpenSSL, which else asks for the password of an encrypted key at the terminal, and waits."""
    raise OSError("the key is encrypted; give it without a password")


@dataclass(frozen=True, kw_only=True)
class ServerTls:
    """PEM files: what to show to clients, and which authority's certificates they must show (mutual TLS)."""

    certificate: str
    key: str
    client_ca: str | None = None  # None: clients show none

    def check(self) -> ServerTls:
        """Itself; ValueError where its files cannot be used."""
        try:
            made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            made.load_cert_chain(self.certificate, self.key, password=no_password)
            if self.client_ca is not None:
                made.load_verify_locations(self.client_ca)
        except OSError as error:  # ssl.SSLError is one
            named = ", ".join(filter(None, (self.certificate, self.key, self.client_ca)))
            raise ValueError(f"the TLS files cannot be used ({named}): {error}") from error
        return self

    def credentials(self) -> grpc.ServerCredentials:
        """For grpcio. ValueError for files that cannot be used."""
        import grpc

        self.check()
        ca = None if self.client_ca is None else Path(self.client_ca).read_bytes()
        pair = (Path(self.key).read_bytes(), Path(self.certificate).read_bytes())
        return grpc.ssl_server_credentials([pair], ca, ca is not None)

    def context(self) -> ssl.SSLContext:
        """For a server over asyncio that speaks HTTP/2 alone. ValueError for files that cannot be used."""
        self.check()
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.load_cert_chain(self.certificate, self.key)
        if self.client_ca is not None:
            made.load_verify_locations(self.client_ca)
            made.verify_mode = ssl.CERT_REQUIRED
        made.minimum_version = ssl.TLSVersion.TLSv1_2  # what HTTP/2 asks for (RFC 9113, 9.2)
        made.set_alpn_protocols(["h2"])
        return made

    def uvicorn(self) -> dict[str, Any]:
        """For uvicorn.Config. ValueError for files that cannot be used."""
        self.check()
        return {
            "ssl_certfile": self.certificate,
            "ssl_keyfile": self.key,
            "ssl_ca_certs": self.client_ca,
            "ssl_cert_reqs": ssl.CERT_NONE if self.client_ca is None else ssl.CERT_REQUIRED,
        }


@dataclass(frozen=True, kw_only=True)
class FleetTls:
    """PEM files, on every node, of the links between routers and engines: both sides show the certificate, and take
    none but those of the authority."""

    ca: str
    certificate: str
    key: str
    server_name: str = "npufleet"  # the name in the certificate, in place of each engine's address

    def engine(self) -> ServerTls:
        """The engine's side. ValueError where its files cannot be used."""
        return ServerTls(certificate=self.certificate, key=self.key, client_ca=self.ca).check()

    def router(self) -> Tls:
        """The router's side."""
        from .transport.base import Tls

        return Tls(
            ca=Path(self.ca),
            certificate=Path(self.certificate),
            key=Path(self.key),
            server_name=self.server_name,
        )


def parse_server(data: object, where: str) -> ServerTls | None:
    """What the key ``where`` of a configuration says; ValueError for what it may not say."""
    if data is None:
        return None
    given = checks.mapping(data, where, [field.name for field in fields(ServerTls)])
    return ServerTls(
        certificate=checks.file(given.get("certificate"), f"{where}.certificate"),
        key=checks.file(given.get("key"), f"{where}.key"),
        client_ca=checks.optional_file(given.get("client_ca"), f"{where}.client_ca"),
    )


def parse_fleet(data: object, where: str) -> FleetTls | None:
    """The same for the links inside a fleet."""
    if data is None:
        return None
    given = checks.mapping(data, where, [field.name for field in fields(FleetTls)])
    return FleetTls(
        ca=checks.file(given.get("ca"), f"{where}.ca"),
        certificate=checks.file(given.get("certificate"), f"{where}.certificate"),
        key=checks.file(given.get("key"), f"{where}.key"),
        server_name=checks.text(given.get("server_name", FleetTls.server_name), f"{where}.server_name"),
    )
