"""What ends the answers of an engine, as it tells itself."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc

from npufleet.cluster.router.member import Member
from npufleet.cluster.router.replay.ends import Limits
from npufleet.cluster.transport.closed import closed_is_unavailable

_REMEMBERED = 1024


class KnownLimits:
    """The limits of engines, each asked once in its life: they do not change while it lives."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[int, Limits]] = OrderedDict()

    async def of(self, members: Iterable[Member], seconds: Callable[[], float]) -> Limits | None:
        """The limits of the first of ``members``, engines of one model, that tells; None where none of them does.

        Each may take ``seconds()``.
        """
        for member in members:
            life, known = self._known.get(member.engine_id, (0, None))
            if known is not None and life == member.life:
                return known
            life = member.life
            ask = vllm_engine_pb2_grpc.VllmEngineStub(member.channel).GetModelInfo
            try:
                with closed_is_unavailable():
                    told = await ask(pb.GetModelInfoRequest(), timeout=seconds())
            except grpc.aio.AioRpcError as error:
                member.outcome(error.code())
                continue
            known = Limits(eos=tuple(told.eos_token_ids), max_model_len=told.max_context_length)
            self._known[member.engine_id] = life, known
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
            return known
        return None
