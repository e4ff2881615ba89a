"""Ctrl-C: everything ends, and nothing is left. Runs last: it stops the session's fleet."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import openai
import psutil
import pytest

from npufleet.cluster import runs

from .fleet import Fleet, gone, sockets
from .load import Load


def shared_memory(processes: list[psutil.Process]) -> set[Path]:
    """The shared-memory files that the processes have mapped."""
    found: set[Path] = set()
    for process in processes:
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
        except OSError:
            continue
        found |= {Path(path) for path in re.findall(r"(/dev/shm/\S+)$", maps, re.MULTILINE)}
    return {path for path in found if path.exists()}


def test_a_stop_lets_answers_end_and_leaves_nothing(fleet: Fleet, client: openai.OpenAI) -> None:
    assert fleet.process is not None
    run = runs.find(fleet.name)
    folder = Path(run.folder)
    assert folder.is_dir()
    family = fleet.processes()
    assert len(family) > 8
    memory = shared_memory(family)
    assert memory, "engines speak to their workers through shared memory"
    files = sockets(family)
    ports = {fleet.http, fleet.grpc, fleet.metrics}
    ports |= {int(engine["address"].rsplit(":", 1)[1]) for engine in fleet.status()["engines"]}

    load = Load(client, 2, tokens=24)
    assert fleet.stop() == 0, fleet.said()
    whole, _ = load.wait()
    assert len(whole) == 2, "running answers may end first"

    assert "had to kill" not in fleet.said()
    assert [process.pid for process in family if not gone(process)] == []
    assert [path for path in memory if path.exists()] == []
    assert [path for path in files if path.exists()] == []
    assert not folder.exists()
    with pytest.raises(ValueError, match="no fleet named"):
        runs.find(fleet.name)
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
