"""An engine's sockets lie in a folder that does not outlive it for long."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from npufleet.cluster.engine import sockets, worker_launch


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary files are; its path is short, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="s-") as path:
        monkeypatch.setattr(tempfile, "tempdir", path)
        monkeypatch.setenv("TMPDIR", path)
        monkeypatch.setenv(sockets.BASE, "")  # so that it is put back afterwards
        monkeypatch.delenv(sockets.BASE)
        yield Path(path)


def _worker(program: str, *arguments: str) -> subprocess.Popen[str]:
    command = [*worker_launch.command(sys.executable, {}).split(), "-c", program, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


SHOW = f"import os, time; print(os.environ['{sockets.BASE}'], flush=True); time.sleep(600)"


def test_the_folder_is_told_to_vllm_and_goes_with_the_engine(temporary: Path) -> None:
    folder = sockets.make()
    assert os.environ[sockets.BASE] == str(folder.path)
    assert folder.path.parent == temporary and folder.path.stat().st_mode & 0o777 == 0o700
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder.path / str(uuid4())))
        sockets.end(folder)
    sockets.end(folder)
    assert list(temporary.iterdir()) == [] and sockets.BASE not in os.environ


def test_the_core_removes_it_and_nothing_else(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = sockets.make()
    (folder.path / "socket").touch()
    sockets.remove()
    assert not folder.path.exists()
    own = temporary / "of-the-user"
    own.mkdir()
    monkeypatch.setenv(sockets.BASE, str(own))
    sockets.remove()
    assert own.is_dir()


def test_it_lies_where_the_user_wants_sockets(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = temporary / "run"
    wanted.mkdir()
    monkeypatch.setenv(sockets.BASE, str(wanted))
    first = sockets.make()
    second = sockets.make()  # an engine that follows in the same process
    assert {first.path.parent, second.path.parent} == {wanted}
    sockets.end(second)
    sockets.end(first)


def test_no_path_gets_too_long(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = temporary / ("d" * 60)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder = sockets.make()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder.path / str(uuid4())))
    sockets.end(folder)
    assert not folder.path.exists()


def test_workers_beside_the_engine_use_its_folder(temporary: Path) -> None:
    folder = sockets.make()
    with _worker(SHOW) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline().strip() == str(folder.path)
        worker.kill()
    sockets.end(folder)


def test_a_worker_on_another_node_has_one_of_its_own(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(sockets.BASE, str(temporary / f"{sockets.PREFIX}elsewhere"))
    with _worker(SHOW) as worker:
        assert worker.stdout is not None
        own = Path(worker.stdout.readline().strip())
        sockets.tidy()
        assert own.is_dir(), "the folder of a living worker was removed"
        worker.kill()
        worker.wait()
    assert own.is_dir()
    sockets.tidy()
    assert list(temporary.iterdir()) == []
