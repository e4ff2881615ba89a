"""The engine's own Prometheus series beside vLLM's ``vllm:`` ones."""

from __future__ import annotations

from prometheus_client import Gauge


class EngineInfo:
    """``npufleet_engine_info``: which engine this process is, on what device; join it to vLLM's series by
    target.
    """

    def __init__(self, engine_id: str, model: str, device: str) -> None:
        gauge = Gauge(
            "npufleet_engine_info",
            "Always 1; its labels say which engine this process is and on which device it runs.",
            labelnames=["engine_id", "model", "device"],
        )
        gauge.labels(engine_id=engine_id, model=model, device=device).set(1)
