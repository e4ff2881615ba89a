"""One fleet for all end-to-end tests: two engines of the demo model behind router and gateway."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from .fleet import Fleet
from .hollow_user import HollowUser


@pytest.fixture(scope="package")  # ends with the last of these files: idle engines still cost CPU
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(log=tmp_path_factory.mktemp("fleet") / "serve.log")
    try:
        fleet.start()
        yield fleet
        fleet.stop()
    finally:
        fleet.kill()


@pytest.fixture
def fleet(started: Fleet) -> Fleet:
    """The fleet with both engines up: a test that broke one leaves it to the next to wait."""
    started.whole()
    return started


@pytest.fixture
def client(fleet: Fleet) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0, timeout=180)


@pytest.fixture
def hollow(tmp_path: Path) -> Iterator[HollowUser]:
    """A fleet without models, not yet started."""
    made = HollowUser(tmp_path)
    try:
        yield made
    finally:
        made.stop()
