"""The command line: ``npufleet COMMAND``; `npufleet --help` lists the commands.

Nothing heavy is imported until a command needs it, so that help and errors come at once.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence

from .bench.command import add_arguments as add_bench_arguments
from .config import DEVICES
from .deploy.command import add_commands as add_change_commands
from .doctor.command import add_arguments as add_doctor_arguments
from .plan.command import add_arguments as add_plan_arguments
from .sim.command import add_arguments as add_sim_arguments
from .targets import DEMO_QUESTION
from .topology.command import add_arguments as add_node_arguments

_EPILOG = """\
examples:
  npufleet serve demo                          a small chat model on two engines
  npufleet serve ./Qwen3-8B --tensor-parallel 4 --replicas 2
  npufleet serve fleet.yaml --set router.policy=round-robin
  npufleet serve fleet.yaml --address auto     on a running Ray cluster
"""


def parser(command: str = "") -> argparse.ArgumentParser:
    """Return the command line; the arguments of some commands are added only if ``command`` asks for them, because
    they take long to import.
    """
    made = argparse.ArgumentParser(
        prog="npufleet", description="Serve large language models on fleets of Ascend NPUs."
    )
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _serve_arguments(commands)
    status = commands.add_parser("status", help="what the running fleet looks like")
    status.add_argument("--name", help="which fleet, if several run here")
    status.add_argument("--url", help="controller of a fleet elsewhere, for example http://10.0.0.1:8001")
    status.add_argument("--json", action="store_true", help="print the status as JSON")
    stop = commands.add_parser("stop", help="stop the running fleet")
    stop.add_argument("--name", help="which fleet, if several run here")
    stop.add_argument("--timeout", type=float, default=120.0, help="seconds to wait (default %(default)s)")
    add_change_commands(commands)
    add_plan_arguments(commands)
    add_node_arguments(commands)
    _route_arguments(commands, whole=command == "route")
    add_doctor_arguments(commands)
    add_bench_arguments(commands)
    add_sim_arguments(commands)
    virtual = commands.add_parser("virtual-npu", help="virtual NPUs for machines without Ascend hardware")
    virtual.add_argument("action", choices=("enable", "disable", "status"))
    commands.add_parser("version", help="versions of npufleet and of what it stands on")
    return made


def _route_arguments(commands: argparse._SubParsersAction[argparse.ArgumentParser], *, whole: bool) -> None:
    route = commands.add_parser(
        "route",
        help="the gRPC router alone, over any engines that serve VllmEngine",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if whole:
        from .router import alone

        route.epilog = alone.EPILOG
        alone.add_arguments(route)


def _serve_arguments(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve a model until Ctrl-C",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    serve.add_argument("target", metavar="demo|MODEL_DIR|CONFIG.yaml", help="what to serve")
    serve.add_argument("--replicas", type=int, metavar="N", help="engines per model")
    serve.add_argument("--tensor-parallel", type=int, metavar="N", help="NPUs per engine")
    serve.add_argument("--policy", help="routing policy")
    serve.add_argument(
        "--host", help="address that gateway, router and metrics listen on (default: loopback)"
    )
    serve.add_argument("--port", type=int, help="port of the OpenAI gateway (default 8000)")
    serve.add_argument("--grpc-port", type=int, help="port of the gRPC router (default 50051)")
    serve.add_argument(
        "--metrics-port", type=int, help="port of discovery, status and metrics (default 8001)"
    )
    serve.add_argument("--name", help="name of the fleet")
    serve.add_argument("--device", choices=DEVICES, help="default: virtual where it is enabled, else npu")
    serve.add_argument(
        "--set", action="append", metavar="KEY=VALUE", help="any key of the configuration; repeatable"
    )
    serve.add_argument(
        "--address", help="an existing Ray cluster ('auto' or HOST:PORT) instead of an own one"
    )
    serve.add_argument(
        "--ask",
        nargs="?",
        const=DEMO_QUESTION,
        metavar="QUESTION",
        help="ask this once the fleet is up, and print the answer (default: %(const)s)",
    )
    serve.add_argument("--expect", metavar="TEXT", help="the answer must contain this")
    serve.add_argument(
        "--once", action="store_true", help="stop after the answer; exit 0 only if all went well"
    )
    serve.add_argument("--keep-logs", action="store_true", help="leave Ray's log folder behind")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 well, 1 failed, 2 wrong use."""
    words = sys.argv[1:] if argv is None else list(argv)
    args = parser(words[0] if words else "").parse_args(words)
    try:
        return _COMMANDS[args.command](args)
    except ValueError as error:
        print(f"npufleet: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `npufleet status | head` closed our output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _serve(args: argparse.Namespace) -> int:
    from .serve import serve

    return serve(args)


def _status(args: argparse.Namespace) -> int:
    from . import ask, runs
    from .status import is_status, render

    url = args.url or runs.find(args.name).controller
    try:
        status = ask.get_json(url, "/status")
    except ask.AskError as error:
        print(f"npufleet: the controller does not answer: {error}", file=sys.stderr)
        return 1
    if not is_status(status):
        print(
            f"npufleet: what answers at {url} is not the controller of a fleet; "
            "its port is metrics.port, 8001 by default",
            file=sys.stderr,
        )
        return 1
    print(json.dumps(status, indent=2) if args.json else render(status))
    return 0 if all(model["ready"] >= model["wanted"] for model in status["models"]) else 1


def _stop(args: argparse.Namespace) -> int:
    from . import local, runs

    run = runs.find(args.name)
    os.kill(run.pid, signal.SIGTERM)
    if local.wait_gone(run.pid, args.timeout):
        print(f"fleet {run.name} has stopped")
        return 0
    print(f"npufleet: process {run.pid} still runs after {args.timeout:.0f} s", file=sys.stderr)
    return 1


def _change(args: argparse.Namespace) -> int:
    from .deploy.command import run

    return run(args)


def _plan(args: argparse.Namespace) -> int:
    from .plan import command, placement

    return placement.run(args) if args.kind == "placement" else command.run(args)


def _node(args: argparse.Namespace) -> int:
    from .topology.command import run

    return run(args)


def _route(args: argparse.Namespace) -> int:
    from .router import alone

    return alone.main(args)


def _doctor(args: argparse.Namespace) -> int:
    from .doctor.command import run

    return run(args)


def _bench(args: argparse.Namespace) -> int:
    from .bench.command import run

    return run(args)


def _sim_engine(args: argparse.Namespace) -> int:
    from .sim.command import run

    return run(args)


def _virtual_npu(args: argparse.Namespace) -> int:
    import subprocess

    # As a process of its own: before it is enabled torch cannot be imported, and the fleet never imports
    # kernels.
    return subprocess.run(
        [sys.executable, "-m", "npufleet.kernels.virtual", args.action], check=False
    ).returncode


def _version(args: argparse.Namespace) -> int:
    from importlib import metadata

    for name in ("npufleet", "vllm", "torch", "torch-npu", "ray", "smg-grpc-servicer"):
        try:
            print(f"{name:<18} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            print(f"{name:<18} not installed")
    return 0


_COMMANDS = {
    "serve": _serve,
    "status": _status,
    "stop": _stop,
    "deploy": _change,
    "scale": _change,
    "drain": _change,
    "plan": _plan,
    "node": _node,
    "route": _route,
    "doctor": _doctor,
    "bench": _bench,
    "sim-engine": _sim_engine,
    "virtual-npu": _virtual_npu,
    "version": _version,
}

if __name__ == "__main__":
    sys.exit(main())
