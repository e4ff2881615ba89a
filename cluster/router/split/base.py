"""What the router says to two engines so that one decodes what the other has computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar

from npufleet.cluster.endpoints import EngineEndpoint, Role

Params = Mapping[str, Any]


class Stage(StrEnum):
    """What of a request an engine is wanted for."""

    WHOLE = "whole"
    PREFILL = "prefill"
    DECODE = "decode"


KV_ROLES = {Role.BOTH: "kv_both", Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}
"""The ``kv_role`` of vLLM's ``KVTransferConfig`` that goes with a role."""


class Handoff(ABC):
    """How one of vLLM's KV connectors is told of a pair.

    The prompt is computed first, by a request for one token with :meth:`prefill`; when that has ended the decoding
    engine gets the request itself with :meth:`decode`. Both are ``kv_transfer_params``; None: there are none.
    """

    connectors: ClassVar[
        tuple[str, ...]
    ]  # by the names of vLLM's KVConnectorFactory; a final * matches any rest

    @abstractmethod
    def prefill(self, transfer: str) -> Params | None:
        """For the engine that computes the prompt; ``transfer`` names this pair's transfer, unique for ever."""

    @abstractmethod
    def decode(
        self, transfer: str, told: Params | None, source: EngineEndpoint, rank: int | None
    ) -> Params | None:
        """For the engine that decodes; ``told`` is what ``rank`` of ``source`` answered. ValueError where that is
        not enough.
        """
