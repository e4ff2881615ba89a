"""vLLM's OpenAI application for one model deployment, over the fleet."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import json
import logging
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from fastapi import FastAPI
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.renderers import BaseRenderer, renderer_from_config
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.input_processor import InputProcessor

from ..folder import Folder
from ..router.picker import Picker, RequestInfo
from .bundle import make_folder
from .client import FleetClient
from .engines import fetch_model_info, fetch_tokenizer
from .errors import removed
from .metrics import GatewayMetrics, ModelStats
from .nearby import render_nearby
from .plain import PlainChat, PlainCompletion
from .settings import GatewaySettings, ModelSpec
from .transport import GrpcEngineCore

logger = logging.getLogger(__name__)

_FRONTEND_ARGS = """
    tokenizer_mode trust_remote_code hf_overrides generation_config override_generation_config max_logprobs
    logprobs_mode reasoning_parser reasoning_parser_plugin reasoning_config structured_outputs_config
    tool_call_parser tool_parser_plugin enable_auto_tool_choice exclude_tools_when_tool_choice_none
    tool_strict_level tool_server chat_template chat_template_content_format default_chat_template_kwargs
    response_role return_tokens_as_token_ids enable_force_include_usage enable_prompt_tokens_details
    enable_tokenizer_info_endpoint enable_per_request_metrics trust_request_chat_template watermark
    watermark_config sse_keep_alive_interval renderer_num_workers enable_scale_out log_error_stack
"""
"""Arguments of ``vllm serve`` that shape requests and answers; all others concern the engine alone."""


class _Parser(FlexibleArgumentParser):
    """vLLM's parser, with errors raised instead of printed before an exit."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse_args(spec: ModelSpec, directory: Path) -> Namespace:
    """``vllm serve`` arguments for the frontend of ``spec`` over the files in ``directory``.

    Raises ``ValueError`` for an argument that vLLM does not have, naming the nearest, or a value it refuses.
    """
    parser = make_arg_parser(_Parser())
    known = {action.dest for action in parser._actions}
    argv = ["--model", str(directory), "--served-model-name", spec.name]
    for name, value in spec.args.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"model {spec.name}: vLLM has no argument {name!r}{hint}")
        if name in _FRONTEND_ARGS.split() and value is not None:
            argv += _flag(name, value)
    args: Namespace = parser.parse_args(argv)
    if args.model_tag is not None:
        raise ValueError(
            f"model {spec.name}: an argument has more than one value, but takes one: {args.model_tag!r}"
        )
    validate_parsed_serve_args(args)
    return args


def _flag(name: str, value: Any) -> list[str]:
    option = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [option] if value else ["--no-" + name.replace("_", "-")]
    if isinstance(value, Mapping):
        return [f"{option}={json.dumps(value)}"]
    if isinstance(value, (list, tuple)):
        return [option, *map(str, value)]
    return [f"{option}={value}"]


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    args: Namespace
    config: VllmConfig
    renderer: BaseRenderer
    input_processor: InputProcessor
    app: FastAPI


def _prepare(spec: ModelSpec, directory: Path, max_model_len: int, limits: Mapping[str, int]) -> _Prepared:
    """The slow part, run in a thread: configuration, tokenizer, application."""
    args = parse_args(spec, directory)
    engine_args = AsyncEngineArgs.from_cli_args(args)
    engine_args.max_model_len = max_model_len
    engine_args.max_logprobs = limits.get("max_logprobs", engine_args.max_logprobs)
    model_config = engine_args.create_model_config()
    config = VllmConfig(
        model_config=model_config,
        logging_config=engine_args.create_logging_config(),
        structured_outputs_config=engine_args.create_structured_outputs_config(),
    )
    args.structured_outputs_config = config.structured_outputs_config
    renderer = renderer_from_config(config)
    if not args.trust_request_chat_template:  # a template that a request brings may take as long as it likes
        render_nearby(renderer)
    app = build_app(args, ("generate",), model_config)
    return _Prepared(
        args=args,
        config=config,
        renderer=renderer,
        input_processor=InputProcessor(config, renderer),
        app=app,
    )


class Frontend:
    """One model deployment's application and what it stands on."""

    def __init__(
        self, name: str, app: FastAPI, client: FleetClient, core: GrpcEngineCore, folder: Folder
    ) -> None:
        self.name = name
        self.app = app
        self.client = client
        self.core = core
        self._folder = folder

    async def model_cards(self) -> list[dict[str, Any]]:
        """What /v1/models shows for it."""
        shown = await self.app.state.openai_serving_models.show_available_models()
        # Its root is a temporary directory here, which is nobody's business.
        return [{**card.model_dump(), "root": self.name} for card in shown.data]

    def close(self) -> None:
        """End running requests and remove the files."""
        self.client.end(removed(self.name))
        self.client.shutdown()
        self._folder.close()


async def load_frontend(
    spec: ModelSpec, picker: Picker, settings: GatewaySettings, metrics: GatewayMetrics
) -> Frontend:
    """Build the frontend of ``spec`` from what one of its engines tells.

    Raises ``NoEngine`` when none is ready, ``AioRpcError`` when it cannot be asked, ``ValueError`` for files
    or arguments that do not work.
    """
    with await picker.pick(RequestInfo(model=spec.name)) as lease:
        info, features = await fetch_model_info(lease.channel, settings.control_timeout)
        local = spec.source is not None and await asyncio.to_thread(Path(spec.source).is_dir)
        archive = None if local else await fetch_tokenizer(lease.channel, settings.control_timeout)
    folder = await asyncio.to_thread(make_folder, spec.source, archive)
    with contextlib.ExitStack() as undo:
        undo.callback(folder.close)
        ready = await asyncio.to_thread(_prepare, spec, folder.path, info.max_context_length, features.limits)
        core = GrpcEngineCore(
            spec.name,
            picker,
            settings,
            metrics,
            max_model_len=info.max_context_length,
            watermarks=ready.config.watermark_config is not None,
        )
        client = FleetClient(
            ready.config, ready.renderer, ready.input_processor, core, ModelStats(spec.name, metrics)
        )
        await init_app_state(client, ready.app.state, ready.args, ("generate",))
        if settings.short_streams:
            state = ready.app.state
            seen = bool(ready.args.sse_keep_alive_interval)  # its comments come where no event has passed
            chat, completion = state.openai_serving_chat, state.openai_serving_completion
            state.openai_serving_chat = PlainChat.over(chat, shortcuts=not seen)
            state.openai_serving_completion = PlainCompletion.over(completion, shortcuts=not seen)
        undo.pop_all()
    # vLLM's error handlers ask a dying server to exit; the gateway outlives every engine.
    ready.app.state.server = SimpleNamespace(should_exit=False)
    logger.info("model %s is ready: context %d tokens", spec.name, info.max_context_length)
    return Frontend(spec.name, ready.app, client, core, folder)
