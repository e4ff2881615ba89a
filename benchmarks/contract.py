"""The contract report: what the plugin asks of torch_npu, and that full-size models fit together on it.

    python benchmarks/contract.py                 everything; writes docs/contract.md
    python benchmarks/contract.py --models llama-3-8b deepseek-v2-lite --chips A2 --print

Exits with 1 if an operator or a shape is wrong, or if the memory ledger differs from the model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from contract_cases import DEVICES, LAYOUTS
from contract_page import render

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "contract.md"


def main() -> int:
    """Make the report."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--models", nargs="+", choices=sorted(LAYOUTS), default=list(LAYOUTS))
    arguments.add_argument("--chips", nargs="+", choices=sorted(DEVICES), default=sorted(DEVICES))
    arguments.add_argument("--print", action="store_true", help="do not write docs/contract.md")
    given = arguments.parse_args()
    operators = _process("contract_operators.py", "A2", [])
    rows = [row for chip in given.chips for row in _process("contract_cases.py", chip, [chip, *given.models])]
    page = render(operators, rows)
    print(page)
    if not given.print:
        PAGE.write_text(page)
    wrong = {name: operator["errors"] for name, operator in operators.items()}
    wrong |= {f"{row['name']} on {row['chip']}, {row['layout']}": row["errors"] for row in rows}
    for where, errors in wrong.items():
        for error in dict.fromkeys(errors):
            print(f"FAILED {where}: {error}", file=sys.stderr)
    return 1 if any(wrong.values()) else 0


def _process(script: str, chip: str, arguments: list[str]) -> Any:
    """What a process whose virtual NPUs are of ``chip`` prints in its last line, as JSON."""
    environment = os.environ | {
        "NPUFLEET_DEVICE": DEVICES[chip],
        "VLLM_LOGGING_LEVEL": "ERROR",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
