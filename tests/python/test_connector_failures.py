# SPDX-License-Identifier: Apache-2.0
"""Failures that KV connectors had, each by name, with vLLM's scheduler and workers that are made up.

Those that need an engine are elsewhere: `first_schedule_after_wake` is in test_connector.py,
`host_budget_is_what_is_mapped` in test_connector_faults.py. There, too, is what can be seen with an engine only: the
bytes of a model with windows under pressure
(test_connector.py::test_blocks_of_several_groups_come_back_from_host_memory_and_disk), and a worker's process that ends
(test_connector_faults.py::test_a_killed_worker_ends_serving_by_name_and_its_disk_is_found_again).
"""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import result_of

from torpor.errors import FileError
from torpor.vllm.connector_worker import WorkerSide

TESTS = Path(__file__).parents[1]
PROCESS = Path(__file__).parent / "connector_failures_process.py"
PROMPT_TOKENS = 256


@pytest.fixture(scope="module")
def happened(zygote, real_model):
    return result_of(zygote.run([PROCESS, real_model]))


def nothing_left(left: dict, device_blocks: int) -> bool:
    return left == {"held_blocks": 0, "loading_requests": 0, "jobs_under_way": 0, "free": device_blocks - 1}


def test_store_waits_for_compute(happened):
    """Of a step whose forward pass is not over nothing is read."""
    result = happened["store_waits_for_compute"]
    assert result["early"] == 0 and result["stored"] == 16


def test_a_priority_of_any_size_is_taken(happened):
    result = happened["priorities_of_any_size"]
    assert result["stored"] == 3 * 16 and nothing_left(result["left"], 100)


def test_lazily_too_those_of_a_higher_priority_go_first(happened):
    result = happened["lazy_priorities"]
    assert result["stored"] == ["first"] * 8 + ["later"] * 8 and nothing_left(result["left"], 60)


def test_events_tell_the_right_parent_or_none(happened):
    """A router that builds its tree of prefixes from them would build it wrong."""
    published = happened["events_name_their_parents"]
    assert published["eager"].keys() == {"right"} and published["eager"]["right"] > 90
    assert "wrong" not in published["lazy"] and sum(published["lazy"].values()) > 90


def test_what_vllms_block_pool_raises_is_in_the_log(happened):
    result = happened["failures_of_the_block_pool_are_published"]
    assert re.search(r"free_blocks\(\) of \d+ KV blocks failed: RuntimeError: not these", result["said"]), result
    assert result["left"]["held_blocks"] == 0 and result["left"]["free"] < 99  # which the log explains


def test_load_waits_for_readers(happened):
    """No step reads a block that is loaded into, nor writes one that is stored."""
    result = happened["load_waits_for_readers"]
    assert result["read"] == result["written"] == 0 and result["loaded"] > 100
    assert nothing_left(result["left"], 60)


def test_abort_of_never_scheduled_request(happened):
    result = happened["abort_of_never_scheduled_request"]
    assert result["waited"] and nothing_left(result["left"], 40)


def test_external_hit_under_eviction_pressure(happened):
    """Hits and preemptions get along."""
    result = happened["external_hit_under_eviction_pressure"]["plain"]
    assert result["host_tokens"] > 0 and result["preemptions"] > 0
    assert nothing_left(result["left"], 40)


def test_external_hit_under_eviction_pressure_hybrid(happened):
    """The same where half of the layers see a window: two groups, and blocks that the window left are freed early."""
    result = happened["external_hit_under_eviction_pressure"]["hybrid"]
    assert result["host_tokens"] > 0 and result["preemptions"] > 0
    assert nothing_left(result["left"], 50)


def test_every_stored_block_is_found(happened):
    result = happened["every_stored_block_is_found"]
    assert result["found"] == result["prompt_blocks"] > 100


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_new_weights_over_old_blocks(happened, mode):
    """vLLM's own prefix cache is the user's to reset: it is never found again as if the new weights had made it."""
    result = happened["new_weights_over_old_blocks"][mode]
    assert result["begun"] and result["stale"] == 0
    assert result["afresh"] == PROMPT_TOKENS or (mode == "lazy" and result["afresh"] > 0)


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


def test_of_a_load_of_several_groups_only_what_lies_behind_a_damaged_block_is_computed(happened):
    result = happened["damaged_block_of_several_groups"]
    first, *others = result["loads"]
    assert others and max(others) < first and result["found"] == PROMPT_TOKENS // 16 // 2
    assert nothing_left(result["left"], 100)


def test_loads_that_all_fail_at_once_are_computed(happened):
    """vLLM keeps room for each as if it still loaded; nothing would ever be scheduled again."""
    result = happened["loads_that_all_fail_at_once"]
    assert result["loading"] > 3 and result["requests"] == 0 and nothing_left(result["left"], 150)


def test_a_waiting_request_keeps_what_it_has_and_gets_what_is_stored_meanwhile(happened):
    result = happened["waiting_request_is_asked_for_again"]
    assert result["found"] == [32, 32, 40] and nothing_left(result["left"], 100)


def test_blocks_that_requests_share_are_stored_once(happened):
    result = happened["shared_blocks_are_stored_once"]
    assert result["stored"] == result["blocks"] == 16 and nothing_left(result["left"], 100)


def test_only_what_the_device_lacks_is_loaded_and_never_the_last_tokens_block(happened):
    result = happened["device_then_host_then_computed"]
    assert result["loaded"] == [8, 7] and result["stored"] == 16
    assert nothing_left(result["left"], 100)


def test_each_situation_of_vllms_tests_names_tests_that_there_are():
    table = (TESTS / "connector.md").read_text()
    named = re.findall(r"`([a-z_/]+\.(?:py|cpp))::(\w+)`", table)
    assert len(named) > 40
    assert [name for file, name in named if not re.search(rf"\b{name}\b", (TESTS / file).read_text())] == []
    failures = re.findall(r"`(\w+)`", table.partition("## Failures that connectors had")[2])
    sources = "".join(path.read_text() for path in (TESTS / "python").glob("test_connector*.py"))
    assert len(failures) == 12 and [name for name in failures if f"def test_{name}(" not in sources] == []


def test_a_disk_that_cannot_be_synced_fails_no_sleep_and_loses_no_report():
    """Ranks in other processes: what the others have said would be lost with an error of this one."""

    class Core:
        closed = False

        def wait(self) -> None:
            pass

        def sync(self) -> None:
            raise FileError("fsync: Input/output error", "look at the disk")

        def close(self) -> None:
            self.closed = True

    side = object.__new__(WorkerSide)
    side.core, side._options = Core(), SimpleNamespace(durable=True)
    core = side.core
    side.wait()
    side.close()
    assert core.closed and side.core is None
