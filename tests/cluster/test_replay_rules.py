"""Which answers can go on elsewhere, what the next engine is sent, and what of its messages reaches the client."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto import vllm_engine_pb2 as pb
from vllm.sampling_params import _SAMPLING_EPS

from npufleet.cluster.proto.extension import FIELDS
from npufleet.cluster.router.replay.ends import Finish, Limits, finish_of
from npufleet.cluster.router.replay.rules import continued, why_not
from npufleet.cluster.router.replay.sent import Sent
from npufleet.cluster.router.wire import answered_tokens

IDS = [5, 6, 7]


def request(**more) -> pb.GenerateRequest:
    sampling = {"temperature": 0.0, **more.pop("sampling", {})}
    values = {"tokenized": pb.TokenizedInput(input_ids=IDS, original_text="abc"), "stream": True, **more}
    return pb.GenerateRequest(request_id="r", sampling_params=pb.SamplingParams(**sampling), **values)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"max_tokens": 5, "min_tokens": 5, "n": 1, "ignore_eos": True},
        {"stop_token_ids": [1], "logit_bias": {1: 2.0}, "logprobs": 5, "top_k": 3, "seed": 4},
        {"repetition_penalty": 1.3},  # it counts the tokens of prompt and answer alike
        {"temperature": _SAMPLING_EPS / 2},
    ],
)
def test_what_depends_on_the_tokens_so_far_alone_goes_on(sampling: dict):
    assert why_not(request(sampling=sampling), {}, "greedy") is None
    assert why_not(request(sampling=sampling), {}, "all") is None
    assert why_not(request(sampling=sampling), {}, "off") == "router.resume is off"


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"stream": False}, "not streamed"),
        ({"tokenized": None, "text": "abc"}, "prompt is text"),
        ({"mm_inputs": pb.MultimodalInputs(mm_hashes=["a"])}, "multi-modal"),
        ({"extra_mm_inputs": [pb.MultimodalInputs()]}, "multi-modal"),
        ({"media_refs": pb.MediaRefs()}, "multi-modal"),
        ({"kv_transfer_params_json": "{}"}, "KV transfer"),
        ({"kv_transfer_params": pb.KvTransferParams()}, "KV transfer"),
        ({"sampling": {"n": 2}}, "several answers"),
        ({"sampling": {"json_object": True}}, "grammar"),
        ({"sampling": {"choice": pb.ChoiceConstraint(choices=["a"])}}, "grammar"),
        ({"sampling": {"stop": ["x"]}}, "stop strings"),
        ({"sampling": {"presence_penalty": -0.1}}, "presence and frequency"),
        ({"sampling": {"frequency_penalty": 0.1}}, "presence and frequency"),
        ({"sampling": {"prompt_logprobs": 0}}, "of the prompt"),
        ({"sampling": {"truncate_prompt_tokens": -1}}, "truncated"),
    ],
)
def test_what_belongs_to_the_answer_as_a_whole_does_not(more: dict, why: str):
    for mode in ("greedy", "all"):
        told = why_not(request(**more), {}, mode)
        assert told is not None and why in told


def test_drawn_tokens_need_the_users_word_and_no_seed():
    for temperature in (1.0, _SAMPLING_EPS * 2):
        drawn = request(sampling={"temperature": temperature})
        assert "drawn" in (why_not(drawn, {}, "greedy") or "")
        assert why_not(drawn, {}, "all") is None
        assert "seed" in (why_not(drawn, {"seed": 1 << 40}, "all") or "")
    unset = request()
    unset.sampling_params.ClearField("temperature")  # vLLM's servicer takes 1
    assert "drawn" in (why_not(unset, {}, "greedy") or "")
    assert why_not(request(sampling={"temperature": 1.0, "seed": -1}), {}, "all") is None
    assert "seed" in (why_not(request(sampling={"temperature": 1.0, "seed": 0}), {}, "all") or "")


def test_each_extension_field_is_decided_on():
    """A new one is refused until somebody has thought about it."""
    refused = {name for name in FIELDS if why_not(request(), {name: None}, "all") is not None}
    assert refused == {
        "bad_words", "trace_decode_token_ids", "thinking_token_budget", "extra_args", "repetition_detection",
        "structured_outputs",
    }  # fmt: skip


def test_the_next_engine_gets_the_tokens_and_less_to_do():
    asked = request(sampling={"max_tokens": 10, "min_tokens": 3}, data_parallel_rank=1)
    for said, limits in [([], (10, 3)), ([1, 2], (8, 1)), ([1] * 9, (1, 0))]:
        made = continued(asked, said)
        assert list(made.tokenized.input_ids) == [*IDS, *said]
        assert (made.sampling_params.max_tokens, made.sampling_params.min_tokens) == limits
        assert not made.tokenized.original_text and made.request_id == "r" and made.stream
    assert asked == request(sampling={"max_tokens": 10, "min_tokens": 3}, data_parallel_rank=1)
    assert not continued(request(), [1]).sampling_params.HasField("max_tokens")


@pytest.mark.parametrize(
    ("sampling", "said", "finish"),
    [
        ({"max_tokens": 4}, [1, 2, 3], None),
        ({"max_tokens": 3}, [1, 2, 3], Finish("length")),
        ({"max_tokens": 3}, [1, 2, 9], Finish("stop")),  # an end token comes before the count, as in vLLM
        ({}, [1, 8], Finish("stop", 8)),
        ({"ignore_eos": True}, [1, 9], None),
        ({"ignore_eos": True, "stop_token_ids": [9]}, [1, 9], Finish("stop", 9)),
        ({}, [9, 1], None),
        ({}, [1] * 6, None),
        ({}, [1] * 7, Finish("length")),
        ({}, [1] * 8, None),  # its engine has another limit
        ({}, [], None),
    ],
)
def test_an_answer_that_was_whole_is_known(sampling: dict, said: list[int], finish: Finish | None):
    assert finish_of(request(sampling=sampling), said, Limits(eos=(9, 8), max_model_len=10)) == finish


def chunk(ids: list[int], prompt: int, cached: int) -> bytes:
    part = pb.GenerateStreamChunk(
        token_ids=ids, prompt_tokens=prompt, completion_tokens=len(ids), cached_tokens=cached
    )
    return pb.GenerateResponse(chunk=part).SerializeToString()


@given(st.lists(st.lists(st.integers(0, 2**31), max_size=3), min_size=1, max_size=200), st.data())
def test_tokens_and_counts_over_any_seam(parts: list[list[int]], data: st.DataObject):
    at = data.draw(st.integers(1, len(parts)))
    sent, out = Sent(), []
    for number, ids in enumerate(parts):
        if number == at:
            sent.broke()
        out.append(sent.take(chunk(ids, 3 if number < at else 50, 2 if number < at else 48)))
    assert list(sent.tokens) == [token for ids in parts for token in ids]
    assert out == [chunk(ids, 3, 2) for ids in parts]
    assert sent.readable and not sent.whole


def test_the_last_message_behind_a_seam():
    sent = Sent()
    sent.take(chunk([1, 2], 3, 0))
    sent.broke()
    for told, passed in [((1, [9]), 1), ((4, []), 6), ((0, []), 0)]:
        done = pb.GenerateComplete(
            output_ids=told[1], completion_tokens=told[0], prompt_tokens=5, cached_tokens=4,
            finish_reason="stop", matched_token_id=9,
        )  # fmt: skip
        made = pb.GenerateResponse.FromString(
            sent.take(pb.GenerateResponse(complete=done).SerializeToString())
        ).complete
        assert (made.completion_tokens, made.prompt_tokens, made.cached_tokens) == (passed, 3, 0)
        assert (made.finish_reason, made.matched_token_id, list(made.output_ids)) == ("stop", 9, told[1])
    assert sent.tokens and sent.whole


def test_bytes_that_are_no_message_pass_and_are_remembered():
    sent = Sent()
    assert sent.take(b"\xff") == b"\xff"
    sent.broke()
    assert sent.take(b"\xff") == b"\xff" and not sent.tokens and not sent.readable


def test_the_tokens_of_a_stream_whose_last_message_tells_its_own_alone():
    done = pb.GenerateResponse(complete=pb.GenerateComplete(output_ids=[1], completion_tokens=1))
    assert answered_tokens(done.SerializeToString(), 41) == 40
    done.complete.completion_tokens = 90
    assert answered_tokens(done.SerializeToString(), 1) == 90
    assert answered_tokens(chunk([1], 1, 0), 7) == 7
