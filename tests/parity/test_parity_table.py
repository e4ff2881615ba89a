"""The parity table tells what happened: a run that breaks is a *no* with its reason; the page holds every family."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import forks, parity

from .checkpoints import BY_NAME

COLUMNS = ("TP2", "PP2")


class Answer:
    """Stands for a cell."""

    def __init__(self, value: str) -> None:
        self.value, self.detail = value, ""


def crash(_: Any) -> Iterator[dict[str, Answer]]:
    yield {"TP2": Answer("yes")}
    os.abort()


def error(_: Any) -> Iterator[dict[str, Answer]]:
    yield {"TP2": Answer("yes")}
    raise ValueError("no such layout")


@pytest.mark.parametrize(
    ("run", "reason"),
    [(crash, "ended with -6"), (error, "ValueError: no such layout")],
    ids=["crash", "error"],
)
def test_what_a_run_did_not_answer_is_no(run: Any, reason: str, tmp_path: Path) -> None:
    cells = parity.supervise(COLUMNS, run, None, tmp_path / "log")  # type: ignore[arg-type]
    assert cells["TP2"]["value"] == "yes"
    assert cells["PP2"]["value"] == "no" and reason in cells["PP2"]["detail"]
    assert "| x | yes | no |" in parity.table({"x": cells})
    assert any(reason in line for line in parity.remarks({"x": cells}))


def test_a_run_that_hangs_is_ended(tmp_path: Path) -> None:
    def hang() -> Iterator[None]:
        while True:
            pass
        yield

    with pytest.raises(forks.Broken, match="no answer within"):
        list(forks.answers(hang, tmp_path / "log", deadline=0.2))


def test_the_page_holds_every_family_and_no_failure() -> None:
    assert set(parity.FAMILIES.values()) <= set(BY_NAME)
    rows = [line for line in parity.PAGE.read_text().splitlines() if line.startswith("| ")]
    for family in parity.FAMILIES:
        (row,) = [line for line in rows if line.startswith(f"| {family} |")]
        cells = [cell.strip() for cell in row.strip("|").split("|")[1:]]
        assert len(cells) == len(parity.COLUMNS)
        assert not [cell for cell in cells if cell.startswith("no")]
