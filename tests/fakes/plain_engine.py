"""A real engine with a tiny random model, served by our gRPC service and by vLLM's own OpenAI server.

``python -m tests.fakes.plain_engine DIRECTORY`` writes a checkpoint into DIRECTORY, prints
``engine HOST:PORT plain URL`` when both are up, and ends on SIGTERM.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from .tokenizer import MAX_MODEL_LEN, VOCAB_SIZE, make_tokenizer_dir

NAME = "tiny"


def write_checkpoint(directory: Path) -> None:
    """A Llama of two layers with random weights, in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    make_tokenizer_dir(directory)
    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(directory)
    assert config.vocab_size == VOCAB_SIZE
    model = LlamaForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(20)  # far from uniform, so that ranks and samples mean something
    model.save_pretrained(directory)
    make_tokenizer_dir(directory)  # save_pretrained wrote a config of its own


async def serve(directory: Path) -> None:
    """Run both servers until SIGTERM."""
    import uvicorn
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    from npufleet.cluster.engine.service import serve_engine
    from npufleet.cluster.gateway.server import bind

    argv = f"--model {directory} --served-model-name {NAME} --dtype float32 --enforce-eager --max-num-seqs 8"
    argv += f" --max-num-batched-tokens 256 --num-gpu-blocks-override 64 --max-model-len {MAX_MODEL_LEN}"
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(argv.split())
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(args))
    served = await serve_engine(llm)
    tasks = await llm.get_supported_tasks()
    app = build_app(args, tasks, llm.model_config)
    await init_app_state(llm, app.state, args, tasks)
    sock = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", loop="none"))
    app.state.server = server
    plain = asyncio.create_task(server.serve(sockets=[sock]))
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.05)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    print(f"engine {served.address} plain http://127.0.0.1:{sock.getsockname()[1]}", flush=True)
    await stop.wait()
    server.should_exit = True
    await plain
    await served.stop()
    llm.shutdown()


if __name__ == "__main__":
    target = Path(sys.argv[1])
    write_checkpoint(target)
    asyncio.run(serve(target))
