"""Each seeded fault still finds the line that it changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.seeded_faults.catalogue import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_finds_its_line_once(fault: Fault) -> None:
    assert (ROOT / fault.file).read_text().count(fault.old) == 1
    assert fault.new != fault.old
