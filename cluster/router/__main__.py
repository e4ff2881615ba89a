"""A router alone: ``python -m npufleet.cluster.router --help``, the same as ``npufleet route``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from npufleet.cluster.router import alone


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 2 for a command line that cannot be served."""
    parser = argparse.ArgumentParser(
        prog="python -m npufleet.cluster.router",
        description="Route vllm.grpc.engine.VllmEngine calls over engines.",
        epilog=alone.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    alone.add_arguments(parser)
    return alone.main(parser.parse_args(argv))


if __name__ == "__main__":
    raise SystemExit(main())
