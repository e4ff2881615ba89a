"""A port is shared by the front ends of one fleet and closed to those of another."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from npufleet.cluster.port_claim import PortClaim


def test_front_ends_of_one_fleet_share_a_port_and_others_are_refused(tmp_path: Path) -> None:
    first, second = PortClaim(8000, "ours", tmp_path), PortClaim(8000, "ours", tmp_path)
    other = PortClaim(8001, "theirs", tmp_path)
    with pytest.raises(OSError, match="front ends of another fleet have port 8000"):
        PortClaim(8000, "theirs", tmp_path)
    first.close()
    with pytest.raises(OSError, match="8000"):
        PortClaim(8000, "theirs", tmp_path)
    second.close()
    third = PortClaim(8000, "theirs", tmp_path)
    with pytest.raises(OSError, match="8000"):
        PortClaim(8000, "ours", tmp_path)
    third.close()
    other.close()


def test_a_dead_process_has_no_claim(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from npufleet.cluster.port_claim import PortClaim;"
        f"claim = PortClaim(8000, 'theirs', Path({str(tmp_path)!r})); print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    with pytest.raises(OSError, match="8000"):
        PortClaim(8000, "ours", tmp_path)
    holder.kill()
    holder.communicate()
    PortClaim(8000, "ours", tmp_path).close()


def test_the_name_of_a_fleet_is_in_no_file(tmp_path: Path) -> None:
    claim = PortClaim(8000, "a secret of the fleet", tmp_path)
    (file,) = tmp_path.rglob("8000")
    assert b"secret" not in file.read_bytes() and file.stat().st_mode & 0o077 == 0
    claim.close()
