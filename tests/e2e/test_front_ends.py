"""Two front ends share the ports of one machine: one dies, the other serves on; their number changes under load."""

from __future__ import annotations

import contextlib
import time

import httpx
import psutil
import pytest

from npufleet.cluster.controller.registry import EXPIRY_S

from .fleet import RECOVER_S, eventually, kill
from .hollow_user import HollowUser
from .streams import Stream

pytestmark = pytest.mark.slow
FRONT = "ServeReplica:npufleet:Router"


def listening(processes: list[psutil.Process], port: int) -> list[int]:
    """Those of them that listen on the port."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it ends just now
            connections = process.net_connections("tcp")
            if any(c.status == "LISTEN" and c.laddr.port == port for c in connections):
                found.append(process.pid)
    return found


def test_one_of_two_front_ends_dies_and_the_other_serves(hollow: HollowUser) -> None:
    hollow.start(hollow.config(hollow.model("alpha", 1)))
    first = hollow.processes(FRONT)[0]
    ports = [hollow.ports[name] for name in ("gateway", "router")]

    def change(front_ends: int) -> None:
        told = hollow.run(
            "deploy", str(hollow.config(hollow.model("alpha", 1), front_ends=front_ends)), "--yes"
        )
        assert told.returncode == 0 and "scale    front ends" in told.stdout, told

    def serve(count: int) -> None:
        for port in ports:
            eventually(
                f"{count} listen on {port}",
                RECOVER_S,
                lambda port=port: len(listening(hollow.processes(FRONT), port)) == count,
            )

    def answers() -> None:
        # A new connection each time, so that each front end is met.
        for _ in range(20):
            answer = httpx.post(
                f"http://127.0.0.1:{ports[0]}/v1/completions",
                json={"model": "alpha", "prompt": "hello", "max_tokens": 3},
                timeout=30,
            )
            assert answer.status_code == 200, answer.text

    change(2)
    serve(2)
    assert first.pid in listening(hollow.processes(FRONT), ports[0]), "the first one stayed"
    answers()
    targets = httpx.get(f"http://127.0.0.1:{hollow.ports['metrics']}/sd", timeout=10).json()
    found = [
        target
        for entry in targets
        for target in entry["targets"]
        if entry["labels"].get("component") == "gateway"
    ]
    assert len(set(found)) == 2, targets
    for target in found:
        assert "npufleet_gateway_engines" in httpx.get(f"http://{target}/metrics", timeout=10).text

    streams = [Stream(ports[1], "alpha") for _ in range(6)]
    time.sleep(1.0)
    kill(first)
    answers()
    serve(2)
    answers()
    change(1)
    serve(1)
    answers()
    for stream in streams:
        stream.stop()
    assert not [text for stream in streams for text in stream.failed if text.startswith("wrong")]
    assert all(stream.seeds for stream in streams)


@pytest.mark.parametrize("front_ends", [1, 2])
def test_front_ends_with_other_settings_begin_before_those_that_are_there_end(
    hollow: HollowUser, front_ends: int
) -> None:
    model = hollow.model("alpha", 1)
    hollow.start(hollow.config(model, front_ends=front_ends))
    before = {process.pid for process in hollow.processes(FRONT)}
    streams = [Stream(hollow.ports["router"], "alpha") for _ in range(4)]
    changed = hollow.config(model, front_ends=front_ends, router={"policy": "round-robin"})
    assert hollow.run("deploy", str(changed), "--yes").returncode == 0
    eventually(
        "all are others",
        RECOVER_S,
        lambda: (
            before.isdisjoint(now := {process.pid for process in hollow.processes(FRONT)})
            and len(now) == front_ends
        ),
    )
    eventually("the status knows", RECOVER_S, lambda: hollow.status()["front_ends"]["ready"] == front_ends)
    for stream in streams:
        stream.stop()
    assert [text for stream in streams for text in stream.failed] == []
    assert all(stream.seeds for stream in streams)


def test_a_front_end_that_hangs_does_not_make_the_controller_forget_engines(hollow: HollowUser) -> None:
    hollow.start(hollow.config(hollow.model("alpha", 1), front_ends=2))
    eventually("two serve", RECOVER_S, lambda: hollow.status()["front_ends"]["ready"] == 2)
    engine = hollow.engines("alpha")
    hanging = hollow.processes(FRONT)[0]
    hanging.suspend()
    try:
        until = time.monotonic() + EXPIRY_S + 5.0
        while time.monotonic() < until:
            assert hollow.engines("alpha") == engine
            time.sleep(0.5)
        assert hollow.status()["health"]["deaths"] == []
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):  # Serve may have given it up
            hanging.resume()
