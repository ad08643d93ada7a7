# SPDX-License-Identifier: Apache-2.0
"""Requests that no checkpoint can hold: they sleep in their process, and a new one ends them alone, by name."""

from __future__ import annotations

import pytest
from conftest import long_on_gpu_path
from msgspec.structs import replace
from requests_of_tests import run
from vllm import SamplingParams
from vllm.v1.request import RequestStatus

from torpor.errors import Incompatible
from torpor.vllm.scheduler_values import request_from_value, request_to_value


class InPieces:
    """A prompt that comes piece by piece, each answered before the next, as AsyncLLM takes a stream of them."""

    def __init__(self, one, name: str = "pieces"):
        self._one, self._name, self.id = one, name, None

    def give(self, text: str | None) -> None:
        """None: that was the last one."""
        engine = self._one.engine
        request = engine.input_processor.process_inputs(
            self.id or self._name,
            text or {"prompt_token_ids": [0]},
            SamplingParams(max_tokens=5, temperature=0, ignore_eos=True),
            supported_tasks=engine.get_supported_tasks(),
            resumable=text is not None,
        )
        if self.id is None:
            engine.input_processor.assign_request_id(request)
            self.id = request.request_id
        request.external_req_id = self._name
        engine.output_processor.add_request(request, text, None, 0)
        # Both sides add the next piece to their list: it must not be the same one, as it is never with AsyncLLM.
        engine.engine_core.add_request(replace(request, prompt_token_ids=list(request.prompt_token_ids)))

    @property
    def status(self) -> RequestStatus:
        return self._one.core.scheduler.requests[self.id].status

    def answered(self) -> list[int]:
        """Runs until what was given of it is answered."""
        tokens = []
        for _ in range(20):  # more than it takes
            for output in self._one.engine.step():
                if output.request_id == self._name:
                    tokens = list(output.outputs[0].token_ids)
            if tokens and self.status is RequestStatus.WAITING_FOR_STREAMING_REQ:
                break
        return tokens


PIECES = ["Once upon a time", " there lived an old clock maker", " by the sea"]


def answers_to_pieces(one, between) -> list[list[int]]:
    """Return the tokens after each of PIECES. `between` is called after each answer, with the prompt in pieces."""
    one.begin(0, ["short"])
    pieces = InPieces(one)
    of_pieces = []
    for text in PIECES:
        pieces.give(text)
        of_pieces.append(pieces.answered())
        if not of_pieces[-1]:
            one.engine.abort_request(["pieces"])  # else run() would never return
            break
        between(pieces)
    else:
        pieces.give(None)
    run(one.engine)
    return of_pieces


@pytest.mark.gpu_path
@long_on_gpu_path
@pytest.mark.parametrize("to", ["host", "disk"])
def test_a_prompt_that_comes_in_pieces_sleeps_while_its_next_one_is_waited_for(one, to):
    expected = answers_to_pieces(one, lambda pieces: None)
    assert [len(tokens) for tokens in expected] == [5, 10, 15]

    def asleep(pieces) -> None:
        report = one.llm.sleep(level=1, preserve_state=True, to=to)
        assert [(each["id"], "pieces" in each["error"]) for each in report.bound_requests] == [(pieces.id, True)]
        one.llm.wake_up()

    assert answers_to_pieces(one, asleep) == expected
    assert one.llm.torpor.state().recomputed_tokens == 0


@pytest.mark.gpu_path
@long_on_gpu_path
def test_a_prompt_that_comes_in_pieces_is_computed_again_if_its_kv_is_dropped(one):
    expected = answers_to_pieces(one, lambda pieces: None)

    def drop(pieces) -> None:
        one.llm.sleep(level=1, preserve_state=True)
        assert one.llm.wake_up(kv="recompute")
        assert one.core.scheduler.requests[pieces.id].num_computed_tokens == 0

    assert answers_to_pieces(one, drop) == expected


@pytest.mark.gpu_path
@long_on_gpu_path
def test_a_prompt_that_comes_in_pieces_ends_alone_in_a_new_process(one):
    answers = one.begin(0, ["greedy", "seeded"])
    pieces = InPieces(one)
    for text in PIECES[:2]:
        pieces.give(text)
        pieces.answered()
    answers |= run(one.engine, 2)
    report = one.llm.sleep(level=1, preserve_state=True, to="disk")
    answers |= one.stopped()
    one.llm.wake_up()
    pieces.give(None)
    run(one.engine)
    one.llm.reset_prefix_cache()
    woken = one.llm.wake_up(from_checkpoint=report.checkpoint)
    [failed] = woken.failed_requests
    assert failed["id"] == pieces.id and "prompt that comes in pieces" in failed["error"]
    finished = one.finish(answers)
    assert {name: finished[name] for name in ("greedy", "seeded")} == {
        name: one.expected[name] for name in ("greedy", "seeded")
    }
    [[_, _, _, reason, why, *_]] = finished["pieces"][1]
    assert reason == "error" and why == failed["error"]


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("kv_transfer_params", {"do_remote_prefill": object()}, "its kv_transfer_params"),
        ("ec_transfer_params", {1: 1}, "its ec_transfer_params"),
        ("trace_headers", {"a": b"b"}, "its trace_headers"),
        ("kv_hints", object(), "its kv_hints"),
        ("spec_decode_metrics", object(), "its spec_decode_metrics"),
        ("resumable", True, "its prompt that comes in pieces"),
        ("extra_args", {"x": object()}, "sampling parameter extra_args"),
        ("reasoning", {"x": object()}, "options of a reasoning parser"),
    ],
)
def test_each_kind_is_named(one, monkeypatch, field, value, named):
    from vllm.v1.structured_output.request import StructuredOutputRequest

    one.begin(2, ["greedy"])
    [request] = one.core.scheduler.requests.values()
    assert "bound" not in request_to_value(request)["engine"]
    target = request
    if field == "extra_args":
        target = request.sampling_params
    elif field == "reasoning":
        structured = StructuredOutputRequest(params=None)
        structured.reasoning_parser_kwargs = value
        field, value = "structured_output_request", structured
    monkeypatch.setattr(target, field, value)
    kept = request_to_value(request)
    with pytest.raises(Incompatible, match=f"{named}.* could not leave the process that slept"):
        request_from_value(kept, None)
