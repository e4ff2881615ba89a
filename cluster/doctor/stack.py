"""The versions that fit together: the one table, and the checks of CANN and the driver against it.

Sources: torch-npu's own table of CANN versions ends at 2.12 with CANN 9.1.0, and 2.13 is built from the same
sources; drivers below 25.2 are refused by components of CANN 8.5 and later. The Python packages are what this
distribution pins.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .finding import Finding, Level

DRIVER_FILE = Path("/usr/local/Ascend/driver/version.info")
CANN_HOMES = (
    "/usr/local/Ascend/cann",
    "/usr/local/Ascend/ascend-toolkit/latest",
)
HOME_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")


@dataclass(frozen=True, kw_only=True)
class Stack:
    """One row of the table. CANN and driver are the lowest versions, packages the exact ones."""

    cann: str
    driver: str
    packages: Mapping[str, str]


STACK = Stack(
    cann="9.1",
    driver="25.2",
    packages={"torch": "2.13.0", "torch-npu": "2.13.0", "vllm": "0.32.0", "ray": "2.60.0"},
)


def cann_and_driver(kind: str) -> Iterator[Finding]:
    """Yield findings about CANN and the driver of this machine.

    Args:
        kind: "npu" or "virtual"; virtual NPUs need neither.
    """
    if kind == "virtual":
        yield Finding(name="CANN", level=Level.OK, text="not needed by virtual NPUs")
        return
    yield at_least("CANN", cann(), STACK.cann, "install the CANN toolkit and source its set_env.sh")
    yield at_least(
        "driver", driver(), STACK.driver, "install the driver, or map its version.info into the container"
    )


def at_least(name: str, found: str | None, lowest: str, absent: str) -> Finding:
    """Check a version of the Ascend stack; ``absent`` is the remedy where none was found."""
    if found is None:
        return Finding(name=name, level=Level.FAIL, text="not found", remedy=absent)
    if order(found) < order(lowest):
        return Finding(
            name=name,
            level=Level.WARN,
            text=f"{found} is older than {lowest}, with which this version of npufleet fits",
            remedy=f"install {name} {lowest} or newer",
        )
    return Finding(name=name, level=Level.OK, text=found)


def order(version: str) -> tuple[int, int, int]:
    """Return what sorts versions such as 8.3.RC1, 24.1.rc2.2 and 9.1.0: a candidate comes before its release."""
    numbers = [int(part) for part in re.findall(r"\d+", version)[:2]]
    candidate = re.search(r"(?:rc|alpha|beta)\D*\d*", version, re.IGNORECASE) is not None
    major, minor = (*numbers, 0, 0)[:2]
    return major, minor, 0 if candidate else 1


def driver(file: Path = DRIVER_FILE) -> str | None:
    """Return the driver's version, None if its file is not there or does not say."""
    return _told(file, r"(?:package_version|Version)\s*=\s*(\S+)")


def cann(variables: Mapping[str, str] | None = None, homes: tuple[str, ...] = CANN_HOMES) -> str | None:
    """Return the version of the CANN toolkit that is set up here, None if there is none."""
    told = os.environ if variables is None else variables
    places = [told[name] for name in HOME_VARIABLES if told.get(name)]
    for place in [*places, *homes]:
        for file in sorted(Path(place).glob("*/ascend_toolkit_install.info")):
            if found := _told(file, r"version\s*=\s*(\S+)"):
                return found
        if found := _told(Path(place) / "runtime" / "version.info", r"Version\s*=\s*(\S+)"):
            return found
    return None


def _told(file: Path, pattern: str) -> str | None:
    try:
        match = re.search(rf"^\s*{pattern}\s*$", file.read_text(), re.MULTILINE)
    except OSError:
        return None
    return match[1] if match else None
