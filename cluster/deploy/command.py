"""`npufleet deploy`, `scale` and `drain`: show what a change of the running fleet means, then make it."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from .. import preflight_cluster, start_failure, targets
from ..app import APPLICATION, assemble
from ..status import progress_line
from . import connect
from .plan import change_line, line
from .wish import Wish

POLL_S = 1.0


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands."""
    deploy = commands.add_parser("deploy", help="change the running fleet, or begin one on a Ray cluster")
    deploy.add_argument("target", metavar="demo|MODEL_DIR|CONFIG.yaml", help="what the fleet shall be")
    deploy.add_argument("--set", action="append", metavar="KEY=VALUE", help="any key of it; repeatable")
    scale = commands.add_parser("scale", help="change how many engines of a model run")
    scale.add_argument("model", metavar="MODEL", help="the model deployment")
    scale.add_argument("engines", metavar="N", type=int, help="how many engines; 0 stops serving it for now")
    drain = commands.add_parser("drain", help="empty a node before it is taken away")
    drain.add_argument("node", metavar="NODE", help="id or address of the node")
    drain.add_argument("--undo", action="store_true", help="let engines come to it again")
    drain.add_argument("--no-wait", action="store_true", help="do not wait until it is empty")
    connect.add_arguments(drain)
    for command in (deploy, scale):
        connect.add_arguments(command)
        command.add_argument("--dry-run", action="store_true", help="only say what would happen")
        command.add_argument("--yes", action="store_true", help="do not ask")
        command.add_argument("--no-wait", action="store_true", help="do not wait until it is done")


def deploy(args: argparse.Namespace) -> int:
    """Run `npufleet deploy`; returns its exit code."""
    with connect.controller(args) as line_to:
        if not line_to.fleet_runs:
            return _begin(line_to, args)
        config = targets.wished(args, line_to.ask("present"))
        preflight_cluster.check_change(config, _say)
        return _change(line_to, args, "deploy", config.to_dict())


def _begin(line_to: connect.ControllerLine, args: argparse.Namespace) -> int:
    """Submit a new fleet to a Ray cluster. It stays there when this command ends."""
    wish = Wish.of(targets.wished(args, {}))
    preflight_cluster.check(wish.config, APPLICATION, _say)
    for model in wish.config.models:
        print(f"  add      {model.name}: {wish.engines[model.name]} engines of {model.source}", flush=True)
    if args.dry_run:
        return 0
    if not args.yes and not _agreed():
        return 1
    line_to.begin(assemble(wish))
    shown: dict[str, str] = {}
    while not args.no_wait:
        time.sleep(POLL_S)
        try:
            status = line_to.ask("status")
        except connect.Unreachable:  # not up yet
            continue
        for entry in status["progress"]:
            if shown.get(entry["engine_id"]) != progress_line(entry):
                shown[entry["engine_id"]] = progress_line(entry)
                print(progress_line(entry), flush=True)
        if start_failure.hopeless(status["progress"]):
            print(f"npufleet: {start_failure.why(status['progress'])}", file=sys.stderr)
            return 1
        if all(m["ready"] >= m["wanted"] for m in status["models"]) and line_to.front_is_up():
            print(f"fleet {wish.config.name} is up")
            return 0
    return 0


def scale(args: argparse.Namespace) -> int:
    """Run `npufleet scale`; returns its exit code."""
    with connect.controller(args) as line_to:
        return _change(line_to, args, "scale", args.model, args.engines)


def drain(args: argparse.Namespace) -> int:
    """Run `npufleet drain`; returns its exit code."""
    with connect.controller(args) as line_to:
        leaving = line_to.ask("drain", args.node, args.undo)["engines"]
        if args.undo:
            print(f"engines may come to {args.node} again")
            return 0
        print(f"{len(leaving)} engines leave {args.node}: {', '.join(leaving) or 'it is empty'}", flush=True)
        while leaving and not args.no_wait:
            time.sleep(POLL_S)
            there = {engine["engine_id"] for engine in line_to.ask("status")["engines"]}
            for engine_id in [engine for engine in leaving if engine not in there]:
                leaving.remove(engine_id)
                print(f"engine {engine_id} has left", flush=True)
    return 0


def run(args: argparse.Namespace) -> int:
    """Run whichever of the commands ``args`` name."""
    try:
        return {"deploy": deploy, "scale": scale, "drain": drain}[args.command](args)
    except connect.Unreachable as error:
        print(f"npufleet: {error}", file=sys.stderr)
        return 1


def _change(line_to: connect.ControllerLine, args: argparse.Namespace, method: str, *what: Any) -> int:
    planned = line_to.ask(method, *what, True)["steps"]
    if not planned:
        print("nothing changes")
        return 0
    print("\n".join(line(step) for step in planned), flush=True)
    if args.dry_run:
        return 0
    if not args.yes and not _agreed():
        print("nothing was changed")
        return 1
    line_to.ask(method, *what, False)
    if args.no_wait:
        return 0
    return _follow(line_to)


def _say(text: str) -> None:
    print(text, flush=True)


def _agreed() -> bool:
    if not sys.stdin.isatty():
        raise ValueError("the change must be agreed to: add --yes, or --dry-run to see it only")
    return input("Do it? [y/N] ").strip().lower() in ("y", "yes")


def _follow(line_to: connect.ControllerLine) -> int:
    """Print what changes until the change is over."""
    began, told = time.monotonic(), ""
    while True:
        try:
            change = line_to.ask("status")["change"]
        except connect.Unreachable:  # a controller that restarts goes on with the change
            change = None
        if change is not None:
            text = change_line(change)
            if text != told:
                told = text
                print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)
            if change["state"] in ("done", "rolled back"):
                return 0 if change["state"] == "done" else 1
        time.sleep(POLL_S)
