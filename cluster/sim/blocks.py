"""A block-level model of vLLM's scheduler: first come, first served, continuous batching, chunked prefill.

What it keeps of the real one (``vllm/v1/core/sched/scheduler.py``, checked against it by a test): the running
batch before the queue, a token budget per step, prefix blocks found when a request is admitted and never the
last token, admission only where the whole prompt fits, blocks cached as soon as they are scheduled, the last
request preempted when blocks run out and computed again. What it leaves out: whatever needs the content of an
answer; blocks of output take room and are found again only by their own request, after a preemption.

While nothing but decoding goes on, steps differ only in the tokens they read, so a run of them is planned at
once: that is what makes studies over whole traces fast.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from npufleet.cluster.router.base import LoadReport
from npufleet.cluster.router.prefix.prompt import Key
from npufleet.cluster.sim.base import Core, Outcome, SimRequest, Step
from npufleet.cluster.sim.pool import Block, BlockPool
from npufleet.cluster.sim.timing import DeviceTime

_LONGEST_RUN = 100_000


@dataclass(eq=False, slots=True)
class _Live:
    """A request in the engine."""

    request: SimRequest
    goal: int  # tokens to compute before the next output: the prompt, and after a preemption its output too
    computed: int = 0
    produced: int = 0
    cached: int = -1  # tokens found at first admission
    whole: int = 0  # blocks that were offered to the cache
    blocks: list[Block] = field(default_factory=list)

    def keys(self, blocks: int) -> Sequence[Key]:
        """The keys of its first whole ``blocks``; those with output are its own."""
        keys = self.request.keys
        if blocks <= len(keys):
            return keys
        own = range(len(keys), blocks)
        return [*keys, *(hash((self.request.request_id, at)) for at in own)]


class BlockCore(Core):
    """One engine."""

    def __init__(self, device: DeviceTime, block_size: int) -> None:
        """``block_size`` in tokens."""
        self._device = device
        self._size = block_size
        self._pool = BlockPool(max(1, device.kv_tokens // block_size - 1))  # vLLM keeps one block back
        self._waiting: deque[_Live] = deque()
        self._running: list[_Live] = []
        self._prefills: list[tuple[_Live, int]] = []  # of the step under way, with their tokens
        self._decodes: list[_Live] = []
        self._outcome = Outcome()

    def add(self, request: SimRequest) -> None:
        """Queue a request."""
        total = request.prompt_tokens + request.output_tokens
        if total > self._pool.size * self._size:
            raise ValueError(
                f"request {request.request_id!r} needs {total} tokens of KV cache, "
                f"the engine has {self._pool.size * self._size}"
            )
        self._waiting.append(_Live(request, request.prompt_tokens))

    def abort(self, request_id: str) -> None:
        """Give it up."""
        for live in [*self._running, *self._waiting]:
            if live.request.request_id == request_id:
                if live in self._running:
                    self._running.remove(live)
                    self._pool.release(live.blocks)
                else:
                    self._waiting.remove(live)
                self._prefills = [pair for pair in self._prefills if pair[0] is not live]
                self._decodes = [other for other in self._decodes if other is not live]
                return

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._running or self._waiting)

    def load(self) -> LoadReport:
        """Queue and cache now. Tokens are those of all requests without output, as our engines report them; of
        waiting ones, what the cache holds now is left out.
        """
        under_way = sum(live.goal - live.computed for live in self._running if not live.produced)
        return LoadReport(
            running=len(self._running),
            waiting=len(self._waiting),
            waiting_tokens=under_way + sum(live.goal - self._found(live) for live in self._waiting),
            kv_usage=self._pool.usage,
        )

    def begin(self) -> Step:
        """Schedule the running batch, then the queue."""
        assert not self._prefills and not self._decodes, "a step is under way"
        device = self._device
        budget = device.max_batched_tokens
        preempted = False
        at = 0
        while at < len(self._running) and budget > 0:
            live = self._running[at]
            tokens = min(live.goal - live.computed, budget) or 1
            if not self._room(live, live.computed + tokens):
                preempted = True
                continue  # the last of the batch went; this one may be it
            budget -= tokens
            self._schedule(live, tokens)
            at += 1
        if not preempted:
            self._admit(budget)
        pairs = sum(n * (live.computed + (n + 1) / 2) for live, n in self._prefills)
        context = sum(live.computed + 1 for live in self._decodes)
        decodes = len(self._decodes)
        first = device.step(sum(n for _, n in self._prefills), pairs, decodes, context)
        if self._prefills or self._outcome.preempted:
            return Step(1, first)
        return Step(self._run_length(), first, device.context * decodes)

    def end(self, count: int) -> Outcome:
        """Let the planned steps have happened."""
        outcome = self._outcome
        for live, tokens in self._prefills:
            live.computed += tokens
            if live.computed == live.goal:
                self._output(live, 1, outcome)
        for live in self._decodes:
            if count > 1:
                self._room(live, live.computed + count)
            live.computed += count
            live.goal = live.computed
            self._store(live)
            self._output(live, count, outcome)
        self._prefills, self._decodes, self._outcome = [], [], Outcome()
        outcome.removed, self._pool.removed = self._pool.removed, []
        return outcome

    def _found(self, live: _Live) -> int:
        return self._size * len(self._pool.prefix(live.request.keys, (live.goal - 1) // self._size))

    def _schedule(self, live: _Live, tokens: int) -> None:
        if live.computed >= live.request.prompt_tokens and tokens == 1 and live.produced:
            self._decodes.append(live)
        else:
            self._prefills.append((live, tokens))
            self._store(live, live.computed + tokens)

    def _admit(self, budget: int) -> None:
        while self._waiting and budget > 0 and len(self._running) < self._device.max_seqs:
            live = self._waiting[0]
            found = self._pool.prefix(live.keys(live.goal // self._size), (live.goal - 1) // self._size)
            idle = sum(1 for block in found if not block.users)
            if -(-live.goal // self._size) - len(found) + idle > self._pool.free:
                return
            self._waiting.popleft()
            self._pool.use(found)
            live.blocks = found
            live.whole = len(found)
            live.computed = len(found) * self._size
            if live.cached < 0:
                live.cached = live.computed
            tokens = min(live.goal - live.computed, budget)
            budget -= tokens
            self._running.append(live)
            fits = self._room(live, live.computed + tokens)
            assert fits, "the whole prompt had room"
            self._schedule(live, tokens)

    def _room(self, live: _Live, tokens: int) -> bool:
        """Blocks for ``tokens`` tokens in all; False where the last of the batch had to go for them."""
        lack = -(-tokens // self._size) - len(live.blocks)
        if lack > self._pool.free:
            self._preempt(self._running[-1])
            return False
        if lack > 0:
            live.blocks += self._pool.take(lack)
        return True

    def _preempt(self, live: _Live) -> None:
        self._running.pop()
        self._pool.release(live.blocks)
        live.blocks, live.whole, live.computed = [], 0, 0
        live.goal = live.request.prompt_tokens + live.produced
        self._waiting.appendleft(live)
        self._outcome.preempted += 1

    def _store(self, live: _Live, tokens: int = 0) -> None:
        """Offer blocks that are whole with ``tokens`` tokens to the cache."""
        whole = (tokens or live.computed) // self._size
        if whole <= live.whole:
            return
        keys, prompt = live.keys(whole), len(live.request.keys)
        stored = []
        for at in range(live.whole, whole):
            if self._pool.cache(live.blocks[at], keys[at]) and at < prompt:
                stored.append(keys[at])
        live.whole = whole
        if stored:
            self._outcome.stored.append(tuple(stored))

    def _output(self, live: _Live, count: int, outcome: Outcome) -> None:
        if not live.produced:
            outcome.started.append((live.request.request_id, max(0, live.cached)))
        live.produced += count
        live.goal = live.computed
        if live.produced >= live.request.output_tokens:
            outcome.finished.append(live.request.request_id)
            self._running.remove(live)
            self._pool.release(live.blocks)

    def _run_length(self) -> int:
        """Steps until something other than decoding happens: an end, or blocks that run out."""
        count = min((live.request.output_tokens - live.produced for live in self._decodes), default=1)
        count = max(1, min(count, _LONGEST_RUN))
        while count > 1 and self._lack(count) > self._pool.free:
            count //= 2
        return count

    def _lack(self, count: int) -> int:
        return sum(
            max(0, -(-(live.computed + count) // self._size) - len(live.blocks)) for live in self._decodes
        )
