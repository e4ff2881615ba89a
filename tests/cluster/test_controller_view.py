"""What the controller knows of Ray while its head is away: one read at a time, and the last one stands."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from npufleet.cluster.controller.view import EMPTY, HeadAway, RayView

TOLD = replace(EMPTY, created=frozenset({"e"}))


async def test_a_head_that_is_away_is_told_and_the_last_answer_stands() -> None:
    back = threading.Event()
    reads: list[int] = []

    def read():
        reads.append(len(reads))
        if len(reads) == 2:
            assert back.wait(60)
        return TOLD

    view = RayView(read=read)
    assert await view.latest() == (TOLD, 0.0)
    view.patience = 0.05
    state, silent = await view.latest()
    assert state == TOLD and silent >= 0.05
    asked = await asyncio.gather(*(view.now() for _ in range(5)), return_exceptions=True)
    assert {type(answer) for answer in asked} == {HeadAway}
    assert len(reads) == 2, "whoever asks waits for the read that is under way"
    back.set()
    view.patience = 60.0
    assert await view.now() == TOLD
    assert len(reads) == 3, "and the next one sees the present"


async def test_what_ray_raises_is_a_head_that_is_away() -> None:
    def read():
        raise ConnectionError("gone")

    view = RayView(read=read)
    with pytest.raises(HeadAway, match="Ray's head does not answer: gone"):
        await view.now()
    assert (await view.latest())[0] == EMPTY
