"""What `npufleet doctor` looks at on every machine: packages, devices, ports, shared memory, open files."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import resource
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from .. import device
from ..config import GatewayConfig, MetricsConfig, RouterConfig
from .finding import Finding, Level

DISTRIBUTION = "npufleet"
EXTRAS = ("", "cluster")  # what serving needs of the distribution's requirements: the one table of versions
SHM_LEAST = 256 << 20
SHM_GOOD = 1 << 30
FILES_GOOD = 4096


def python() -> Finding:
    """Check the Python version."""
    found = ".".join(str(part) for part in sys.version_info[:3])
    good = sys.version_info >= (3, 11)
    return Finding(
        name="python",
        level=Level.OK if good else Level.FAIL,
        text=found,
        remedy="" if good else "use Python 3.11 or newer",
    )


def versions() -> Iterator[Finding]:
    """Check every package that serving needs against the requirements of the installed distribution."""
    from packaging.requirements import Requirement

    for line in importlib.metadata.requires(DISTRIBUTION) or []:
        wanted = Requirement(line)
        if wanted.marker and not any(wanted.marker.evaluate({"extra": extra}) for extra in EXTRAS):
            continue
        yield version(wanted.name, str(wanted.specifier), wanted.specifier.contains)


def version(name: str, specifier: str, fits: object) -> Finding:
    """Check one installed package; ``fits(version, prereleases=True)`` says whether a version is right."""
    assert callable(fits)
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            name=name,
            level=Level.FAIL,
            text="not installed",
            remedy=f"install {name}{specifier} (make setup)",
        )
    if fits(found, prereleases=True):
        return Finding(name=name, level=Level.OK, text=found)
    return Finding(
        name=name,
        level=Level.FAIL,
        text=f"{found} does not fit {specifier}",
        remedy=f"install {name}{specifier} (make setup)",
    )


def devices() -> Finding:
    """Check that there are NPUs, real or virtual."""
    try:
        found = device.detect()
    except ValueError as error:
        problem, _, remedy = str(error).partition("; ")
        return Finding(name="device", level=Level.FAIL, text=problem, remedy=remedy)
    stale = device.virtual_stale() if found.kind == "virtual" else ""
    if stale:
        return Finding(name="device", level=Level.WARN, text=f"{found}; {stale}", remedy="")
    return Finding(name="device", level=Level.OK, text=str(found))


def default_ports() -> list[tuple[str, str, int]]:
    """Return the ports that a fleet takes unless told otherwise."""
    return [
        ("gateway", GatewayConfig.host, GatewayConfig.port),
        ("router", RouterConfig.host, RouterConfig.port),
        ("metrics", MetricsConfig.host, MetricsConfig.port),
    ]


def free_port(what: str, host: str, port: int) -> Finding:
    """Check that ``host:port`` can be bound."""
    name = f"port {port}"
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, UnicodeError) as error:  # UnicodeError: a host with a label that is too long
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return Finding(
            name=name,
            level=Level.FAIL,
            text=f"{what} cannot listen on {host}:{port}: {said}",
            remedy=_port_remedy(what, getattr(error, "errno", None)),
        )
    return Finding(name=name, level=Level.OK, text=f"free for the {what} on {host}")


def _port_remedy(what: str, number: int | None) -> str:
    if number == errno.EADDRINUSE:
        return f"stop what uses it, or set {what}.port to another one"
    if number == errno.EACCES:
        return f"set {what}.port to one above 1023"
    return f"set {what}.host to an address of this machine, or to 0.0.0.0 for all of them"


def shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """Check the size of shared memory, through which an engine speaks to its workers."""
    try:
        free = os.statvfs(folder)
    except OSError as error:
        return Finding(name=str(folder), level=Level.FAIL, text=str(error), remedy="mount a tmpfs there")
    size = free.f_bavail * free.f_frsize
    level = Level.FAIL if size < SHM_LEAST else Level.WARN if size < SHM_GOOD else Level.OK
    remedy = "" if level is Level.OK else "give the container more, for example docker run --shm-size=4g"
    return Finding(name=str(folder), level=level, text=f"{size >> 20} MiB free", remedy=remedy)


def open_files() -> Finding:
    """Check the limit of open files: every stream of the front end is one."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft == resource.RLIM_INFINITY or soft >= FILES_GOOD
    return Finding(
        name="open files",
        level=Level.OK if enough else Level.WARN,
        text=f"limit {soft}",
        remedy="" if enough else f"raise it: ulimit -n {FILES_GOOD}",
    )
