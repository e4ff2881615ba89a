"""Network namespaces on one bridge: hosts that share a machine and no address, as far as their programs can tell.

Needs root and `ip` (Debian: iproute2). This process stays outside and reaches all of them through the bridge.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
from collections.abc import Iterator, Sequence

import psutil

PREFIX = "nf"


def permitted() -> bool:
    """Say whether this process may make network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"{PREFIX}{os.getpid()}p"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True)
    if made.returncode == 0:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return made.returncode == 0


@contextlib.contextmanager
def network(names: Sequence[str]) -> Iterator[dict[str, tuple[str, str]]]:
    """Make a namespace for each name; yields by name the namespace and its address. All is gone afterwards.

    Raises:
        RuntimeError: if `ip` refuses something.
    """
    mark = f"{PREFIX}{os.getpid() % 100_000}"
    subnet = _free_subnet()
    made: dict[str, tuple[str, str]] = {}
    with contextlib.ExitStack() as undo:
        _ip("link", "add", mark, "type", "bridge")
        undo.callback(_ip, "link", "del", mark)
        _ip("addr", "add", f"{subnet}.254/24", "dev", mark)
        _ip("link", "set", mark, "up")
        for number, name in enumerate(names, start=1):
            space, outer, inner = f"{mark}-{name}", f"{mark}o{number}", f"{mark}i{number}"
            _ip("netns", "add", space)
            undo.callback(_ip, "netns", "del", space)
            _ip("link", "add", outer, "type", "veth", "peer", "name", inner)
            undo.callback(_ip, "link", "del", outer)  # the inner end goes with it
            _ip("link", "set", outer, "master", mark, "up")
            _ip("link", "set", inner, "netns", space)
            address = f"{subnet}.{number}"
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", inner)
            _ip("-n", space, "link", "set", inner, "up")
            _ip("-n", space, "link", "set", "lo", "up")
            _ip(
                "-n", space, "route", "add", "default", "via", f"{subnet}.254"
            )  # Ray looks for its address that way
            made[name] = space, address
        yield made


def inside(space: str, command: Sequence[str]) -> list[str]:
    """Return the command that runs ``command`` in a namespace; all of this machine's files are there."""
    return ["ip", "netns", "exec", space, *command]


def _free_subnet() -> str:
    taken = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    while True:
        found = f"10.231.{random.randrange(1, 255)}"
        if not any(address.startswith(f"{found}.") for address in taken):
            return found


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
