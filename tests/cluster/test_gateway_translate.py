"""Requests to messages, messages to outputs: the rules that decide what a client sees."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto import vllm_engine_pb2 as pb
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason

from npufleet.cluster.gateway.logprobs import output_logprobs, prompt_logprobs
from npufleet.cluster.gateway.requests import from_core_request, unknown_sampling_fields
from npufleet.cluster.gateway.responses import ResponseReader
from npufleet.cluster.proto.extension import FIELDS
from npufleet.cluster.proto.features import EngineFeatures

EVERYTHING = EngineFeatures(fields=frozenset(FIELDS))
STOCK = EngineFeatures()
EOS = 9


def core_request(params: SamplingParams, prompt: list[int] | None = None, **more: Any) -> EngineCoreRequest:
    """As vLLM's input processor makes it."""
    params.update_from_generation_config({}, EOS)
    values = {"lora_request": None, "cache_salt": None, "data_parallel_rank": None, **more}
    return EngineCoreRequest(
        request_id="r",
        prompt_token_ids=prompt or [1, 2, 3],
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        **values,
    )


def test_every_sampling_field_of_the_pinned_vllm_is_known() -> None:
    assert unknown_sampling_fields() == set()


@pytest.mark.parametrize(
    ("kind", "stop", "stream"),
    [
        (RequestOutputKind.DELTA, None, True),
        (RequestOutputKind.CUMULATIVE, None, True),
        (RequestOutputKind.FINAL_ONLY, None, False),
        (RequestOutputKind.FINAL_ONLY, ["x"], True),
    ],
)
def test_a_call_streams_unless_only_the_whole_matters(
    kind: RequestOutputKind, stop: list[str] | None, stream: bool
) -> None:
    message = from_core_request(core_request(SamplingParams(output_kind=kind, stop=stop))).message
    assert message.stream is stream
    assert not message.sampling_params.stop


def test_fields_of_the_message() -> None:
    params = SamplingParams(
        temperature=0.5, top_p=0.25, top_k=-1, min_p=0.5, max_tokens=7, min_tokens=2, seed=-5,
        ignore_eos=True, presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.5,
        logit_bias={4: -1.5}, stop_token_ids=[5], n=3,
    )  # fmt: skip
    request = core_request(params, data_parallel_rank=2, trace_headers={"Traceparent": "t"})
    outgoing = from_core_request(request)
    sent = outgoing.message.sampling_params
    assert (sent.temperature, sent.top_p, sent.top_k, sent.min_p) == (0.5, 0.25, 0, 0.5)
    assert (sent.max_tokens, sent.min_tokens, sent.seed, sent.ignore_eos, sent.n) == (7, 2, -5, True, 1)
    assert (sent.presence_penalty, sent.frequency_penalty, sent.repetition_penalty) == (0.5, -0.5, 1.5)
    assert dict(sent.logit_bias) == {4: -1.5}
    assert list(sent.stop_token_ids) == [5]
    assert outgoing.message.data_parallel_rank == 2
    assert outgoing.fields == {}
    assert outgoing.trace == (("traceparent", "t"),)


@pytest.mark.parametrize(
    ("constraint", "name", "value"),
    [
        ({"json": '{"type": "object"}'}, "json_schema", '{"type": "object"}'),
        ({"json": {"type": "object"}}, "json_schema", '{"type": "object"}'),
        ({"regex": "a+"}, "regex", "a+"),
        ({"grammar": "root ::= 'a'"}, "grammar", "root ::= 'a'"),
        ({"json_object": True}, "json_object", True),
        ({"structural_tag": "{}"}, "structural_tag", "{}"),
    ],
)
def test_constraints(constraint: dict[str, Any], name: str, value: Any) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**constraint))
    sent = from_core_request(core_request(params)).message.sampling_params
    assert sent.WhichOneof("constraint") == name
    assert getattr(sent, name) == value


def test_a_top_k_beyond_the_message_means_no_limit() -> None:
    sent = from_core_request(core_request(SamplingParams(top_k=2**40))).message.sampling_params
    assert sent.top_k == 2**31 - 1


