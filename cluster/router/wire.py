"""The VllmEngine wire: method paths, the little that the router reads of a request, and request ids.

Messages pass through the router as the bytes they came in. A request is parsed once, to learn its id and
length.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2

SERVICE = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name
METHODS = {method.name: method for method in pb.DESCRIPTOR.services_by_name["VllmEngine"].methods}

MODEL_KEY = "x-npufleet-model"  # request metadata: the model deployment
ENGINE_KEY = "x-npufleet-engine"  # in an answer: who gave it; in a control call: who shall

_CHARS_PER_TOKEN = 4  # a guess, for text prompts only
_REQUEST_ID_TAG = b"\x0a"  # field 1, length-delimited, in GenerateRequest and EmbedRequest alike

M = TypeVar("M", bound=Message)

__all__ = ["ENGINE_KEY", "METHODS", "MODEL_KEY", "SERVICE", "common_pb2", "pb"]


class Head(NamedTuple):
    """What the router needs to know of a Generate or Embed request."""

    request_id: str
    prompt_tokens: int


def path(method: str) -> str:
    """The HTTP/2 path of a VllmEngine method."""
    assert method in METHODS, method
    return f"/{SERVICE}/{method}"


def read_head(method: str, raw: bytes) -> Head:
    """The id and prompt length of ``raw``, a request of ``method``; ValueError where it is not one."""
    if method == "Embed":
        embed = parse(pb.EmbedRequest, raw)
        return Head(embed.request_id, len(embed.tokenized.input_ids))
    generate = parse(pb.GenerateRequest, raw)
    if generate.WhichOneof("input") == "text":
        return Head(generate.request_id, max(1, len(generate.text) // _CHARS_PER_TOKEN))
    return Head(generate.request_id, len(generate.tokenized.input_ids))


def parse(kind: type[M], raw: bytes) -> M:
    """``raw`` as a message of ``kind``; ValueError where it is not one."""
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise ValueError(f"the request is not a {kind.DESCRIPTOR.full_name} message: {error}") from error


def with_request_id(raw: bytes, request_id: str) -> bytes:
    """``raw`` with another request id.

    Of a singular field that occurs twice a parser keeps the last one (Protocol Buffers encoding, "Last One
    Wins"), so the new id is appended and nothing is decoded or copied field by field.
    """
    value = request_id.encode()
    return b"".join((raw, _REQUEST_ID_TAG, _varint(len(value)), value))


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
