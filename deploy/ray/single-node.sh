#!/bin/bash
# One server as a fleet that outlives the terminal: single-node.sh FLEET_YAML
#
# `npufleet serve FLEET_YAML` alone starts a Ray of its own; this keeps Ray and the fleet apart, as on many nodes.
set -eu

if [ ! -f "${1:-}" ]; then
  echo "usage: single-node.sh FLEET_YAML" >&2
  exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
export RAY_AUTH_MODE=token
test -s "$HOME/.ray/auth_token" || ray get-auth-token --generate >/dev/null
bash "$here/start-node.sh" head 127.0.0.1
exec npufleet serve "$1" --address 127.0.0.1:6379
