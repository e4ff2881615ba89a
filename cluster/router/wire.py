"""The VllmEngine wire: method paths, the little that the router reads of a request, and request ids.

Messages pass through the router as the bytes they came in. A request is parsed once, to learn its id and
length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2

from npufleet.cluster.proto.extension import ExtensionError, from_metadata
from npufleet.cluster.router.prefix.prompt import TokenPrompt
from npufleet.cluster.router.prefix.read import from_message
from npufleet.cluster.router.replay.rules import why_not

SERVICE = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name
METHODS = {method.name: method for method in pb.DESCRIPTOR.services_by_name["VllmEngine"].methods}

MODEL_KEY = "x-npufleet-model"  # request metadata: the model deployment
ENGINE_KEY = "x-npufleet-engine"  # in an answer: who gave it; in a control call: who shall
SESSION_KEY = "x-npufleet-session"  # request metadata: requests of one conversation carry the same
PEER_KEY = "x-npufleet-peer"  # request metadata that Envoy sets before the router: who its client is

_CHARS_PER_TOKEN = 4  # a guess, for text prompts only
_REQUEST_ID_TAG = b"\x0a"  # field 1, length-delimited, in GenerateRequest and EmbedRequest alike

_RANK_TAG = b"\x48"  # field 9, varint, in GenerateRequest

M = TypeVar("M", bound=Message)

__all__ = ["ENGINE_KEY", "METHODS", "MODEL_KEY", "PEER_KEY", "SERVICE", "SESSION_KEY", "common_pb2", "pb"]


class Head(NamedTuple):
    """What the router needs to know of a Generate or Embed request."""

    request_id: str
    prompt_tokens: int
    prompt: TokenPrompt | None = None  # where its token ids are known
    session: str = ""
    cache_salt: str = ""
    priority: int = 0
    bound: str | None = "it is no Generate request"  # why no other engine can go on with its answer


def path(method: str) -> str:
    """The HTTP/2 path of a VllmEngine method."""
    assert method in METHODS, method
    return f"/{SERVICE}/{method}"


def read_head(
    method: str, raw: bytes, metadata: Sequence[tuple[str, str | bytes]] = (), resume: str = "off"
) -> Head:
    """What ``raw``, a request of ``method``, and its extension in ``metadata`` say; ValueError where it is not
    such a request. An extension that cannot be read is the engine's to refuse. ``resume`` is a mode of
    ``replay/rules.py``.
    """
    if method == "Embed":
        embed = parse(pb.EmbedRequest, raw)
        return Head(embed.request_id, len(embed.tokenized.input_ids))
    generate = parse(pb.GenerateRequest, raw)
    try:
        fields = from_metadata(metadata)
    except ExtensionError:
        fields = {}
    length = len(generate.tokenized.input_ids)
    if generate.WhichOneof("input") == "text":
        length = max(1, len(generate.text) // _CHARS_PER_TOKEN)
    return Head(
        generate.request_id,
        length,
        from_message(generate, fields),
        fields.get("session_id") or "",
        fields.get("cache_salt") or "",
        fields.get("priority") or 0,
        why_not(generate, fields, resume),
    )


def answered_tokens(last: bytes, messages: int) -> int:
    """How many tokens an answer of ``messages`` messages had whose last one is ``last``.

    The last message of an answer in one piece tells. That of a stream may count the tokens of the message before alone,
    as vLLM's servicer does, so there, and where the answer broke off, each message counts as a token at least.
    """
    try:
        answer = pb.GenerateResponse.FromString(last)
    except DecodeError:
        return messages
    whole = answer.WhichOneof("response") == "complete"
    return max(answer.complete.completion_tokens, messages - 1) if whole else messages


class NotAMessage(ValueError):
    """The bytes are no message of the kind that a method takes."""


def check_message(method: str, raw: bytes) -> None:
    """Raise :class:`NotAMessage` where ``raw`` is no request of ``method``: an engine would answer with a fault of its
    own. Generate and Embed are read anyway, by :func:`read_head`.
    """
    if method not in ("Generate", "Embed"):
        parse(GetMessageClass(METHODS[method].input_type), raw)


def parse(kind: type[M], raw: bytes) -> M:
    """``raw`` as a message of ``kind``; ValueError where it is not one."""
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise NotAMessage(f"the request is not a {kind.DESCRIPTOR.full_name} message: {error}") from error


def with_request_id(raw: bytes, request_id: str) -> bytes:
    """``raw`` with another request id.

    Of a singular field that occurs twice a parser keeps the last one (Protocol Buffers encoding, "Last One
    Wins"), so the new id is appended and nothing is decoded or copied field by field.
    """
    value = request_id.encode()
    return b"".join((raw, _REQUEST_ID_TAG, varint(len(value)), value))


def with_rank(raw: bytes, rank: int | None) -> bytes:
    """``raw``, a Generate request, for data-parallel rank ``rank`` of its engine, whatever it named itself; None: it
    stays as it is.
    """
    return raw if rank is None else b"".join((raw, _RANK_TAG, varint(rank)))


def varint(number: int) -> bytes:
    """``number``, not negative, as Protocol Buffers write it."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
