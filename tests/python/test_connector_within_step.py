# SPDX-License-Identifier: Apache-2.0
"""Loads of the KV connector that end within a step, and what is done for requests that wait."""

import os
from pathlib import Path

import gpu_path
import pytest
from conftest import result_of
from connector_served import BLOCKS, CONVERSATIONS

HERE = Path(__file__).parent
PROCESS = HERE / "connector_within_step_process.py"
pytestmark = [pytest.mark.slow, pytest.mark.gpu_path, pytest.mark.cpu]


@pytest.fixture(scope="module")
def happened(zygote, tiny_model, tmp_path_factory):
    result = result_of(zygote.run([PROCESS, tiny_model, tmp_path_factory.mktemp("within")]))
    assert result["block"] == 1
    return result


def test_a_small_load_costs_no_step_and_one_beyond_the_budget_does(happened):
    result = happened["first_token"]
    assert result["steps"]["small"] == 1 < result["steps"]["large"]
    assert result["counted"] == len(result["within"]) == 1 and result["loaded"] == 6 + 7
    assert result["cached"] == [6 * 32, 7 * 32] and result["same"] and result["left"] == [0, 0, 0]


def test_a_step_that_computes_nothing_waits_for_a_transfer(happened):
    result = happened["waits"]
    assert result["idle"] > 0 and result["waits"] == [0.002] and result["others"] == [0]
    assert result["within"] == [] and result["same"]


def test_tokens_are_the_same(happened):
    result = happened["identical"]
    assert result["tokens"][0] == result["tokens"][1] == result["tokens"][2]
    cold, *warm = result["cached"]
    assert all(cached > cold + CONVERSATIONS * 32 for cached in warm)
    counted, tiers = result["counted"]
    assert counted == sum(tiers.values()) and result["within"] > 0
    assert result["stats"]["held_blocks"] == result["stats"]["loading_requests"] == 0


def test_a_damaged_block_is_computed_and_serves_no_request(happened):
    """vLLM keeps its blocks in the prefix cache meanwhile, where the next request would find them."""
    result = happened["damaged"]
    assert len(result["each"]) == 6
    for number, each in enumerate(result["each"]):
        assert each["written"] >= 1 and len(each["within"]) == 1 and each["damaged"] == 1
        assert each["first"] == [] and each["differing"] == [] and each["answers"] == (11 if number < 2 else 8)
        assert each["in_flight"] == gpu_path.active()
        assert each["cached"] == 7 * 32 and each["left"] == [0, 0, 0]
    assert result["free"] == BLOCKS - 1


def test_what_only_the_disk_has_comes_up_while_its_request_waits(happened):
    result = happened["ahead"]
    assert result["came"] == 8 and result["computed"] == [0] and result["same"]
    assert result["tiers"] == {"device": 0, "host": 8 * 32, "disk": 0, "kv_store": 0, "other": 0}
    assert result["within"] == 1


def test_aborts_preemptions_and_resets_in_the_middle_change_no_token(happened):
    result = happened["disturbed"]
    assert result["differing"] == [] and result["aborted"] > 0
    assert result["resets"] > 0 or gpu_path.active()  # vLLM refuses them while steps are in flight
    assert result["free"] == BLOCKS - 1 and result["stats"]["held_blocks"] == 0
    assert result["stats"]["loads_within_step"] > 0


@pytest.mark.long
@pytest.mark.skipif(gpu_path.active(), reason="model runner V2 has no generators")
def test_a_rank_that_saw_no_damage_draws_the_same_again(zygote, tiny_model, tmp_path):
    env = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    result = result_of(zygote.run([HERE / "connector_ranks_again_process.py", tiny_model, tmp_path], env=env))
    assert result["within"] > 1 and result["loaded"] == result["computed"]
