"""Commands, flags, links and keys that the documentation names exist, and the two commands it promises CI runs."""

from __future__ import annotations

import argparse
import re
import shlex
from dataclasses import fields
from pathlib import Path

from npufleet.cluster import cli, config
from npufleet.cluster.admission.settings import AdmissionSettings
from npufleet.cluster.router.hedge import HedgeSettings
from npufleet.cluster.tls import ServerTls

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
OF_OTHERS = {"--num-cpus", "--generate", "--force"}  # ray start, ray get-auth-token, pip


def make_targets() -> set[str]:
    text = (ROOT / "Makefile").read_text()
    return set(re.findall(r"^([a-z][a-z-]*):", text, flags=re.M))


def test_every_make_command_in_the_docs_exists() -> None:
    targets = make_targets()
    for page in PAGES:
        for name in re.findall(r"`make ([a-z-]+)", page.read_text()) + re.findall(
            r"^\s*make ([a-z-]+)", page.read_text(), flags=re.M
        ):
            assert name in targets, f"{page.name} names `make {name}`, which the Makefile has not"


def test_two_commands_start_everything() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "make demo" in readme and "make test" in readme
    assert re.search(r"^\s*make test\b", (ROOT / ".ci" / "run").read_text(), flags=re.M)


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def slug(heading: str) -> str:
    """The anchor that a Markdown heading gets."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text).strip().lower().replace(" ", "-")


def test_links_into_pages_lead_to_a_heading() -> None:
    headings = {
        page: {slug(found) for found in re.findall(r"^#+\s+(.*)$", page.read_text(), flags=re.M)}
        for page in PAGES
    }
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)]+)\)", page.read_text()):
            other = (page.parent / target).resolve() if target else page
            assert anchor in headings[other], f"{page.name} links to {target}#{anchor}"


def options(parser: argparse.ArgumentParser) -> set[str]:
    found = set[str]()
    for action in parser._actions:
        found.update(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            found.update(*map(options, action.choices.values()))
    return found


def test_every_flag_in_the_docs_exists() -> None:
    known = options(cli.parser("route")) | OF_OTHERS
    for page in PAGES:
        for flag in re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", page.read_text()):
            assert flag in known, f"{page.name} names {flag}, which no command knows"


def test_every_command_in_the_docs_exists() -> None:
    for page in PAGES:
        for line in re.findall(r"(?:^|`|\$ |/)npufleet ([a-z][^`\n]*)", page.read_text(), flags=re.M):
            words = shlex.split(re.sub(r"\s+#.*$|[>&].*$", "", line), posix=True)
            whole = "…" not in line and not any(word.isupper() for word in words) and len(words) > 2
            if "|" in words or not whole:
                words = words[:1]  # a row of a table, a form with places to fill in, or a name in a sentence
                if words[0] in ("router", "gateway"):
                    continue
            assert parses(words), f"{page.name}: npufleet {line}"


def parses(words: list[str]) -> bool:
    """Whether the command line takes ``words``; a single one must be a command."""
    if len(words) == 1:
        return words[0] in next(
            action.choices
            for action in cli.parser()._actions
            if isinstance(action, argparse._SubParsersAction)
        )
    try:
        cli.parser(words[0]).parse_args(words)
    except SystemExit:
        return False
    return True


def test_every_key_of_a_fleet_is_in_the_table() -> None:
    table = (ROOT / "docs" / "configuration.md").read_text()
    sections = {
        "router": config.RouterConfig,
        "gateway": config.GatewayConfig,
        "metrics": config.MetricsConfig,
        "placement": config.PlacementConfig,
        "healing": config.HealingConfig,
        "models[]": config.ModelConfig,
    }
    for section, kind in sections.items():
        for field in fields(kind):
            if (section, field.name) != ("models[]", "scaling"):  # written as a mapping in models[].engines
                assert f"`{section}.{field.name}`" in table, (
                    f"{section}.{field.name} is not in the table of keys"
                )
    for settings in (AdmissionSettings, HedgeSettings, ServerTls):
        for field in fields(settings):
            assert field.name in table, f"{field.name} is not in the table of keys"
