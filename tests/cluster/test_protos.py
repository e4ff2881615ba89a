"""The generated code of our own .proto files is what these say now."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from grpc_tools import protoc

import npufleet.cluster.proto

HERE = Path(npufleet.cluster.proto.__file__).parent
NAMES = sorted(path.stem for path in HERE.glob("*.proto"))


def test_there_are_some():
    assert NAMES == ["envoy", "lookaside"]


@pytest.mark.parametrize("name", NAMES)
def test_generated_code_is_up_to_date(name: str, tmp_path: Path):
    inside = tmp_path / "npufleet" / "cluster" / "proto"
    inside.mkdir(parents=True)
    shutil.copy(HERE / f"{name}.proto", inside)
    out = tmp_path / "set"
    file = f"npufleet/cluster/proto/{name}.proto"
    own = str(Path(protoc.__file__).parent / "_proto")
    command = ["protoc", f"-I{tmp_path}", f"-I{own}", f"--descriptor_set_out={out}", file]
    assert protoc.main(command) == 0
    (said,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    generated = descriptor_pb2.FileDescriptorProto()
    import_module(f"npufleet.cluster.proto.{name}_pb2").DESCRIPTOR.CopyToProto(generated)
    for each in (said, generated):
        for message in each.message_type:
            _plain(message)
    assert generated == said


def _plain(message: descriptor_pb2.DescriptorProto) -> None:
    """Without the JSON names, which only one of the two spells out."""
    for field in message.field:
        field.ClearField("json_name")
    for nested in message.nested_type:
        _plain(nested)
