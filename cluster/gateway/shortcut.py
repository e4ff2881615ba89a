"""From an engine's message to the client's connection within one turn of the event loop, for streams of plain text.

On vLLM's way a token is put into a list, which wakes the output processor, which makes an output of it, which wakes the
stream's task, which makes an event of it, which passes ASGI. Of a stream whose events differ in their text alone
(:mod:`plain`) all this comes to: text from the token, the text between the halves of an event, a write. A
:class:`Shortcut` does that, with vLLM's own detokenizer and statistics of the request.

It is open while its stream's task has sent all that came and waits for more, so nothing overtakes anything; the last
tokens, errors and whatever else is no token go vLLM's way. Tokens of a stream that came in one turn become one event,
as vLLM's collector makes of what its consumer did not keep up with.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from traceback import format_exc

from pydantic_core import to_json
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer
from vllm.v1.engine.output_processor import RequestState

from .metrics import ModelStats
from .outlet import Outlet

logger = logging.getLogger(__name__)


class Shortcut:
    """Of one stream."""

    __slots__ = (
        "_after", "_before", "_closed", "_detokenizer", "_outlet", "_owner", "_pending", "_seen", "_skipped",
        "_stats", "_waiting", "request_id",
    )  # fmt: skip

    def __init__(
        self,
        owner: Shortcuts,
        state: RequestState,
        outlet: Outlet,
        before: str,
        after: str,
        skipped: list[int],
    ) -> None:
        """``before`` and ``after``: what stands before and behind the text in each event. ``skipped`` gets the tokens
        that went this way.
        """
        assert isinstance(state.detokenizer, BaseIncrementalDetokenizer) and state.stats is not None
        self.request_id = state.request_id
        self._owner = owner
        self._detokenizer = state.detokenizer
        self._stats = state.stats
        self._outlet = outlet
        self._before, self._after = before.encode(), after.encode()
        self._skipped = skipped
        self._pending: list[int] = []
        self._seen = 0  # tokens that went one way or the other
        self._waiting = False  # the stream's task has sent all it got
        self._closed = False

    def wait(self, tokens: int, sent: int) -> None:
        """The stream's task waits now, after ``tokens`` tokens and ``sent`` messages that it handed to ASGI."""
        self._seen += tokens
        self._waiting = sent == self._outlet.bodies  # otherwise something between holds messages back

    def stop(self) -> None:
        """The stream's task does not wait any more."""
        self._waiting = False

    def close(self) -> None:
        """Nothing goes this way any more."""
        self._closed = True

    def is_open(self, read: int) -> bool:
        """True where the next tokens after the first ``read`` of the answer may go this way."""
        return self._waiting and self._seen == read and self._outlet.open and not self._closed

    def put(self, ids: Sequence[int]) -> None:
        """Take tokens, some at least; they are written in this turn of the loop, or by :meth:`flush`."""
        if not self._pending:
            self._owner.dirty(self)
        self._pending += ids
        self._seen += len(ids)

    def flush(self, now: float = 0.0) -> None:
        """Write what was put, if anything; ``now``: monotonic seconds. A fault ends the request, nothing is raised."""
        ids, self._pending = self._pending, []
        if not ids:
            return
        try:
            self._write(ids, now or time.monotonic())
        except Exception as fault:  # noqa: BLE001 - supervisor: a fault ends its request, not the others
            if not isinstance(fault, ConnectionError):
                logger.error("request %s failed in the gateway:\n%s", self.request_id, format_exc())
            self.close()
            self._owner.fail(self.request_id, fault)

    def _write(self, ids: list[int], now: float) -> None:
        self._skipped += ids
        self._detokenizer.update(ids, False)
        text = to_json(self._detokenizer.get_next_output_text(False, True))
        self._outlet.write(b"%b%b%b" % (self._before, text, self._after))
        stats = self._stats
        stats.num_generation_tokens += len(ids)
        self._owner.stats.went_on(len(ids), now - stats.last_token_ts)
        stats.last_token_ts = now


class Shortcuts:
    """Those of one model deployment. Belongs to one event loop."""

    def __init__(self, stats: ModelStats, fail: Callable[[str, Exception], None]) -> None:
        """``fail(request_id, fault)`` ends a request whose tokens could not be written."""
        self.stats = stats
        self.fail = fail
        self._dirty: list[Shortcut] = []

    def make(
        self, state: RequestState, outlet: Outlet, before: str, after: str, skipped: list[int]
    ) -> Shortcut | None:
        """One for ``state``, or None where its tokens need more than their text: stop strings end a stream by it."""
        detokenizer = state.detokenizer
        if (
            not isinstance(detokenizer, BaseIncrementalDetokenizer)
            or detokenizer.stop
            or state.output_kind is not RequestOutputKind.DELTA
            or state.stream_interval != 1
            or state.parent_req is not None
            or state.stats is None
            or state.streaming_input
        ):
            return None
        return Shortcut(self, state, outlet, before, after, skipped)

    def dirty(self, one: Shortcut) -> None:
        """Have ``one`` written soon."""
        if not self._dirty:
            asyncio.get_running_loop().call_soon(self._flush)
        self._dirty.append(one)

    def _flush(self) -> None:
        dirty, self._dirty = self._dirty, []
        now = time.monotonic()
        for one in dirty:
            one.flush(now)
