"""Small prompts are rendered at once, others in vLLM's threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.renderers import base

from npufleet.cluster.gateway.nearby import MOST_CHARACTERS, NearExecutor, render_nearby

LONG = "x" * (MOST_CHARACTERS + 1)


def where(*args: Any, **kwargs: Any) -> int:
    return threading.get_ident()


@pytest.mark.parametrize(
    ("args", "kwargs", "near"),
    [
        (({"prompt": "short"}, object()), {}, True),
        (({"prompt": LONG},), {}, False),
        (([{"role": "user", "content": "x"}],), {"chat_template": LONG, "tools": None}, True),
        (([{"role": "user", "content": [{"type": "text", "text": LONG}]}],), {}, False),
        (([{"role": "user", "content": "x"}] * MOST_CHARACTERS,), {}, False),
        (([],), {"tools": [{"function": {"description": LONG}}]}, False),
        ((list(range(MOST_CHARACTERS + 1)),), {}, False),
    ],
)
def test_size_decides_where(args: tuple, kwargs: dict, near: bool):
    with ThreadPoolExecutor(1) as far:
        executor = NearExecutor(far)
        for future in (
            executor.submit(where, *args, **kwargs),
            executor.submit(partial(where, *args, **kwargs)),
        ):
            assert (future.result() == threading.get_ident()) is near


def test_a_value_may_be_nested_deeper_than_calls():
    deep: list[Any] = []
    for _ in range(MOST_CHARACTERS - 100):
        deep = [deep]
    with ThreadPoolExecutor(1) as far:
        executor = NearExecutor(far)
        assert executor.submit(where, chat_template_kwargs={"x": deep}).result() == threading.get_ident()
        assert executor.submit(where, [[deep]] * 101).result() != threading.get_ident()


def test_an_error_comes_with_the_result():
    with ThreadPoolExecutor(1) as far, pytest.raises(ZeroDivisionError):
        NearExecutor(far).submit(lambda: 1 / 0).result()


def test_vllms_renderers_take_it_and_can_still_replace_their_threads():
    executor = base._SwappableExecutor(1)
    renderer: Any = SimpleNamespace(_executor=executor)
    render_nearby(renderer)
    assert executor.submit(where, "x").result() == threading.get_ident()
    executor.replace_inner()
    assert executor.submit(where, "x").result() != threading.get_ident()
    executor.shutdown()
