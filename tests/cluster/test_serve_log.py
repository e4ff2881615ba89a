"""Serve keeps its log in a process where vLLM configures logging; without it Serve's controller ends the replica."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ENGINE = """
import logging
import sys
from logging.handlers import MemoryHandler, RotatingFileHandler

from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging_if_needed

from npufleet.cluster.engine import serve_log

def handler(name, file):
    made = MemoryHandler(1, target=RotatingFileHandler(file))
    logging.getLogger(name).addHandler(made)
    return made

serve = handler("ray.serve", sys.argv[1])
other = handler("other", sys.argv[2])
with serve_log.kept():
    configure_logging_if_needed(LoggingConfig())  # as vLLM does first of all
logging.getLogger("ray.serve").error("still here")
print(serve.target.baseFilename, other.target)
"""


def test_serves_log_outlives_vllms_configuration(tmp_path: Path) -> None:
    serve, other = tmp_path / "serve.log", tmp_path / "other.log"
    done = subprocess.run(
        [sys.executable, "-c", ENGINE, serve, other], capture_output=True, text=True, check=True
    )
    kept, lost = done.stdout.splitlines()[-1].split()  # vLLM writes there too
    assert kept == str(serve) and serve.read_text() == "still here\n"
    assert lost == "None", "if it kept its file too, vLLM closes no handlers any more"