def test_fields_of_the_extension() -> None:
    params = SamplingParams(
        seed=2**31, bad_words=["a"], allowed_token_ids=[1], skip_reading_prefix_cache=True,
        repetition_detection=RepetitionDetectionParams(max_pattern_size=4, min_count=3),
        structured_outputs=StructuredOutputsParams(choice=["a", "b"], disable_any_whitespace=True),
        extra_args={"kv_transfer_params": {"do_remote_decode": True}, "mine": 1}, stream_interval=4,
    )  # fmt: skip
    request = core_request(params, cache_salt="s", priority=-2, session_id="me", reasoning_ended=False)
    outgoing = from_core_request(request)
    assert outgoing.fields == {
        "seed": 2**31,
        "bad_words": ["a"],
        "allowed_token_ids": [1],
        "skip_reading_prefix_cache": True,
        "repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 0, "min_count": 3},
        "structured_outputs": {"disable_any_whitespace": True},
        "extra_args": {"mine": 1},
        "stream_interval": 4,
        "cache_salt": "s",
        "priority": -2,
        "session_id": "me",
        "reasoning_ended": False,
    }
    assert not outgoing.message.sampling_params.HasField("seed")
    assert outgoing.message.kv_transfer_params_json == '{"do_remote_decode": true}'
    assert list(outgoing.message.sampling_params.choice.choices) == ["a", "b"]
    with pytest.raises(VLLMValidationError, match="allowed_token_ids, bad_words"):
        outgoing.to_engine(STOCK)
    _, metadata, ranked = outgoing.to_engine(EVERYTHING)
    assert [key for key, _ in metadata] == ["x-npufleet-ext-bin"]
    assert not ranked


def test_opting_out_of_a_watermark_is_never_lost() -> None:
    params = SamplingParams(watermarking=False)
    assert from_core_request(core_request(params)).fields == {}
    assert from_core_request(core_request(params), watermarks=True).fields == {"watermarking": False}


@pytest.mark.parametrize("more", [{"resumable": True}, {"prompt_embeds": np.zeros(2)}])
def test_what_cannot_be_carried_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(VLLMValidationError, match="cannot be sent"):
        from_core_request(core_request(SamplingParams(), **more))


@pytest.mark.parametrize(("asked", "sent"), [(0, 0), (3, 4), (20, 20)])
def test_logprobs_ask_a_stock_engine_for_one_more(asked: int, sent: int) -> None:
    outgoing = from_core_request(core_request(SamplingParams(logprobs=asked)))
    assert outgoing.to_engine(STOCK)[0].sampling_params.logprobs == sent
    message, _, ranked = outgoing.to_engine(EVERYTHING)
    assert message.sampling_params.logprobs == asked
    assert ranked


def chunk(*ids: int, prompt: int = 3) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        chunk=pb.GenerateStreamChunk(token_ids=ids, prompt_tokens=prompt, cached_tokens=1)
    )


def complete(reason: str, *ids: int, **more: Any) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        complete=pb.GenerateComplete(output_ids=ids, finish_reason=reason, prompt_tokens=3, **more)
    )


def read(
    responses: list[pb.GenerateResponse], *, stream: bool = True, **params: Any
) -> list[EngineCoreOutput]:
    """The outputs that follow from ``responses``; the last one must end the stream, no other."""
    request = core_request(SamplingParams(**{"max_tokens": 50, **params}))
    reader = ResponseReader(request, stream=stream, ranked=True, max_model_len=10)
    outputs: list[EngineCoreOutput] = []
    ends = [reader.feed(response, outputs) for response in responses]
    assert ends == [False] * (len(responses) - 1) + [True]
    return outputs


def shape(outputs: list[EngineCoreOutput]) -> list[tuple[list[int], FinishReason | None]]:
    return [(output.new_token_ids, output.finish_reason) for output in outputs]


def test_a_stop_token_waits_for_the_finish() -> None:
    outputs = read([chunk(4), chunk(EOS), complete("stop", EOS)])
    assert shape(outputs) == [([4], None), ([EOS], FinishReason.STOP)]


def test_a_token_that_looked_like_the_end_is_passed_on_when_more_comes() -> None:
    outputs = read([chunk(4, EOS), chunk(5), complete("abort")])
    assert shape(outputs) == [([4, EOS], None), ([5], None), ([], FinishReason.ABORT)]


def test_the_last_token_of_the_budget_waits_for_the_finish() -> None:
    outputs = read([chunk(4), chunk(5), complete("length", 5)], max_tokens=2)
    assert shape(outputs) == [([4], None), ([5], FinishReason.LENGTH)]


def test_the_context_limit_is_a_budget_too() -> None:
    outputs = read([chunk(4, 5, 6), chunk(4, 5, 6, 7), complete("length", 7)])
    assert shape(outputs) == [([4, 5, 6], None), ([4, 5, 6, 7], FinishReason.LENGTH)]


@given(st.lists(st.lists(st.integers(3, EOS), min_size=1, max_size=4), min_size=1, max_size=6), st.data())
def test_however_tokens_are_cut_all_come_once_and_the_finish_last(parts: list[list[int]], data: Any) -> None:
    reason = data.draw(st.sampled_from(["stop", "length", "abort"]))
    outputs = read([*(chunk(*part) for part in parts), complete(reason, *parts[-1])])
    assert [i for output in outputs for i in output.new_token_ids] == [i for part in parts for i in part]
    finishes = [str(output.finish_reason) for output in outputs if output.finish_reason is not None]
    assert finishes == [reason]
    assert outputs[-1].finish_reason is not None
    if parts[-1][-1] == EOS:
        assert outputs[-1].new_token_ids == parts[-1]


