"""The environment variables that the fleet reads, in one typed place.

``NPUFLEET_HOME``
    Folder for what the fleet keeps on this machine: converted checkpoints, the state of a local fleet and its
    logs. Default ``~/.cache/npufleet``.
``NPUFLEET_DEVICE``
    Which virtual NPUs to present, ``virtual:COUNT[:SOC][,hbm=SIZE][,null]``. The virtual NPU reads and
    validates it; the fleet only hands it on and takes the count from it.
``NPUFLEET_PHASES``
    Set by an engine for its own workers: where they say how far their start is.
``NPUFLEET_RANK_TABLE``
    Set by an engine for its own workers: HCCL's rank table as JSON, for each to write on its node.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

HOME = "NPUFLEET_HOME"
DEVICE = "NPUFLEET_DEVICE"
PHASES = "NPUFLEET_PHASES"
RANK_TABLE = "NPUFLEET_RANK_TABLE"
DEFAULT_VIRTUAL_DEVICE = "virtual:8:Ascend910B3,hbm=64GiB"

_DEVICE_SETTING = re.compile(r"virtual:(?P<count>[1-9][0-9]*)(:(?P<soc>[A-Za-z0-9_-]+))?(?P<options>,.*)?")
_HBM = re.compile(r",hbm=(?P<size>[0-9]+)(?P<unit>[KMGT]iB)")
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def home() -> Path:
    """Return the folder where the fleet keeps its files, as an absolute path (it may not exist yet)."""
    return Path(os.environ.get(HOME) or "~/.cache/npufleet").expanduser().absolute()


def virtual_device() -> tuple[int, str]:
    """Return how many virtual NPUs the environment asks for, and of which chip.

    Raises:
        ValueError: if ``NPUFLEET_DEVICE`` is set to something that is not a virtual NPU setting.
    """
    match = _device_setting()
    return int(match["count"]), match["soc"] or "Ascend910B3"


def virtual_memory() -> int | None:
    """Return the bytes of memory that the environment gives each virtual NPU; None if it is as the chip has it.

    Raises:
        ValueError: as :func:`virtual_device`.
    """
    found = _HBM.search(_device_setting()["options"] or "")
    return int(found["size"]) * _UNITS[found["unit"]] if found else None


def _device_setting() -> re.Match[str]:
    setting = os.environ.get(DEVICE) or DEFAULT_VIRTUAL_DEVICE
    match = _DEVICE_SETTING.fullmatch(setting)
    if match is None:
        raise ValueError(
            f"{DEVICE} is {setting!r}; expected virtual:COUNT[:SOC][,hbm=SIZE][,null], "
            f"for example {DEFAULT_VIRTUAL_DEVICE}"
        )
    return match


def kubernetes_api() -> tuple[str, str]:
    """Return host and port of the API server of the pod this runs in, as Kubernetes itself tells each container.

    Raises:
        ValueError: if this does not run in a pod.
    """
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        raise ValueError(
            "this does not run in a Kubernetes pod; give --kubernetes-api, for example of kubectl proxy"
        )
    return host, port


def phases() -> tuple[str, int, str] | None:
    """Return host, port and word of the engine that wants to hear of this worker's start, None if none does."""
    address, _, word = os.environ.get(PHASES, "").partition("/")
    host, _, port = address.rpartition(":")
    return (host.strip("[]"), int(port), word) if host else None
