"""The README's commands exist, and the two it promises are the ones that CI runs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def make_targets() -> set[str]:
    text = (ROOT / "Makefile").read_text()
    return set(re.findall(r"^([a-z][a-z-]*):", text, flags=re.M))


def test_every_make_command_in_the_docs_exists() -> None:
    targets = make_targets()
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for name in re.findall(r"`make ([a-z-]+)", page.read_text()) + re.findall(
            r"^\s*make ([a-z-]+)", page.read_text(), flags=re.M
        ):
            assert name in targets, f"{page.name} names `make {name}`, which the Makefile has not"


def test_two_commands_start_everything() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "make demo" in readme and "make test" in readme
    assert re.search(r"^\s*make test\b", (ROOT / ".ci" / "run").read_text(), flags=re.M)


def test_links_between_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
