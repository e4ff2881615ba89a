"""The engine that gives the first token soonest, and where computing it holds up others least.

    wait   = token * tokens waiting + pair * token pairs waiting + token_decode * those tokens * decoding
    own    = token * uncached + pair * uncached * (cached + uncached / 2) + token_decode * uncached * decoding
    others = queued * min(own, the rest of a step) + DECODE * decoding * own + REQUEST * token * requests
    cost   = base + wait + OWN * own + others + what a cache about to run full costs

with the pace of that engine as learnt from its answers (``router/pace.py``). ``wait + own`` is the predicted
time to first token. The own part counts twice because it is work that this pick adds to the fleet: whoever
comes next waits for it too. On an idle fleet the sum hardly differs from the plain prediction; on a busy one it
keeps prompts where they are cached, which is what keeps it from getting busier. ``others`` is what requests on
that engine lose: those without output yet share their step with this prompt as long as the step has room,
decoding ones wait while it is computed (which costs them little each, spread over their tokens), and each
request on an engine takes cache and a place in every step to come.

DECODE itself grows with the square of what even the least busy engine decodes, over BUSY: then there is no engine where
computing the prompt once more would hold up few, and what is saved is what the whole fleet lacks. While some engine
is idle it hardly changes anything.

A KV cache about to run full preempts requests or makes new ones wait for ends, which no queue shows before it
happens; it adds a term of its own, 0 until most blocks are in use. There a prompt that is not cached also takes
the room that others wait for, so its own part counts up to KV_OWN times more: a fleet beyond its capacity is
the one that gains most from every block it need not compute.

Falls back by itself: without a fresh report the router's own counts stand for the queue, without events
nothing counts as cached beyond what was just sent, and without answers all engines have one assumed pace,
which leaves the order of the costs right. The weights were chosen on the first half of the Mooncake conversation
trace (``benchmarks/routing``) and are the same at every load there.
"""

from __future__ import annotations

from collections.abc import Sequence

from npufleet.cluster.router.base import EngineLoad, Policy, PrefixView, RequestInfo

OWN = 2.0
STEP_TOKENS = 8192  # what an engine computes in one step (vLLM's max_num_batched_tokens when serving)
DECODE = 0.01
BUSY = 7.0  # requests decoding on each engine at which that costs twice as much
REQUEST = 256.0  # tokens that a request on the engine costs a new one
KV_FREE = 0.85  # share of blocks in use up to which the cache holds up nobody
KV_SECONDS = 1.0  # cost of a cache that is full
KV_OWN = 15.0
UNKNOWN_TOKENS = 1024


def predict(request: RequestInfo, engine: EngineLoad) -> tuple[float, float]:
    """``(wait, own)``: seconds before the request's prompt is computed, and for computing it there."""
    pace = engine.pace
    decode = pace.token_decode * engine.decoding()
    prompt = request.prompt_tokens or UNKNOWN_TOKENS
    uncached = max(1, prompt - engine.cached_tokens)
    pairs = uncached * (engine.cached_tokens + uncached / 2)
    own = (pace.token + decode) * uncached + pace.pair * pairs
    waiting = engine.waiting_tokens()
    queued_pairs = engine.queued_pairs
    if waiting > engine.queued_tokens:  # of others' prompts only the tokens are known: take ours for typical
        queued_pairs *= waiting / engine.queued_tokens if engine.queued_tokens else 0.0
    return (pace.token + decode) * waiting + pace.pair * queued_pairs, own


class PredictedTtft(Policy):
    """Least predicted time to first token plus what the pick costs others."""

    name = "predicted-ttft"
    prefix = PrefixView.PRECISE
    learns = True

    def score(self, request: RequestInfo, engine: EngineLoad) -> float:
        """Cost in seconds, of an engine among idle ones."""
        return self._cost(request, engine, DECODE)

    def scores(self, request: RequestInfo, engines: Sequence[EngineLoad]) -> list[float]:
        """Costs in seconds."""
        decode = DECODE * (1.0 + (min(engine.decoding() for engine in engines) / BUSY) ** 2)
        return [self._cost(request, engine, decode) for engine in engines]

    @staticmethod
    def _cost(request: RequestInfo, engine: EngineLoad, decode: float) -> float:
        wait, own = predict(request, engine)
        token = engine.pace.token
        others = REQUEST * token * engine.requests() + decode * own * engine.decoding()
        room = STEP_TOKENS - engine.waiting_tokens()
        if engine.queued and room > 0:
            others += engine.queued * min(own, room * token)
        if engine.report is not None and engine.report.kv_usage > KV_FREE:
            full = min(1.0, (engine.report.kv_usage - KV_FREE) / (1.0 - KV_FREE))
            others += full * (KV_SECONDS + KV_OWN * own)
        return engine.pace.base + wait + OWN * own + others
