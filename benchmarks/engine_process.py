"""One vLLM engine as a child process that runs a batch whenever it is told to; see :class:`Engine`.

Run by file name under either Python (this environment's, or the one with vLLM's CPU backend), so it imports
nothing of ours. It speaks in lines of JSON that begin with a mark, because vLLM logs to the same output.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK = "@engine "


class Engine:
    """The parent's handle on a child; use as a context manager."""

    def __init__(self, python: Path | str, settings: dict[str, Any], environment: dict[str, str]) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
        self._process = subprocess.Popen(
            [str(python), __file__, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**inherited, "VLLM_LOGGING_LEVEL": "WARNING", **environment},
            start_new_session=True,
        )
        self._log: list[str] = []

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, 9)

    def ready(self) -> dict[str, Any]:
        """Wait until the engine is loaded; what it says about itself."""
        return self._answer()

    def run(self, **batch: Any) -> dict[str, Any]:
        """Run one batch; its measurements, with ``cpu_seconds`` of all processes of the engine."""
        assert self._process.stdin is not None
        before = self._cpu_seconds()
        self._process.stdin.write(json.dumps(batch) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        return {**answer, "cpu_seconds": self._cpu_seconds() - before}

    def _cpu_seconds(self) -> float:
        import psutil  # the parent has it; the child may not

        top = psutil.Process(self._process.pid)
        family = [process.cpu_times() for process in (top, *top.children(recursive=True))]
        return sum(times.user + times.system for times in family)

    def _answer(self) -> dict[str, Any]:
        """The next marked line.

        Raises:
            RuntimeError: the child ended instead; with the end of its log.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
            self._log.append(line)
        raise RuntimeError(f"engine process ended ({self._process.wait()}):\n" + "".join(self._log[-40:]))


def say(**message: Any) -> None:
    """Child: one answer to the parent."""
    print(f"\n{MARK}{json.dumps(message)}", flush=True)


def serve(settings: dict[str, Any]) -> None:
    """Child: load the engine, then run one batch per line of input."""
    mode = settings.pop("mode", "batch")
    {"batch": serve_batches, "async": serve_streams, "steps": serve_steps}[mode](settings)


def serve_batches(settings: dict[str, Any]) -> None:
    """``LLM.generate`` of {prompts, tokens}."""
    began = time.monotonic()
    import vllm
    from vllm.platforms import current_platform

    llm = vllm.LLM(**settings)
    say(device=current_platform.device_name, vllm=vllm.__version__, load_seconds=time.monotonic() - began)
    for line in sys.stdin:
        batch = json.loads(line)
        params = vllm.SamplingParams(temperature=0.0, max_tokens=batch["tokens"], ignore_eos=True)
        began = time.perf_counter()
        outputs = llm.generate(batch["prompts"], params, use_tqdm=False)
        seconds = time.perf_counter() - began
        texts = [output.outputs[0].text for output in outputs]
        made = sum(len(output.outputs[0].token_ids) for output in outputs)
        digest = hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:12]
        say(tokens=made, seconds=seconds, text=texts[0], digest=digest)


def serve_streams(settings: dict[str, Any]) -> None:
    """Concurrent ``AsyncLLM.generate`` streams of {prompts (token ids), tokens}."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    async def stream(llm: AsyncLLM, name: str, prompt: list[int], tokens: int) -> int:
        params = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        count = 0
        async for output in llm.generate({"prompt_token_ids": prompt}, params, name):
            count += len(output.outputs[0].token_ids)
        return count

    async def run() -> None:
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))
        say(loaded=True)
        turn = 0
        while line := await asyncio.to_thread(sys.stdin.readline):
            batch, turn = json.loads(line), turn + 1
            began = time.perf_counter()
            calls = [stream(llm, f"{turn}-{i}", p, batch["tokens"]) for i, p in enumerate(batch["prompts"])]
            counts = await asyncio.gather(*calls)
            say(tokens=sum(counts), seconds=time.perf_counter() - began)
        llm.shutdown()

    asyncio.run(run())


def profiled(step: Callable[[], object], steps: int) -> dict[str, float]:
    """Seconds that ``steps`` steps spend in each Python file; what is written in C counts for the file that called."""
    import cProfile
    import pstats

    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        step()
    profiler.disable()
    files: dict[str, float] = {}
    for (file, _, _), (_, _, own, _, callers) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        shares = {file: own} if file != "~" else {}
        for (caller, _, _), (_, _, share, _) in callers.items() if file == "~" else ():
            shares[caller] = shares.get(caller, 0.0) + share
        for name, seconds in shares.items():
            files[name] = files.get(name, 0.0) + seconds
    return files


def serve_steps(settings: dict[str, Any]) -> None:
    """Decode steps one by one, {batch, steps}: milliseconds, and what reached the virtual NPU."""
    import vllm

    from npufleet.kernels.virtual import counters

    engine = vllm.LLM(**settings).llm_engine
    say(loaded=True)
    for turn, line in enumerate(sys.stdin):
        order = json.loads(line)
        room = order["steps"] + order.get("profile", 0) + 20
        params = vllm.SamplingParams(temperature=0.0, max_tokens=room, ignore_eos=True)
        names = [f"{turn}-{index}" for index in range(order["batch"])]
        for name in names:
            engine.add_request(name, {"prompt_token_ids": [5, 6, 7, 8]}, params)
        for _ in range(15):  # prefill and settle
            engine.step()
        counters.reset()
        times, busy = [], time.process_time()
        for _ in range(order["steps"]):
            began = time.perf_counter()
            engine.step()
            times.append(1000 * (time.perf_counter() - began))
        busy = time.process_time() - busy
        seen = counters.read()
        profile = profiled(engine.step, order["profile"]) if "profile" in order else {}
        most = sorted(seen.ops.items(), key=lambda item: -item[1])[:8]
        engine.abort_request(names, internal=False)
        while engine.has_unfinished_requests():
            engine.step()
        say(
            ms=statistics.median(times),
            cpu_ms=1000 * busy / order["steps"],
            ms_p90=sorted(times)[int(0.9 * len(times))],
            calls=seen.calls / order["steps"],
            waits=sum(seen.syncs.values()) / order["steps"],
            waits_by_kind={name: count / order["steps"] for name, count in seen.syncs.items()},
            profile=profile,
            most_called={name: round(calls / order["steps"], 1) for name, calls in most},
        )


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
