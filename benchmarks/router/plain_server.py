"""vLLM's own API server over the core of a mock engine: ``python -m benchmarks.router.plain_server MODEL PORT FOLDER``.

The server is the one of ``vllm serve`` with its defaults and without the engine, whose core :mod:`mock_core` stands in
for in another process. ``FOLDER`` is that of their sockets.
"""

from __future__ import annotations

import sys
from pathlib import Path

import uvloop
from vllm.entrypoints.launchers.api_server.entry import run_server_worker
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.launcher import setup_server
from vllm.utils.argparse_utils import FlexibleArgumentParser

from benchmarks.router.mock_core import addresses
from benchmarks.router.mock_engine import CONTEXT, MODEL


async def serve(model: str, port: str, folder: Path) -> None:
    """Serve until killed."""
    words = ["--model", model, "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", port]
    words += ["--max-model-len", str(CONTEXT), "--disable-uvicorn-access-log"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    validate_parsed_serve_args(args)
    listen, sock = setup_server(args, reuse_port=False)
    into, out = addresses(folder)
    client = {"input_address": into, "output_address": out, "client_count": 1, "client_index": 0}
    await run_server_worker(listen, sock, args, client)


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
