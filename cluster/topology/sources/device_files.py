"""What files say: the driver's device files, and the RoCE addresses in the NPUs' network configuration."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ..facts import Facts

NETWORK_FILE = Path("/etc/hccn.conf")
_ADDRESS = re.compile(r"^\s*address_(\d+)\s*=\s*(\S+)\s*$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Here:
    """The files of this machine."""

    devices: Path = Path("/dev")
    network: Path = NETWORK_FILE

    def look(self) -> Facts:
        """Return the NPUs by their device files, and the addresses that the network file lists."""
        indices = device_indices(self.devices)
        try:
            addresses = {int(i): ip for i, ip in _ADDRESS.findall(self.network.read_text())}
        except OSError:
            addresses = {}
        return Facts(indices=indices or None, addresses=addresses or None)


def device_indices(folder: Path) -> tuple[int, ...]:
    """Return N of each device file ``davinciN``."""
    names = (path.name.removeprefix("davinci") for path in folder.glob("davinci*"))
    return tuple(sorted(int(name) for name in names if name.isdigit()))
