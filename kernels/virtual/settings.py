"""``NPUFLEET_DEVICE``: how many virtual NPUs of which chip, with how much HBM.

Grammar: ``virtual:COUNT[:SOC][,hbm=SIZE][,null]``, for example ``virtual:8:Ascend910B3,hbm=16GiB``. The
default is ``virtual:8:Ascend910B3,hbm=64GiB``. ``null`` makes compute kernels do nothing.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30
MIB = 1 << 20
MAX_DEVICES = 64


@dataclass(frozen=True, kw_only=True)
class Soc:
    """One Ascend chip as CANN reports it; memory and cores are those of one device (on A3, one die).

    Core counts and HBM follow the platform descriptions of CANN and public device tables.
    """

    name: str
    cube_cores: int
    vector_cores: int
    hbm_bytes: int
    l2_bytes: int


def _soc(name: str, cube: int, hbm_gib: int, l2_mib: int = 192) -> Soc:
    # Both generations pair every cube core with two vector cores.
    sizes = {"hbm_bytes": hbm_gib * GIB, "l2_bytes": l2_mib * MIB}
    return Soc(name=name, cube_cores=cube, vector_cores=2 * cube, **sizes)


# A2 (Atlas 800 A2: 910B) and A3 (910C: each package holds two of these dies).
SOCS = {
    soc.name: soc
    for soc in (
        _soc("Ascend910B1", 24, 64),
        _soc("Ascend910B2", 24, 64),
        _soc("Ascend910B2C", 24, 64),
        _soc("Ascend910B3", 20, 64),
        _soc("Ascend910B4", 20, 32, 96),
        _soc("Ascend910B4-1", 20, 64),
        _soc("Ascend910_9391", 24, 64),
        _soc("Ascend910_9392", 24, 64),
        _soc("Ascend910_9381", 24, 64),
        _soc("Ascend910_9382", 24, 64),
        _soc("Ascend910_9372", 20, 64),
        _soc("Ascend910_9362", 20, 64),
    )
}
DEFAULT_SOC = "Ascend910B3"
DEFAULT = f"virtual:8:{DEFAULT_SOC},hbm=64GiB"
_UNITS = {"KiB": 1 << 10, "MiB": MIB, "GiB": GIB, "TiB": 1 << 40}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What ``NPUFLEET_DEVICE`` says: ``hbm_bytes`` is per device."""

    count: int
    soc: Soc
    hbm_bytes: int
    null_mode: bool

    def __str__(self) -> str:
        size = f"{self.hbm_bytes // GIB}GiB" if self.hbm_bytes % GIB == 0 else f"{self.hbm_bytes // MIB}MiB"
        return f"virtual:{self.count}:{self.soc.name},hbm={size}" + (",null" if self.null_mode else "")


def parse(text: str) -> Settings:
    """Reads the value of ``NPUFLEET_DEVICE``. Raises ValueError naming what was given and what is allowed."""
    head, *options = text.split(",")
    parts = head.split(":")
    if parts[0] != "virtual" or not 2 <= len(parts) <= 3:
        raise _error(text, "expected virtual:COUNT[:SOC][,hbm=SIZE][,null]")
    if not parts[1].isascii() or not parts[1].isdigit() or not 1 <= int(parts[1]) <= MAX_DEVICES:
        raise _error(text, f"COUNT must be a whole number from 1 to {MAX_DEVICES}, got {parts[1]!r}")
    name = parts[2] if len(parts) == 3 else DEFAULT_SOC
    if name not in SOCS:
        raise _error(text, f"SOC must be one of {', '.join(SOCS)}, got {name!r}")
    hbm_bytes, null_mode, seen = SOCS[name].hbm_bytes, False, set()
    for option in options:
        key, _, value = option.partition("=")
        if key in seen:
            raise _error(text, f"{key} is given twice")
        seen.add(key)
        if key == "hbm":
            hbm_bytes = _size(text, value)
        elif option == "null":
            null_mode = True
        else:
            raise _error(text, f"options are hbm=SIZE and null, got {option!r}")
    return Settings(count=int(parts[1]), soc=SOCS[name], hbm_bytes=hbm_bytes, null_mode=null_mode)


def _size(text: str, value: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(KiB|MiB|GiB|TiB)", value, re.ASCII)
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if not 64 * MIB <= size <= 16 << 40:
        raise _error(text, f"hbm must be 64MiB to 16TiB, written like 16GiB or 512MiB, got {value!r}")
    return size


def _error(text: str, why: str) -> ValueError:
    return ValueError(f"NPUFLEET_DEVICE={text!r}: {why}")


def from_environment() -> Settings:
    """The settings of this process. Raises ValueError when ``NPUFLEET_DEVICE`` does not parse."""
    return parse(os.environ.get("NPUFLEET_DEVICE") or DEFAULT)


def home() -> Path:
    """Where builds are kept: ``NPUFLEET_HOME`` (default ``~/.cache/npufleet``) / ``virtual-npu``."""
    base = os.environ.get("NPUFLEET_HOME")
    return (Path(base) if base else Path.home() / ".cache" / "npufleet") / "virtual-npu"
