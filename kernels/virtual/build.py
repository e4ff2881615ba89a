"""Compiles the virtual NPU's libraries with g++ and keeps them by version.

A build lives in ``NPUFLEET_HOME/virtual-npu/KEY``; KEY is a hash over the versions of torch and torch-npu,
the machine architecture and all sources, so a change of any of them is another build. A build is made in
a temporary folder and renamed into place, so that two processes may build at once.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from . import settings

NATIVE = Path(__file__).parent / "native"
RUNTIME = "libnpufleet_vnpu.so"
KERNELS = "libnpufleet_vnpu_kernels.so"
_FAST = ["-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"]  # compute loops; torch brings its OpenMP
_FLAGS = ["-std=c++20", "-O2", "-fPIC", "-Wall", "-Wno-deprecated-declarations", "-Wno-attributes"]


class BuildError(RuntimeError):
    """The virtual NPU cannot be built here; the text says what is missing or what the compiler said."""


@dataclass(frozen=True, kw_only=True)
class Versions:
    """What a build belongs to."""

    torch: str
    torch_npu: str
    machine: str


def installed() -> Versions:
    """Versions in this environment, read without importing torch. Raises BuildError when one is missing."""
    found = {}
    for name in ("torch", "torch-npu"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError as error:
            raise BuildError(f"{name} is not installed in this environment") from error
    return Versions(torch=found["torch"], torch_npu=found["torch-npu"], machine=platform.machine())


def key(versions: Versions) -> str:
    """Name of the build of these versions from the present sources."""
    digest = hashlib.sha256(repr(versions).encode())
    for path in [*sorted(NATIVE.iterdir()), Path(__file__), Path(__file__).with_name("stand_ins.py")]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"{versions.torch}-{versions.torch_npu}-{versions.machine}-{digest.hexdigest()[:16]}"


def build(say: Callable[[str], None] = lambda text: None) -> Path:
    """Returns the folder with the libraries for this environment, compiling them when they are not there.

    Raises BuildError when the compiler or a package is missing or compilation fails.
    """
    versions = installed()
    target = settings.home() / key(versions)
    if target.is_dir():
        return target
    compiler = shutil.which("g++")
    if compiler is None:
        raise BuildError("g++ was not found, which compiles the virtual NPU once (Debian: apt install g++)")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as temporary:
        work, out = Path(temporary), Path(temporary) / "lib"
        out.mkdir()
        say("compiling the virtual NPU (about a minute, once)")
        _Build(compiler=compiler, work=work, out=out).run()
        try:
            os.rename(out, target)
        except OSError:
            if not target.is_dir():  # somebody else finished first: use theirs
                raise
    return target


@dataclass(frozen=True, kw_only=True)
class _Build:
    compiler: str
    work: Path
    out: Path

    def run(self) -> None:
        # pyelftools is needed here only: a machine that runs a finished build does without it.
        from . import stand_ins

        torch, torch_npu = _package("torch"), _package("torch_npu")
        headers = torch_npu / "include" / "third_party"
        runtime_flags = [f"-I{headers}/acl/inc", f"-I{headers}/hccl/inc"]
        kernel_flags = [
            f"-I{torch}/include",
            f"-I{torch}/include/torch/csrc/api/include",
            f"-I{torch_npu}/include",
            *runtime_flags,
        ]
        sources = sorted(NATIVE.glob("*.cpp"))
        jobs = [
            (
                path,
                (kernel_flags if path.name.startswith("aten_") else runtime_flags)
                + (_FAST if path.name.startswith("aten_fast") else []),
            )
            for path in sources
        ]
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            objects = list(pool.map(lambda job: self.compile(*job), jobs))
        runtime = [item for item in objects if not item.name.startswith("aten_")]
        kernels = [item for item in objects if item.name.startswith("aten_")]
        # First link without stand-ins, to learn which names have a body.
        probe = self.work / "probe.so"
        self.link(probe, runtime)
        wanted = stand_ins.needed_from_cann(torch_npu, torch)
        text = stand_ins.source(wanted, stand_ins.exported(probe), stand_ins.allowed(NATIVE / "allowed.txt"))
        generated = self.work / "stand_ins.cpp"
        generated.write_text(text)
        self.link(self.out / RUNTIME, [*runtime, self.compile(generated, [])])
        origin = ["-Wl,-rpath,$ORIGIN", f"-L{self.out}", f"-l:{RUNTIME}"]
        for soname in stand_ins.SONAMES:
            self.link(self.out / soname, [], ["-Wl,--no-as-needed", *origin])
        torch_flags = [
            f"-L{torch}/lib",
            "-ltorch_cpu",
            "-lc10",
            f"-L{torch_npu}/lib",
            "-l:libtorch_npu.so",
            "-Wl,--unresolved-symbols=ignore-in-shared-libs",
            *map(str, _openmp(torch)),
        ]
        self.link(self.out / KERNELS, kernels, [*origin, *torch_flags])

    def compile(self, path: Path, flags: list[str]) -> Path:
        """The object of one source; taken from the cache when it, the headers and the flags are as before."""
        digest = hashlib.sha256(repr((installed(), _FLAGS, flags, path.name)).encode() + path.read_bytes())
        for header in sorted(NATIVE.glob("*.h")):
            if path.name.startswith("hccl") or not header.name.startswith("hccl"):
                digest.update(header.read_bytes())
        cache = self.work.parent / "objects"
        cache.mkdir(exist_ok=True)
        target = cache / f"{path.stem}-{digest.hexdigest()[:24]}.o"
        if not target.is_file():
            fresh = self.work / f"{path.stem}.o"
            self._call([*_FLAGS, *flags, "-c", str(path), "-o", str(fresh)])
            os.replace(fresh, target)
        return target

    def link(self, target: Path, objects: list[Path], flags: Sequence[str] = ()) -> None:
        name = f"-Wl,-soname,{target.name}"
        self._call(["-shared", "-o", str(target), *map(str, objects), name, *flags, "-lpthread", "-lrt"])

    def _call(self, arguments: list[str]) -> None:
        done = subprocess.run([self.compiler, *arguments], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BuildError(f"g++ {' '.join(arguments)}\n{done.stderr[-8000:]}")


def _openmp(torch: Path) -> list[Path]:
    """The OpenMP library that torch brings; the compiler's own would be a second one in the process."""
    found = [
        *sorted((torch / "lib").glob("libgomp*.so*")),
        *sorted((torch.parent / "torch.libs").glob("libgomp*.so*")),
    ]
    if not found:
        raise BuildError(f"torch in {torch} brings no libgomp, which its CPU wheels hold")
    return found[:1]


def _package(name: str) -> Path:
    """Folder of an installed package, found without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise BuildError(f"{name} is not installed in this environment")
    return Path(next(iter(spec.submodule_search_locations)))
