#!/bin/bash
# Starts Ray on this node with what the node has: start-node.sh head|worker HEAD_ADDRESS [NODE_YAML]
#
# `ray up` tells its workers the address of the head and not the head itself: there HEAD_ADDRESS is "-", the head_ip of
# the cluster file that `ray up` has put beside.
#
# The same script starts the head, every worker and a fleet of one node. Ray asks for the token in ~/.ray/auth_token
# everywhere: make it once with `ray get-auth-token --generate`, and give every node the same file.
set -eu

role=${1:-}
head=${2:-}
declared=${3:-/etc/npufleet/node.yaml}
case $role in
head | worker) ;;
*) echo "usage: start-node.sh head|worker HEAD_ADDRESS [NODE_YAML]" >&2; exit 2 ;;
esac
if [ "$role$head" = head- ]; then
  head=$(python3 -c '
import sys, yaml
print(yaml.safe_load(open(sys.argv[1]))["provider"]["head_ip"])' "$HOME/ray_bootstrap_config.yaml")
fi
if [ -z "$head" ]; then
  echo "start-node.sh: the head's address is missing" >&2
  exit 2
fi
if [ ! -s "$HOME/.ray/auth_token" ]; then
  echo "start-node.sh: no token in $HOME/.ray/auth_token; run: ray get-auth-token --generate" >&2
  exit 1
fi
chmod 600 "$HOME/.ray/auth_token"

# Ray's own choice depends on whether a token file happens to lie there; this is the same on every node.
export RAY_AUTH_MODE=token
# The autoscaler that `ray up` asks for by default counts the head among the workers, and one never starts.
export RAY_enable_autoscaler_v2=0
export RAY_USAGE_STATS_ENABLED=0

for settings in /usr/local/Ascend/cann/set_env.sh /usr/local/Ascend/ascend-toolkit/set_env.sh; do
  if [ -f "$settings" ]; then
    set +u # CANN's script reads variables that may be unset
    . "$settings"
    set -u
    break
  fi
done
ulimit -n 65536 2>/dev/null || ulimit -n "$(ulimit -Hn)" # every stream is a file

# The address by which this node reaches the head: with several networks Ray would guess.
own=$(python3 -c '
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    probe.connect((sys.argv[1], 9))
    print(probe.getsockname()[0])' "$head")
if [ "$role" = head ]; then own=$head; fi

if [ -f "$declared" ]; then
  flags=$(npufleet node --file "$declared")
else
  flags=$(npufleet node)
fi

ray stop >/dev/null 2>&1 || true
if [ "$role" = worker ]; then
  # shellcheck disable=SC2086 # the flags are words without spaces
  exec ray start --address="$head:6379" --node-ip-address="$own" $flags
fi
scaling=
if [ -f "$HOME/ray_bootstrap_config.yaml" ]; then # `ray up` puts it there
  scaling=--autoscaling-config=$HOME/ray_bootstrap_config.yaml
fi
# shellcheck disable=SC2086
exec ray start --head --port=6379 --node-ip-address="$own" --dashboard-host=127.0.0.1 $scaling $flags
