"""A running fleet is changed under load: real Ray, Serve, controller, router and gateway over engines without models.

One test, because the fleet takes half a minute to come up: each part needs what the one before has left.
"""

from __future__ import annotations

import httpx
import pytest

from .hollow import REFUSED
from .hollow_user import HollowUser
from .streams import Stream

pytestmark = pytest.mark.slow


def test_a_fleet_changes_under_load_and_nobody_notices(hollow: HollowUser) -> None:
    hollow.start(hollow.config(hollow.model("alpha", 2, seed=0)))
    streams = [Stream(hollow.ports["router"], "alpha") for _ in range(4)]
    first = hollow.engines("alpha")
    controller, front = hollow.processes("Controller"), hollow.processes("Router")

    told = hollow.run("scale", "alpha", "3", "--yes")
    assert told.returncode == 0, told
    assert len(hollow.engines("alpha")) == 3 and first < hollow.engines("alpha")

    rolled = hollow.config(hollow.model("alpha", 2, seed=7), hollow.model("beta", 1))
    told = hollow.run("deploy", str(rolled), "--dry-run")
    assert "roll     alpha: seed 0 -> 7" in told.stdout and "add      beta" in told.stdout, told
    assert hollow.engines("alpha") >= first, "a dry run changes nothing"
    told = hollow.run("deploy", str(rolled), "--yes")
    assert told.returncode == 0, told
    assert not hollow.engines("alpha") & first and len(hollow.engines("alpha")) == 2
    assert (
        httpx.get(f"http://127.0.0.1:{hollow.ports['gateway']}/v1/models").json()["data"][1]["id"] == "beta"
    )

    present = hollow.engines("alpha")
    bad = hollow.config(hollow.model("alpha", 2, seed=7, max_num_seqs=REFUSED), hollow.model("beta", 1))
    told = hollow.run("deploy", str(bad), "--yes")
    assert told.returncode == 1 and "13 sequences bring no luck" in told.stdout, told
    assert hollow.status()["change"]["state"] == "rolled back"
    assert hollow.engines("alpha") == present, "nothing of what ran was touched"

    told = hollow.run("deploy", str(hollow.config(hollow.model("alpha", 2, seed=7))), "--yes")
    assert told.returncode == 0, told
    assert hollow.engines("beta") == set()
    for stream in streams:
        stream.stop()
    assert [text for stream in streams for text in stream.failed] == []
    assert all(stream.seeds.keys() == {0, 7} for stream in streams), [stream.seeds for stream in streams]
    assert hollow.processes("Controller") == controller and hollow.processes("Router") == front
