"""What the gateway asks an engine besides generation: its features, its model, its tokenizer files."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc
from smg_grpc_proto.generated import common_pb2

from ..proto.features import EngineFeatures, read
from ..router.picker import Lease
from ..transport.base import EngineChannel

MAX_TOKENIZER_BYTES = 512 << 20
_REMEMBERED = 1024


async def fetch_tokenizer(channel: EngineChannel, deadline_s: float) -> bytes:
    """The tokenizer archive (zip) of the engine behind ``channel``.

    Raises ``ValueError`` for an archive that is too large or whose checksum does not fit, ``AioRpcError``
    otherwise.
    """
    parts, size, told = [], 0, ""
    call = pb_grpc.VllmEngineStub(channel).GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=deadline_s)
    async for chunk in call:
        size += len(chunk.data)
        if size > MAX_TOKENIZER_BYTES:
            call.cancel()
            raise ValueError(f"the engine's tokenizer archive is larger than {MAX_TOKENIZER_BYTES} bytes")
        parts.append(chunk.data)
        told = chunk.sha256 or told
    data = b"".join(parts)
    if hashlib.sha256(data).hexdigest() != told:
        raise ValueError(f"the engine's tokenizer archive is damaged: sha256 does not fit ({size} bytes)")
    return data


async def fetch_model_info(
    channel: EngineChannel, deadline_s: float
) -> tuple[pb.GetModelInfoResponse, EngineFeatures]:
    """What the engine serves, and which extension fields it understands."""
    call = pb_grpc.VllmEngineStub(channel).GetModelInfo(pb.GetModelInfoRequest(), timeout=deadline_s)
    return await call, read(await call.initial_metadata())


class FeatureCache:
    """Features of engines, each asked once in its life: they do not change while it lives."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._known: OrderedDict[str, tuple[int, EngineFeatures]] = OrderedDict()

    async def of(self, lease: Lease) -> EngineFeatures:
        """The features of the leased engine; raises ``AioRpcError`` when it cannot be asked."""
        engine_id = lease.endpoint.engine_id
        life, known = self._known.get(engine_id, (0, None))
        if known is None or life != lease.life:
            life = lease.life
            _, known = await fetch_model_info(lease.channel, self._deadline_s)
            self._known[engine_id] = life, known
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return known
