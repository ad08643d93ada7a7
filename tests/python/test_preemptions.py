# SPDX-License-Identifier: Apache-2.0
"""Requests that are preempted for want of KV blocks keep their KV in host memory: the option offload_preempted."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import scenarios
from conftest import result_of

from torpor import errors
from torpor.vllm import portable
from torpor.vllm.options import Options

PROCESS = Path(__file__).parent / "preemptions_process.py"
ON = {"sessions": True, "offload_preempted": True}


def played(zygote, model, torpor: dict, *names: str) -> dict:
    result = result_of(zygote.run([PROCESS, model, json.dumps(torpor), json.dumps(names)]))
    scenarios.check(result)
    for of in result.values():
        assert of["preempted"] > 0 and of["images"] == [] and of["used"] == 0
    return result


@pytest.fixture(scope="module")
def result(zygote, tiny_model) -> dict:
    names = (
        "preempt", "are_aborted", "get_new_weights", "lose_their_kv_and_are_hibernated", "are_aborted_by_a_sleep",
        "sleep", "go_to_disk", "are_hibernated",
    )  # fmt: skip
    return played(zygote, tiny_model, ON, *names)


def same(of: dict) -> bool:
    return all(of["same"].values())


@pytest.mark.slow
@pytest.mark.core
def test_a_preempted_request_goes_on_with_its_kv(result):
    of = result["preempt"]
    assert same(of) and of["again"] == 0
    assert of["counts"] == {"offloaded": of["preempted"], "recomputed": 0}


@pytest.mark.slow
@pytest.mark.long
def test_without_the_option_it_is_computed_again(zygote, tiny_model):
    of = played(zygote, tiny_model, {"sessions": True}, "preempt")["preempt"]
    assert same(of) and of["again"] > 50 and of["counts"] == {}


@pytest.mark.slow
def test_without_room_in_host_memory_it_is_computed_again(zygote, tiny_model):
    of = played(zygote, tiny_model, ON | {"arena_budget_bytes": 4096}, "preempt")["preempt"]
    assert same(of) and of["again"] > 50
    assert of["counts"] == {"offloaded": 0, "recomputed": of["preempted"]}


@pytest.mark.slow
@pytest.mark.core
def test_one_that_is_aborted_meanwhile_leaves_nothing(result):
    of = result["are_aborted"]
    assert [name for name, is_same in of["same"].items() if not is_same] == [of["gone"]]


@pytest.mark.slow
@pytest.mark.core
def test_its_kv_is_not_used_with_new_weights(result):
    of = result["get_new_weights"]
    assert same(of) and of["again"] > 50


@pytest.mark.slow
@pytest.mark.core
def test_one_whose_kv_is_used_no_more_can_leave(result):
    of = result["lose_their_kv_and_are_hibernated"]
    assert same(of) and of["waits"] and of["images"] == []


@pytest.mark.slow
@pytest.mark.core
def test_a_sleep_that_aborts_it_leaves_nothing_in_host_memory(result):
    without, with_one = result["are_aborted_by_a_sleep"]["asleep"]
    assert without == with_one


@pytest.mark.slow
@pytest.mark.core
def test_a_sleep_keeps_it_and_a_checkpoint_has_it_computed_again(result):
    of = result["sleep"]
    assert same(of) and of["again"] == 0
    of = result["go_to_disk"]
    assert same(of) and of["requests"] == 5 and of["again"] > 0 and of["counts"]["recomputed"] > 0


@pytest.mark.slow
@pytest.mark.core
def test_it_can_be_hibernated(result):
    assert same(result["are_hibernated"])


@pytest.mark.core
@pytest.mark.parametrize("outputs", [0, 3])
def test_prompt_logprobs_that_were_given_do_not_have_it_computed_again(outputs):
    request = SimpleNamespace(
        request_id="a", block_hashes=[b"1"], num_output_tokens=outputs, skip_reading_prefix_cache=True
    )
    admissions = portable.Admissions()
    admissions.expect_again(request, 5)
    assert admissions.match(request, 0) == (5, True) and request.block_hashes == []
    assert request.skip_reading_prefix_cache is (outputs == 0)  # vLLM takes no KV of a request that has it


@pytest.mark.core
def test_what_it_needs_is_said():
    with pytest.raises(errors.InvalidArgument, match="offload_preempted without sessions"):
        Options.of(SimpleNamespace(additional_config={"torpor": {"offload_preempted": True}}))
    parallel = SimpleNamespace(
        pipeline_parallel_size=1, decode_context_parallel_size=1, prefill_context_parallel_size=1, data_parallel_size=1
    )
    config = SimpleNamespace(
        additional_config={"torpor": ON}, parallel_config=parallel, speculative_config=None, lora_config=None,
        scheduler_config=SimpleNamespace(async_scheduling=True, scheduler_cls=None), sleep_mode_backend=None,
    )  # fmt: skip
    found = portable.unsupported(config, SimpleNamespace(kv_cache_groups=[]))
    assert "offload_preempted and async scheduling" in found
