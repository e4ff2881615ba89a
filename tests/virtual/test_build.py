"""Builds: one folder per set of versions and sources, made whole or not at all."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from npufleet.kernels.virtual import build, settings

from .process import run

BUILD = "from npufleet.kernels.virtual import build; print(build.build())"


@pytest.fixture
def home(tmp_path) -> Path:
    """A cache without builds, but with the objects that were compiled before, so that a build is quick."""
    (tmp_path / "virtual-npu").mkdir()
    (tmp_path / "virtual-npu" / "objects").symlink_to(settings.home() / "objects")
    return tmp_path


def test_two_processes_may_build_at_once(home):
    build.build()  # compiles what is missing
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: run(BUILD, NPUFLEET_HOME=str(home), timeout=590), range(2))
    assert first == second
    folder = Path(first)
    assert folder.parent == home / "virtual-npu"
    assert {path.name for path in folder.iterdir()} >= {build.RUNTIME, build.KERNELS, "libascendcl.so"}
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, "objects"}


def test_the_key_follows_versions_and_sources(monkeypatch, tmp_path):
    versions = build.installed()
    here = build.key(versions)
    for change in ({"torch": "9"}, {"torch_npu": "9"}, {"machine": "riscv"}):
        assert build.key(dataclasses.replace(versions, **change)) != here
    copy = tmp_path / "native"
    copy.mkdir()
    for path in build.NATIVE.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(build, "NATIVE", copy)
    assert build.key(versions) == here
    with (copy / "graph.cpp").open("a") as file:
        file.write("\n")
    assert build.key(versions) != here


def test_a_compiler_error_is_shown(monkeypatch, home, tmp_path):
    copy = tmp_path / "native"
    copy.mkdir()
    for path in build.NATIVE.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    (copy / "broken.cpp").write_text("this is not C++;\n")
    monkeypatch.setattr(build, "NATIVE", copy)
    monkeypatch.setenv("NPUFLEET_HOME", str(home))
    with pytest.raises(build.BuildError, match=r"broken\.cpp"):
        build.build()
    assert {path.name for path in (home / "virtual-npu").iterdir()} == {"objects"}
