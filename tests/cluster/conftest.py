"""Fixtures of the cluster tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.fleet import Fleet


@pytest.fixture(scope="session")
def running_fleet() -> Iterator[Fleet]:
    """Fake engines and a gateway over them, shared by all tests."""
    fleet = Fleet()
    try:
        fleet.wait_loaded()
        yield fleet
    finally:
        code = fleet.close()
    assert code == 0, "the gateway did not end cleanly"


@pytest.fixture
def fleet(running_fleet: Fleet) -> Fleet:
    """The shared fleet with every engine up and well-behaved."""
    running_fleet.reset()
    return running_fleet