def test_an_answer_of_one_piece_has_everything() -> None:
    outputs = read([complete("stop", 4, 5, EOS, matched_token_id=EOS)], stream=False)
    assert shape(outputs) == [([4, 5, EOS], FinishReason.STOP)]
    assert outputs[0].stop_reason == EOS
    assert outputs[0].prefill_stats is not None


def test_an_end_before_the_first_token() -> None:
    outputs = read([complete("abort")])
    assert shape(outputs) == [([], FinishReason.ABORT)]


def test_an_unknown_finish_is_an_error_not_a_success() -> None:
    assert read([complete("exploded", 4)], stream=False)[0].finish_reason is FinishReason.ERROR


def test_only_the_first_output_tells_the_prefill() -> None:
    outputs = read([chunk(4), chunk(5), complete("stop")])
    stats = outputs[0].prefill_stats
    assert stats is not None
    assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_computed_tokens) == (3, 1, 2)
    assert [event.type.name for event in outputs[0].events or ()] == ["QUEUED", "SCHEDULED"]
    assert outputs[1].prefill_stats is None


def test_kv_transfer_params_come_back() -> None:
    outputs = read([complete("length", 4, kv_transfer_params_json='{"a": [1]}')], stream=False)
    assert outputs[0].kv_transfer_params == {"a": [1]}


def logprob_message(*positions: tuple[list[int], list[float], int | None]) -> pb.OutputLogProbs:
    """Positions of (token ids with the chosen one first, their values, rank or None for a stock engine)."""
    message = pb.OutputLogProbs()
    for ids, values, rank in positions:
        message.token_ids.append(ids[0])
        message.token_logprobs.append(values[0])
        top = message.top_logprobs.add(token_ids=ids, values=values)
        if rank is not None:
            top.token_ids.append(rank)
    return message


def test_ranked_rows_put_the_chosen_token_at_its_place() -> None:
    message = logprob_message(
        ([7, 5, 6], [-2.0, -1.0, -3.0], 2), ([8, 5, 6, 7], [-9.0, -1.0, -2.0, -3.0], 40)
    )
    ids, values, ranks, _ = output_logprobs(message, 3, True)
    assert ids.tolist() == [[7, 5, 7, 6], [8, 5, 6, 7]]
    assert values.tolist() == [[-2.0, -1.0, -2.0, -3.0], [-9.0, -1.0, -2.0, -3.0]]
    assert ranks.tolist() == [2, 40]


def test_zero_alternatives_still_carry_the_rank() -> None:
    ids, values, ranks, _ = output_logprobs(logprob_message(([7], [-2.0], 3)), 0, True)
    assert (ids.tolist(), values.tolist(), ranks.tolist()) == ([[7]], [[-2.0]], [3])


def test_stock_rows_rebuild_rank_and_place_from_the_values() -> None:
    message = logprob_message(
        ([7, 5, 6], [-2.0, -1.0, -3.0], None),  # the chosen token is the second most likely of three
        ([8, 5, 6], [-9.0, -1.0, -2.0], None),  # the chosen token is outside of the two asked for
    )
    ids, values, ranks, _ = output_logprobs(message, 2, False)
    assert ids.tolist() == [[7, 5, 7], [8, 5, 6]]
    assert values.tolist() == [[-2.0, -1.0, -2.0], [-9.0, -1.0, -2.0]]
    assert ranks.tolist() == [2, 3]


def test_prompt_logprobs_leave_the_first_token_out() -> None:
    message = pb.InputLogProbs(token_ids=[1, 2, 3])
    message.token_logprobs.add()
    message.top_logprobs.add()
    for token in (2, 3):
        message.token_logprobs.add(value=-float(token))
        message.top_logprobs.add(token_ids=[token, 8, 5], values=[-float(token), -0.5])
    tensors = prompt_logprobs(message, 1, True)
    assert tensors is not None
    assert tensors.logprob_token_ids.tolist() == [[2, 8], [3, 8]]
    assert tensors.logprobs.tolist() == [[-2.0, -0.5], [-3.0, -0.5]]
    assert tensors.selected_token_ranks.tolist() == [5, 5]


def test_no_logprobs_are_no_arrays() -> None:
    assert output_logprobs(pb.OutputLogProbs(), 1, True) is None
    assert prompt_logprobs(pb.InputLogProbs(token_ids=[1]), 1, True) is None
