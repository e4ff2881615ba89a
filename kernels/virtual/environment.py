"""Puts the virtual NPU into this Python environment, takes it out again, and tells which it is."""

from __future__ import annotations

import ctypes
import os
import re
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import boot, settings
from .build import BuildError, build, installed, key

MODULE = "npufleet_virtual_npu_boot.py"
PTH = "npufleet_virtual_npu.pth"
_TEMPLATE = Path(__file__).with_name("boot_file.py")


class RealCannError(RuntimeError):
    """This machine has CANN; the virtual NPU would hide the real devices."""


@dataclass(frozen=True, kw_only=True)
class Status:
    """What ``status`` prints. ``stale`` says why the build must be made again, or is empty."""

    enabled: bool
    site_packages: Path
    device: str
    build: Path | None = None
    torch: str = ""
    torch_npu: str = ""
    stale: str = ""


def site_packages() -> Path:
    """Where the boot file of this environment belongs."""
    return Path(sysconfig.get_paths()["purelib"])


def real_cann() -> str:
    """Where real CANN was found, or an empty string."""
    home = os.environ.get("ASCEND_HOME_PATH", "")
    if home:
        return f"ASCEND_HOME_PATH={home}"
    if boot.loaded():  # then the name belongs to our stand-in
        return ""
    try:
        ctypes.CDLL("libascendcl.so")
    except OSError:
        return ""
    return "libascendcl.so"


def enable(*, force: bool = False, say: Callable[[str], None] = print) -> None:
    """Build what is needed and write the boot file. Safe to repeat.

    Raises RealCannError where CANN is installed, unless ``force``; BuildError when it cannot be compiled;
    ValueError when ``NPUFLEET_DEVICE`` does not parse.
    """
    settings.from_environment()
    found = real_cann()
    if found and not force:
        raise RealCannError(
            f"CANN is installed here ({found}): the virtual NPU would hide the real devices. "
            "Use --force to enable it all the same"
        )
    folder = build(say)
    versions = installed()
    values = {"BUILD": str(folder), "TORCH": versions.torch, "TORCH_NPU": versions.torch_npu}
    text = _TEMPLATE.read_text()
    for name, value in values.items():
        assert f'\n{name} = ""\n' in text, name
        text = text.replace(f'\n{name} = ""\n', f"\n{name} = {value!r}\n")
    site = site_packages()
    _replace(site / MODULE, text)
    _replace(site / PTH, "import npufleet_virtual_npu_boot; npufleet_virtual_npu_boot.install()\n")
    say(f"virtual NPU enabled in {site}: {settings.from_environment()}")


def disable(*, say: Callable[[str], None] = print) -> None:
    """Remove every trace of the virtual NPU from this environment. Builds in the cache stay."""
    site = site_packages()
    traces = [site / PTH, site / MODULE, *(site / "__pycache__").glob("npufleet_virtual_npu_boot.*")]
    removed = [path for path in traces if path.exists()]
    for path in removed:
        path.unlink()
    say(f"virtual NPU disabled in {site}" if removed else f"the virtual NPU was not enabled in {site}")


def status() -> Status:
    """The state of this environment. Raises ValueError when ``NPUFLEET_DEVICE`` does not parse."""
    site, device = site_packages(), str(settings.from_environment())
    module = site / MODULE
    if not (site / PTH).exists() or not module.exists():
        return Status(enabled=False, site_packages=site, device=device)
    text = module.read_text()
    values = dict(re.findall(r"^(BUILD|TORCH|TORCH_NPU) = '(.*)'$", text, re.MULTILINE))
    folder = Path(values["BUILD"])
    return Status(
        enabled=True,
        site_packages=site,
        device=device,
        build=folder,
        torch=values["TORCH"],
        torch_npu=values["TORCH_NPU"],
        stale=_stale(folder, values),
    )


def _stale(folder: Path, values: dict[str, str]) -> str:
    try:
        now = installed()
    except BuildError as error:
        return str(error)
    if (now.torch, now.torch_npu) != (values["TORCH"], values["TORCH_NPU"]):
        return f"torch {now.torch} and torch-npu {now.torch_npu} are installed now"
    if not folder.is_dir():
        return "the build is gone"
    return "" if folder.name == key(now) else "the sources have changed since"


def _replace(path: Path, text: str) -> None:
    """Write a file so that another process sees the old or the new text, never half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)
