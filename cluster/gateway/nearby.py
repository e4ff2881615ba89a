"""Small prompts are rendered and tokenized where they came in, not in a thread.

vLLM's renderer does both in a thread, so that a long prompt does not hold up the event loop. For a short one handing
it over twice costs more than the work: two wake-ups each way, and each time Python's lock has to be won from a loop
that is busy with the tokens of running streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, TypeVar

from vllm.renderers import BaseRenderer

MOST_CHARACTERS = 2048  # of text within all arguments; tokenizing as many takes about half a millisecond
_UNMEASURED = frozenset({"chat_template"})  # arguments whose length says nothing about the work

T = TypeVar("T")


class NearExecutor(Executor):
    """Does what is small at once, in the thread that asks for it, and has ``far`` do the rest."""

    def __init__(self, far: Executor) -> None:
        self._far = far

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """As in the base."""
        if not _is_small(fn, args, kwargs):
            return self._far.submit(fn, *args, **kwargs)
        done: Future[T] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to whoever asked for the result
            done.set_exception(error)
        return done

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As in the base."""
        self._far.shutdown(wait, cancel_futures=cancel_futures)


def render_nearby(renderer: BaseRenderer[Any]) -> None:
    """Let ``renderer`` do small work at once: the executor within its own, which vLLM replaces as a whole when a
    template hangs, is put behind a :class:`NearExecutor`.
    """
    renderer._executor._inner = NearExecutor(renderer._executor._inner)  # type: ignore[assignment]


def _is_small(fn: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any]) -> bool:
    given = [*args, *(value for name, value in kwargs.items() if name not in _UNMEASURED)]
    while isinstance(fn, partial):
        given += [*fn.args, *(value for name, value in fn.keywords.items() if name not in _UNMEASURED)]
        fn = fn.func
    return _room(given, MOST_CHARACTERS) >= 0


def _room(value: Any, room: int) -> int:
    """What of ``room`` characters ``value`` leaves, below 0 where it is too large; an entry counts as one more."""
    left = [value]  # a request may nest values deeper than Python nests calls
    while left and room >= 0:
        value = left.pop()
        if isinstance(value, (str, bytes)):
            room -= len(value)
        elif isinstance(value, Mapping):
            room -= 2 * len(value)
            left += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple)):
            room -= len(value)
            left += value
    return room
