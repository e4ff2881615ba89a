"""Front ends as the controller knows them, and whose fault silence is."""

from __future__ import annotations

import asyncio
import socket

from npufleet.cluster.controller.hearing import Hearing
from npufleet.cluster.controller.registry import EXPIRY_S, HEARTBEAT_S, SILENT_S
from npufleet.cluster.controller.services import Services


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found: int = probe.getsockname()[1]
        return found


async def test_a_killed_front_end_is_forgotten_at_once_and_a_silent_one_later() -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    known = Services()
    known.heard("hangs", "gateway", f"http://127.0.0.1:{port}/metrics", 0.0)
    known.heard("killed", "gateway", f"http://127.0.0.1:{closed_port()}/metrics", 0.0)
    await known.sweep(SILENT_S)
    assert known.front_ends() == 2, "a heartbeat may be late"
    await known.sweep(SILENT_S + 0.1)
    assert known.targets() == [("gateway", f"http://127.0.0.1:{port}/metrics")]
    await known.sweep(EXPIRY_S + 0.1, fair=False)
    assert known.front_ends() == 1, "nobody could be heard"
    await known.sweep(EXPIRY_S + 0.1)
    assert known.targets() == []
    server.close()


def test_a_front_end_that_leaves_takes_all_its_services_along() -> None:
    known = Services()
    for name in ("front-1", "front-12"):
        known.heard(name, "gateway", f"http://here:1/{name}", 0.0)
        known.heard(f"{name}-router", "router", f"http://here:2/{name}", 0.0)
    assert known.front_ends() == 2
    known.remove("front-1")
    known.remove("front-1")
    assert known.targets() == [
        ("gateway", "http://here:1/front-12"),
        ("router", "http://here:2/front-12"),
    ]


def test_silence_of_all_is_no_fault_of_engines() -> None:
    hearing = Hearing(period=1.0, heard=0.0, looked=0.0)

    def look(now: float) -> bool:
        fair = hearing.fair(now)
        hearing.looked = now
        return fair

    assert look(1.0)
    for now in range(2, 60):  # a caller that hangs holds back the heartbeats of all
        assert look(now) is (now <= SILENT_S)
    hearing.heard = 60.0
    assert not look(60.0)
    assert not look(59.0 + 2 * HEARTBEAT_S), "the others come after it"
    hearing.heard = 64.0
    assert look(64.0)
    hearing.heard = 90.0
    assert not look(90.0), "this process itself was halted"
