"""What an engine's service reports as waiting: all that must be computed before a new request."""

from __future__ import annotations

from types import SimpleNamespace

from smg_grpc_proto import vllm_engine_pb2 as pb

from npufleet.cluster.engine.service_rpc import EngineService
from tests.fakes.async_llm import FakeAsyncLLM


async def test_admitted_prompts_count_until_their_first_output():
    llm = FakeAsyncLLM()
    stats = SimpleNamespace(num_running_reqs=2, num_waiting_reqs=0, kv_cache_usage=0.25)
    llm.logger_manager = SimpleNamespace(
        stat_loggers=[SimpleNamespace(last_scheduler_stats=stats, engine_index=0)]
    )
    service = EngineService(llm)
    service._loads.submitted("long", 60_000, rank=0)
    service._loads.submitted("short", 500, rank=0)
    told = (await service.GetLoads(pb.GetLoadsRequest(), None)).loads[0]
    assert told.num_waiting_uncached_tokens == 60_500 and told.num_running_reqs == 2
    record = service._load_record(0)
    assert record is not None and record.waiting_uncached_tokens == 60_500
    service._loads.first_output("long", 60_000, 0, rank=0)
    assert service._load_record(None).waiting_uncached_tokens == 500
