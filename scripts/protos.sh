#!/bin/bash
# Generate the Python code of our own .proto files (grpcio-tools of the pinned release).
set -euo pipefail
cd "$(dirname "$0")/.."
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
mkdir -p "$tree/npufleet/cluster/proto"
cp cluster/proto/*.proto "$tree/npufleet/cluster/proto/"
cd "$tree"
"${PYTHON:-python}" -m grpc_tools.protoc -I . --python_out=. --pyi_out=. npufleet/cluster/proto/*.proto
cd - >/dev/null
cp "$tree"/npufleet/cluster/proto/*_pb2.py "$tree"/npufleet/cluster/proto/*_pb2.pyi cluster/proto/
