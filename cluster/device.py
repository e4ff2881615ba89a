"""Which NPUs this machine offers: real ones, virtual ones, or none.

The fleet never imports the libraries below it; whether the virtual NPU is enabled in this Python
environment is asked of its own command line, in a subprocess.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from . import env

_STATUS_TIMEOUT_S = 60.0
_DEVICE_FOLDER = Path("/dev")
REMEDY = (
    "this machine has no Ascend NPU (no /dev/davinci* device) and the virtual NPU is not enabled; "
    "on an Ascend host install the driver and CANN, anywhere else run: npufleet virtual-npu enable"
)


@dataclass(frozen=True, kw_only=True)
class Device:
    """The NPUs of this machine. ``kind`` is "npu" or "virtual", as in a FleetConfig."""

    kind: str
    count: int
    chip: str = ""
    memory: int | None = None  # bytes of each, if known without opening one

    def __str__(self) -> str:
        name = "virtual NPU" if self.kind == "virtual" else "NPU"
        chip = f" {self.chip}" if self.chip else ""
        return f"{self.count} {name}{'s' if self.count != 1 else ''}{chip}"


def real_npus(folder: Path = _DEVICE_FOLDER) -> int:
    """Return how many NPUs the driver shows: device files davinci0, davinci1 and so on."""
    return sum(path.name.removeprefix("davinci").isdigit() for path in folder.glob("davinci*"))


def virtual_npu(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the virtual NPU's command line (``enable``, ``disable``, ``status``) and return what it said."""
    return subprocess.run(
        [sys.executable, "-m", "npufleet.kernels.virtual", *arguments],
        capture_output=True,
        text=True,
        timeout=None if arguments[:1] == ("enable",) else _STATUS_TIMEOUT_S,
        check=False,
    )


def virtual_enabled() -> bool:
    """Say whether the virtual NPU is enabled in this Python environment.

    Raises:
        ValueError: if it refuses what ``NPUFLEET_DEVICE`` says.
    """
    return _virtual_status().get("virtual NPU", "").split()[:1] == ["enabled"]


def virtual_stale() -> str:
    """Return why the enabled virtual NPU should be built anew, empty if it is up to date."""
    return _virtual_status().get("stale", "").strip()


def _virtual_status() -> dict[str, str]:
    if importlib.util.find_spec("npufleet.kernels") is None:
        return {}
    status = virtual_npu("status")
    if status.returncode and status.stderr.startswith("error: "):  # its own words: a wrong setting
        raise ValueError(status.stderr.removeprefix("error: ").strip())
    return dict(line.split(":", 1) for line in status.stdout.splitlines() if ":" in line)


def detect(wanted: str | None = None) -> Device:
    """Return the NPUs to serve on.

    Args:
        wanted: "npu" or "virtual" if the configuration says which; None takes virtual ones where they are
            enabled, real ones otherwise.

    Raises:
        ValueError: if there are none of the wanted kind; the message says what to do.
    """
    virtual = virtual_enabled()
    if wanted == "npu" and virtual:
        raise ValueError(
            "the configuration says device: npu, but the virtual NPU is enabled in this Python environment; "
            "say device: virtual, or run: npufleet virtual-npu disable"
        )
    if wanted == "virtual" and not virtual:
        raise ValueError(
            "the configuration says device: virtual, but the virtual NPU is not enabled in this Python "
            "environment; run: npufleet virtual-npu enable"
        )
    if virtual:
        count, chip = env.virtual_device()
        return Device(kind="virtual", count=count, chip=chip, memory=env.virtual_memory())
    count = real_npus()
    if not count:
        raise ValueError(REMEDY)
    return Device(kind="npu", count=count)
