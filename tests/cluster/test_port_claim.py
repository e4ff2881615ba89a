"""A port is shared by the front ends of one fleet and closed to those of another."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from npufleet.cluster import port_claim
from npufleet.cluster.port_claim import PortClaim

HOST = "127.0.0.1"
claim = partial(PortClaim, HOST)


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        found: int = probe.getsockname()[1]
        return found


def test_front_ends_of_one_fleet_share_a_port_and_others_are_refused(tmp_path: Path, port: int) -> None:
    first, second = claim(port, "ours", tmp_path), claim(port, "ours", tmp_path)
    assert not first.shared and second.shared
    other = claim(0, "theirs", tmp_path)
    with pytest.raises(OSError, match=f"front ends of another fleet have port {port}"):
        claim(port, "theirs", tmp_path)
    first.close()
    with pytest.raises(OSError, match=str(port)):
        claim(port, "theirs", tmp_path)
    second.close()
    third = claim(port, "theirs", tmp_path)
    with pytest.raises(OSError, match=str(port)):
        claim(port, "ours", tmp_path)
    third.close()
    other.close()


def test_a_dead_process_has_no_claim(tmp_path: Path, port: int) -> None:
    code = (
        "import sys; from pathlib import Path; from npufleet.cluster.port_claim import PortClaim;"
        f"claim = PortClaim({HOST!r}, {port}, 'theirs', Path({str(tmp_path)!r}));"
        "print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    with pytest.raises(OSError, match=str(port)):
        claim(port, "ours", tmp_path)
    holder.kill()
    holder.communicate()
    claim(port, "ours", tmp_path).close()


def test_the_file_of_a_claim_names_no_fleet_and_stays(tmp_path: Path, port: int) -> None:
    made = claim(port, "a secret of the fleet", tmp_path)
    (file,) = tmp_path.rglob(f"*-{port}")
    assert b"secret" not in file.read_bytes() and file.stat().st_mode & 0o077 == 0
    os.utime(file, (1.0, 1.0))
    made.touch()
    assert file.stat().st_mtime > 1.0, "or whoever cleans temporary files would remove it one day"
    made.close()


def test_the_first_front_end_shares_no_port_with_another_program(tmp_path: Path, port: int) -> None:
    with socket.socket() as other:  # as `vllm serve` opens its port, whose clients we would get a part of
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind((HOST, port))
        other.listen()
        with pytest.raises(OSError, match=f"cannot listen on {HOST}:{port}"):
            claim(port, "ours", tmp_path)
    claim(port, "ours", tmp_path).close()


def test_a_claim_that_cannot_be_written_is_no_claim(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            claim(port, "ours", tmp_path)
    claim(port, "ours", tmp_path).close()


def test_claims_are_written_where_nobody_else_can_write(tmp_path: Path, port: int) -> None:
    folder = tmp_path / f"npufleet-ports-{os.getuid()}"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder.symlink_to(elsewhere)
    with pytest.raises(OSError, match="only this user can write to; remove it"):
        claim(port, "ours", tmp_path)
    assert not [*elsewhere.iterdir()]
    folder.unlink()
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(OSError, match="only this user can write to; remove it"):
        claim(port, "ours", tmp_path)
    folder.chmod(0o700)
    other = claim(0, "ours", tmp_path)  # keeps the folder
    mine = claim(port, "ours", tmp_path)
    (file,) = folder.glob(f"*-{port}")
    mine.close()
    kept = elsewhere / "kept"
    kept.write_text("of value")
    file.unlink()
    file.symlink_to(kept)
    with pytest.raises(OSError, match=str(port)):
        claim(port, "ours", tmp_path)
    other.close()
    assert kept.read_text() == "of value"


def test_networks_of_one_machine_have_ports_of_their_own(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = claim(port, "ours", tmp_path)
    monkeypatch.setattr(port_claim, "_network", lambda: 1)
    claim(port, "theirs", tmp_path).close()
    ours.close()


def test_the_last_claim_takes_the_folder_along_and_the_next_makes_it_anew(tmp_path: Path, port: int) -> None:
    for _ in range(2):
        first, second = claim(port, "ours", tmp_path), claim(0, "ours", tmp_path)
        (folder,) = tmp_path.iterdir()
        second.close()
        assert folder.exists() and len(list(folder.iterdir())) == 2
        with pytest.raises(OSError, match="another fleet"):
            claim(port, "theirs", tmp_path)
        first.close()
        assert not folder.exists()


def test_claims_that_come_and_go_at_once_are_never_lost(tmp_path: Path) -> None:
    """Each has a folder that is there, whoever removes the one before at the same moment."""
    failed: list[OSError] = []

    def come_and_go() -> None:
        for _ in range(200):
            try:
                mine = claim(0, "ours", tmp_path)
                assert (tmp_path / f"npufleet-ports-{os.getuid()}").exists()
                mine.close()
            except OSError as error:
                failed.append(error)

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and not list(tmp_path.iterdir())
