"""vLLM's own tests: from its source package, unpacked once into the cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib import metadata
from pathlib import Path

from npufleet.cluster import env

VERSION = metadata.version("vllm").split("+")[0]
PARTS = ("tests", "examples", "pyproject.toml")  # not vllm/ itself: the installed one is under test


class Unavailable(Exception):
    """The source package cannot be fetched; the text says why."""


def ensure() -> Path:
    """The folder with vLLM's ``tests`` and ``examples``, fetched by pip if the cache has none.

    Raises:
        Unavailable: without a package index.
    """
    folder = env.home() / "upstream" / f"vllm-{VERSION}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        archive = _download(Path(work))
        with tarfile.open(archive) as source:
            wanted = [m for m in source.getmembers() if m.name.split("/", 2)[1:2] and _is_wanted(m.name)]
            source.extractall(work, members=wanted, filter="data")
        unpacked = Path(work) / f"vllm-{VERSION}"
        try:
            unpacked.rename(folder)
        except OSError:  # another process was faster
            if not folder.exists():
                raise
    return folder


def _is_wanted(name: str) -> bool:
    return name.split("/", 2)[1] in PARTS


def _download(work: Path) -> Path:
    # pip asks the package for its metadata, which runs vLLM's set-up: that needs the torch of this
    # environment, the "empty" target, and a version without the suffix that this target adds.
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation"]
    command += ["--no-binary", "vllm", f"vllm=={VERSION}", "-d", str(work)]
    settings = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": VERSION}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env={**os.environ, **settings}, check=False
    )
    if result.returncode:
        reason = result.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise Unavailable(f"vLLM's source package cannot be fetched: {reason[0]}")
    return next(work.glob("vllm-*.tar.gz"))


def dummy_plugins(tree: Path, target: Path) -> Path:
    """Make vLLM's dummy plugins importable and discoverable from ``target`` without installing them."""
    packages = {
        "vllm_add_dummy_platform": "vllm_add_dummy_platform",
        "vllm_add_dummy_stat_logger": "dummy_stat_logger",
        "vllm_add_dummy_endpoint_plugin": "vllm_add_dummy_endpoint_plugin",
    }
    for folder, package in packages.items():
        shutil.copytree(tree / "tests" / "plugins" / folder / package, target / package)
    info = target / "vllm_dummy_plugins-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm_dummy_plugins\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return target


ENTRY_POINTS = """\
[vllm.platform_plugins]
dummy_platform_plugin = vllm_add_dummy_platform:dummy_platform_plugin
[vllm.general_plugins]
dummy_custom_ops = vllm_add_dummy_platform:register_ops
[vllm.stat_logger_plugins]
dummy_stat_logger = dummy_stat_logger.dummy_stat_logger:DummyStatLogger
[vllm.endpoint_plugins]
dummy_admin_endpoint_plugin = vllm_add_dummy_endpoint_plugin:DummyAdminEndpointPlugin
"""
