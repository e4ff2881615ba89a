"""``python -m npufleet.kernels.virtual enable|disable|status``."""

from __future__ import annotations

import argparse
import sys

from . import environment
from .build import BuildError


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status (0 done, 1 refused or failed, with the reason on stderr)."""
    parser = argparse.ArgumentParser(prog="python -m npufleet.kernels.virtual", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    enable = commands.add_parser("enable", help="build it and put it into this environment")
    enable.add_argument("--force", action="store_true", help="also where real CANN is installed")
    commands.add_parser("disable", help="remove it from this environment")
    commands.add_parser("status", help="print whether it is enabled, its build and the device setting")
    options = parser.parse_args(arguments)
    try:
        if options.command == "enable":
            environment.enable(force=options.force)
        elif options.command == "disable":
            environment.disable()
        else:
            _print_status(environment.status())
    except (environment.RealCannError, BuildError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _print_status(state: environment.Status) -> None:
    print(f"virtual NPU: {'enabled' if state.enabled else 'not enabled'} in {state.site_packages}")
    print(f"device:      {state.device}")
    if state.enabled:
        print(f"build:       {state.build} (torch {state.torch}, torch-npu {state.torch_npu})")
        if state.stale:
            print(f"stale:       {state.stale}: run `python -m npufleet.kernels.virtual enable`")


if __name__ == "__main__":
    sys.exit(main())
