"""Prometheus series of one gateway: vLLM's own names per model deployment, and the gateway's.

vLLM's Prometheus logger belongs to one engine per process: a second one removes the first one's series. So
the gateway keeps a registry of its own, and fills vLLM's request series from the same iteration statistics.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_GAP_SECONDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_SECONDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
)  # fmt: skip
_TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))


class GatewayMetrics:
    """All series of one gateway; labels are given by position in the order written here."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        model = ["model_name"]

        def counter(name: str, text: str, labels: list[str]) -> Counter:
            return Counter(name, text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, model, buckets=buckets, registry=self.registry)

        self.http = counter(
            "npufleet_gateway_requests", "HTTP requests answered.", ["model_name", "path", "code"]
        )
        self.http_open = Gauge(
            "npufleet_gateway_requests_in_flight", "HTTP requests being answered.", registry=self.registry
        )
        self.attempts = counter(
            "npufleet_gateway_engine_calls", "Calls to engines by the gRPC status they ended with.",
            ["model_name", "code"],
        )  # fmt: skip
        self.retries = counter("npufleet_gateway_retries", "Requests sent to another engine.", model)
        self.no_engine = counter("npufleet_gateway_no_engine", "Requests that no engine could take.", model)
        self.engines = Gauge(
            "npufleet_gateway_engines", "Engines that can take a request.", model, registry=self.registry
        )
        self.running = Gauge(
            "vllm:num_requests_running",
            "Requests under way from this gateway.",
            model,
            registry=self.registry,
        )
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prefill tokens processed.", model)
        self.cached_tokens = counter("vllm:prompt_tokens_cached", "Prompt tokens found in a cache.", model)
        self.generation_tokens = counter("vllm:generation_tokens", "Generation tokens processed.", model)
        self.finished = counter(
            "vllm:request_success", "Finished requests.", ["model_name", "finished_reason"]
        )
        self.first_token = histogram("vllm:time_to_first_token_seconds", "Time to first token.", _SECONDS)
        self.token_gap = histogram("vllm:inter_token_latency_seconds", "Time between tokens.", _GAP_SECONDS)
        self.per_token = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per output token.", _GAP_SECONDS
        )
        self.latency = histogram("vllm:e2e_request_latency_seconds", "Whole request.", _REQUEST_SECONDS)
        self.queue = histogram("vllm:request_queue_time_seconds", "Waiting for an engine.", _REQUEST_SECONDS)
        self.prefill = histogram("vllm:request_prefill_time_seconds", "Prefill.", _REQUEST_SECONDS)
        self.decode = histogram("vllm:request_decode_time_seconds", "Decode.", _REQUEST_SECONDS)
        self.prompt_size = histogram("vllm:request_prompt_tokens", "Prompt tokens per request.", _TOKENS)
        self.answer_size = histogram("vllm:request_generation_tokens", "Tokens per answer.", _TOKENS)


class ModelStats:
    """What AsyncLLM calls its logger manager, for one model deployment: fills the series above."""

    def __init__(self, model: str, metrics: GatewayMetrics) -> None:
        self._finished = metrics.finished
        self._model = model
        for name in (
            "prompt_tokens", "cached_tokens", "generation_tokens", "first_token", "token_gap", "per_token",
            "latency", "queue", "prefill", "decode", "prompt_size", "answer_size",
        ):  # fmt: skip
            setattr(self, f"_{name}", getattr(metrics, name).labels(model))

    def record(
        self,
        scheduler_stats: Any = None,
        iteration_stats: Any = None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Take the statistics of one batch of outputs (vLLM's ``IterationStats``); the scheduler's stay with
        it."""
        if iteration_stats is None:
            return
        series: Any = self
        if total := iteration_stats.prompt_token_stats.total:
            series._prompt_tokens.inc(total)
            series._cached_tokens.inc(iteration_stats.prompt_token_stats.cached_tokens)
        series._generation_tokens.inc(iteration_stats.num_generation_tokens)
        for value in iteration_stats.time_to_first_tokens_iter:
            series._first_token.observe(value)
        for value in iteration_stats.inter_token_latencies_iter:
            series._token_gap.observe(value)
        for request in iteration_stats.finished_requests:
            self._finished.labels(self._model, str(request.finish_reason)).inc()
            series._latency.observe(request.e2e_latency)
            series._queue.observe(request.queued_time)
            series._prefill.observe(request.prefill_time)
            series._decode.observe(request.decode_time)
            series._per_token.observe(request.mean_time_per_output_token)
            series._prompt_size.observe(request.num_prompt_tokens)
            series._answer_size.observe(request.num_generation_tokens)

    def went_on(self, tokens: int, gap: float) -> None:
        """One running request got ``tokens`` more, ``gap`` seconds after those before."""
        series: Any = self
        series._generation_tokens.inc(tokens)
        series._token_gap.observe(gap)

    def record_admission_rejection(self, reason: str) -> None:
        """Nothing is rejected by vLLM's own admission in a gateway: engines and the router do that."""

    def log(self) -> None:
        """No periodic log line: /metrics has it all."""
