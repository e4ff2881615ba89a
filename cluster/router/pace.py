"""How fast engines compute prompts, learnt from the first tokens that come back.

The time to first token of a request is modelled as

    slow * (base + token * w + token_decode * w * d + pair * p)

with w the tokens that were to be computed before it and for it, d the requests that decoded beside it and p
the token pairs that attention computed. The four coefficients are the deployment's: recursive least squares
over all its engines (with forgetting; Ljung, System Identification, ch. 11), weighted so that a long wait
does not drown the short ones. ``slow`` is one engine's own: how much the running mean of the logarithm of
observed over modelled time lies above that of all engines, as far as chance does not explain it. So a new
engine starts with what its siblings taught, and one that is slower, for whatever reason, is seen after a few
answers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from npufleet.cluster.router.base import ASSUMED, Pace

_FORGET = 0.999  # weight of the past per answer
_DOUBT = 1e3  # how little the assumed coefficients count at first
_SLOW_STEP = 0.03  # of an engine's running mean per answer
_MEAN_STEP = 0.002  # of all engines'
_SLOW_MOST = 16.0
_SURE = 0.3  # a difference that chance explains must not draw all requests to one engine
_DOUBTFUL = 1.5  # and the fewer the answers, the more does chance explain
_MEMORY = 64  # answers that a running mean of this step is made of
_ENOUGH = 8  # answers before the learnt coefficients are used
_SCALES = (1.0, 1e-4, 1e-6, 1e-9)  # so that all coefficients are near 1


class Sight(NamedTuple):
    """What was to be done when a request was sent."""

    tokens: float  # to compute before it and for it
    decoding: float  # requests decoding beside
    pairs: float  # token pairs of attention

    def features(self) -> tuple[float, float, float, float]:
        """The four terms, scaled."""
        return (
            _SCALES[0],
            _SCALES[1] * self.tokens,
            _SCALES[2] * self.tokens * self.decoding,
            _SCALES[3] * self.pairs,
        )


@dataclass(slots=True)
class _Engine:
    log_slow: float = 0.0
    answers: int = 0
    pace: Pace = ASSUMED


@dataclass(slots=True)
class PaceBook:
    """The paces of one model deployment's engines."""

    _weights: list[float] = field(default_factory=lambda: [ASSUMED.base, 1.0, 1.0, 1.0])
    _spread: list[list[float]] = field(
        default_factory=lambda: [[_DOUBT if i == j else 0.0 for j in range(4)] for i in range(4)]
    )
    _answers: int = 0
    _log_slow: float = 0.0
    _engines: dict[str, _Engine] = field(default_factory=dict)

    def of(self, engine_id: str) -> Pace:
        """The engine's pace: its own, else its siblings', else the assumed one."""
        engine = self._engines.get(engine_id)
        if engine is not None and engine.answers:
            return engine.pace
        return self._pace(1.0)

    def forget(self, engine_id: str) -> None:
        """The engine is gone."""
        self._engines.pop(engine_id, None)

    def learn(self, engine_id: str, sight: Sight, seconds: float) -> None:
        """A request sent at ``sight`` got its first token after ``seconds``."""
        if not 0.0 < seconds < math.inf:
            return
        engine = self._engines.setdefault(engine_id, _Engine())
        features = sight.features()
        modelled = max(1e-4, sum(w * x for w, x in zip(self._weights, features, strict=True)))
        if self._answers >= _ENOUGH:
            most = math.log(_SLOW_MOST)
            off = min(most, max(-most, math.log(seconds) - math.log(modelled)))
            engine.log_slow += max(_SLOW_STEP, 1.0 / (engine.answers + 4)) * (off - engine.log_slow)
            self._log_slow += max(_MEAN_STEP, 1.0 / (self._answers + 4)) * (off - self._log_slow)
            engine.answers += 1
        slow = self._slow(engine)
        self._fit(features, seconds / slow)
        self._answers += 1
        engine.pace = self._pace(slow)

    def _slow(self, engine: _Engine) -> float:
        above = engine.log_slow - self._log_slow
        sure = _SURE + _DOUBTFUL / math.sqrt(1 + min(engine.answers, _MEMORY))
        return math.exp(above * (1.0 - (sure / above) ** 2)) if abs(above) > sure else 1.0

    def _fit(self, features: tuple[float, ...], seconds: float) -> None:
        weight = 1.0 / max(0.01, seconds)  # relative errors, not seconds, are what shall be small
        x = [weight * value for value in features]
        spread = self._spread
        moved = [sum(row[j] * x[j] for j in range(4)) for row in spread]
        gain = 1.0 / (_FORGET + sum(x[i] * moved[i] for i in range(4)))
        error = weight * seconds - sum(w * v for w, v in zip(self._weights, x, strict=True))
        for i in range(4):
            self._weights[i] += gain * moved[i] * error
            for j in range(4):
                spread[i][j] = (spread[i][j] - gain * moved[i] * moved[j]) / _FORGET
        for i in range(4):  # what is not excited for long must not grow without bound
            spread[i][i] = min(spread[i][i], _DOUBT)

    def _pace(self, slow: float) -> Pace:
        if self._answers < _ENOUGH:
            return ASSUMED
        base, token, token_decode, pair = (
            slow * scale * max(0.0, weight) for scale, weight in zip(_SCALES, self._weights, strict=True)
        )
        least = slow * 1e-6  # computing a token is never free
        return Pace(base, max(token, least), token_decode, pair, known=True)
