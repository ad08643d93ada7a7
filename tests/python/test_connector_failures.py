"""Failures that KV connectors had, each by name, with vLLM's scheduler and workers that are made up.

Elsewhere: `first_schedule_after_wake` is test_connector.py::test_a_sleep_waits_for_what_moves_and_keeps_what_is_in_host_memory,
`host_budget_is_what_is_mapped` is in test_connector_faults.py, and the end of a worker's process, with what it leaves on disk,
test_connector.py::test_what_is_on_disk_is_found_after_a_kill_and_recomputed_where_it_is_damaged.
"""

from pathlib import Path

import pytest
from conftest import result_of

PROCESS = Path(__file__).parent / "connector_failures_process.py"


@pytest.fixture(scope="module")
def happened(zygote, real_model):
    return result_of(zygote.run([PROCESS, real_model], timeout=100))


def nothing_left(left: dict, device_blocks: int) -> bool:
    return left == {"held_blocks": 0, "loading_requests": 0, "jobs_under_way": 0, "free": device_blocks - 1}


def test_store_waits_for_compute(happened):
    """Of a step whose forward pass is not over nothing is read."""
    result = happened["store_waits_for_compute"]
    assert result["early"] == 0 and result["stored"] == 16


def test_load_waits_for_readers(happened):
    """No step reads a block that is loaded into, nor writes one that is stored."""
    result = happened["load_waits_for_readers"]
    assert result["read"] == result["written"] == 0 and result["loaded"] > 100
    assert nothing_left(result["left"], 60)


def test_abort_of_never_scheduled_request(happened):
    result = happened["abort_of_never_scheduled_request"]
    assert result["waited"] and nothing_left(result["left"], 40)


def test_external_hit_under_eviction_pressure(happened):
    """Several KV groups are refused by name; with one, hits and preemptions get along."""
    result = happened["external_hit_under_eviction_pressure"]
    assert result["host_tokens"] > 0 and result["preemptions"] > 0
    assert nothing_left(result["left"], 40)


def test_every_stored_block_is_found(happened):
    result = happened["every_stored_block_is_found"]
    assert result["found"] == result["prompt_blocks"] > 100


def test_ranks_agree_on_capacity(happened):
    """That of the smallest, on all of them."""
    result = happened["ranks_agree_on_capacity"]
    assert result["largest_slot"] == 39 and result["blocks"] == 40
    assert nothing_left(result["left"], 100)


def test_shared_prefix_does_not_queue_on_one_load(happened):
    """Five requests with one prefix load in the same step, and are over in the steps that one takes."""
    result = happened["shared_prefix_does_not_queue_on_one_load"]
    assert result["loading"] == 5 and result["steps"] < 10
    assert nothing_left(result["left"], 100)


def test_memory_flat_over_long_trace(happened):
    result = happened["memory_flat_over_long_trace"]
    assert result["grown"] < 4 << 20 and nothing_left(result["left"], 200)


def test_idle_worker_is_not_dead(happened):
    """What it says after a thousand steps counts as if it came at once."""
    result = happened["idle_worker_is_not_dead"]
    assert result["while_silent"] == 0 and result["after"] == 16 and not result["under_way"]


def test_tier_process_dies_under_live_views(happened):
    """The stores are the ranks' own. Of a rank that is gone nothing is found, on none of them."""
    result = happened["tier_process_dies_under_live_views"]
    assert result["found"] == result["blocks"] == result["requests"] == 0


def test_what_one_rank_failed_to_store_is_found_nowhere(happened):
    result = happened["failed_copies_are_computed"]
    assert result["blocks"] == result["stored"] // 2 == 8
    assert nothing_left(result["left"], 100)
