# SPDX-License-Identifier: Apache-2.0
"""Sessions whose requests have ended: their KV blocks move between tiers, and nobody sees a difference but in time."""

from pathlib import Path

import pytest
from conftest import result_of

PROCESS = Path(__file__).parent / "residency_process.py"
RANKS = Path(__file__).parent / "residency_ranks_process.py"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def asked(zygote, tiny_model, tmp_path_factory):
    return result_of(zygote.run([PROCESS, tiny_model, tmp_path_factory.mktemp("residency")]))


def test_each_turn_has_the_tokens_of_an_engine_that_moved_nothing(asked):
    moved = asked["moved"]
    assert moved["again"] == moved["expected"]
    for tier in ("host", "disk", "prefetch"):
        assert moved[tier]["turn"]["tokens"] == moved["expected"][1]
    assert asked["demoted_beside_others"]["tokens"]["beside"] == asked["demoted_beside_others"]["expected"]
    assert asked["demoted_beside_others"]["tokens"]["same beginning"] == moved["expected"][1]


def test_a_demoted_session_is_in_the_tier_alone_and_found_there_again(asked):
    moved = asked["moved"]
    known = moved["known"]
    assert (known["tier"], known["prefixes"], known["device_bytes"]) == ("device", 2, known["bytes"])
    assert known["bytes"] > 0
    for tier in ("host", "disk"):
        answer, view, turn = moved[tier]["answer"], moved[tier]["view"], moved[tier]["turn"]
        assert (answer["outcome"], answer["kept_bytes"], moved[tier]["repeated"]) == ("accepted", 0, True)
        assert answer["bytes"] == view["bytes"] >= answer["freed_bytes"] > 0
        assert (view["tier"], view["device_bytes"], view[f"{tier}_bytes"]) == (tier, 0, view["bytes"])
        assert turn["loaded"] > 0 and turn["cached"] > 0
        assert (turn["from_disk"] > 0) == (tier == "disk")
    assert moved["host"]["answer"]["freed_bytes"] == known["bytes"]
    assert moved["disk"]["view"]["host_bytes"] == 0


def test_a_prefetch_has_the_next_turn_load_from_host_memory(asked):
    prefetch = asked["moved"]["prefetch"]
    assert prefetch["answer"]["outcome"] == "accepted"
    assert (prefetch["view"]["tier"], prefetch["view"]["host_bytes"]) == ("host", prefetch["view"]["bytes"])
    assert prefetch["turn"]["loaded"] > 0 and prefetch["turn"]["from_disk"] == 0


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_prefetch_to_the_device_has_the_next_turn_find_its_blocks_there(asked, tier):
    result = asked["to_the_device"][tier]
    before, answer, view, turn = (result[name] for name in ("before", "answer", "view", "turn"))
    assert before["device_bytes"] == 0 < before["bytes"]
    assert (answer["outcome"], answer["bytes"]) == ("accepted", before["bytes"])
    assert (view["tier"], view["device_bytes"]) == ("device", view["bytes"])
    assert turn["tokens"] == asked["moved"]["expected"][1]
    assert turn["loaded"] == 0 and turn["cached"] >= 4 * 32  # the rest of the first turn was its answer


def test_a_request_waits_for_the_blocks_of_its_session_that_are_on_their_way(asked):
    result = asked["to_the_device"]["on its way"]
    assert not result["done"] and result["answer"]["outcome"] == "accepted"
    assert result["turn"]["tokens"] == asked["moved"]["expected"][1]
    assert result["loaded"] == result["answer"]["blocks"]  # once
    assert result["free"]


def test_a_reset_of_the_prefix_cache_waits_for_the_blocks_of_sessions_that_are_on_their_way(asked):
    result = asked["reset_during_a_prefetch"]
    assert result["begun"] and result["answer"]["outcome"] == "accepted"
    assert result["reset"] is True and result["free"] and result["device"] == 0


def test_a_prefetch_to_the_device_takes_no_block_of_a_running_request(asked):
    result = asked["beside_a_running_request"]
    assert result["tokens"] == result["expected"] and result["preempted"] == 0
    answer = result["answer"]
    assert answer["outcome"] == "clipped" and "the budget of free blocks has room for" in answer["reason"]
    assert 0 < answer["bytes"] <= 3 * asked["held"]["block_bytes"]
    assert result["turn"]["tokens"] == asked["moved"]["expected"][1]


def test_ranks_demote_idle_sessions_by_themselves_and_share_and_prefetch_them(zygote, tiny_model, tmp_path):
    result = result_of(zygote.run([RANKS, tiny_model, tmp_path]))
    assert [each["tokens"] for each in result["turns"]] == [each["tokens"] for each in result["plain"]]
    alone = result["by itself"]
    assert (alone["tier"], alone["device_bytes"], alone["host_bytes"]) == ("host", 0, alone["bytes"]) and alone["bytes"]
    answer, view = result["remote"], result["in the store"]
    assert (answer["outcome"], answer["bytes"]) == ("accepted", alone["bytes"])
    assert (view["tier"], view["host_bytes"], view["kv_store_bytes"]) == ("remote", 0, view["bytes"])
    assert (result["device"]["outcome"], result["device"]["bytes"]) == ("accepted", view["bytes"])
    assert result["turns"][1]["cached"] > 0


def test_blocks_that_a_running_request_uses_stay(asked):
    beside = asked["demoted_beside_others"]
    assert beside["answer"]["outcome"] == "accepted" and beside["answer"]["kept_bytes"] > 0
    assert beside["running"] in ("accepted", "deferred")


def test_holds_stay_within_their_budget_and_end_with_a_demotion(asked):
    held = asked["held"]
    most = held["capacity"] // 2 * held["block_bytes"]
    pinned, retained = held["views"]
    assert held["pinned"]["outcome"] == "accepted" and pinned["held"] == "pinned"
    assert pinned["held_bytes"] == pinned["bytes"] > 0
    assert held["clipped"]["outcome"] == "clipped" and held["clipped"]["reason"] == "the ttl is 3600 s at most"
    assert 3500 < pinned["seconds_left"] <= 3600
    assert retained["held"] == "retained" and retained["priority"] == 3
    assert held["retained"]["outcome"] == "clipped" and "budget" in held["retained"]["reason"]
    assert pinned["held_bytes"] + retained["held_bytes"] == most
    assert held["stats"]["held_by_sessions_blocks"] * held["block_bytes"] == most
    assert (held["after_demotion"]["held"], held["after_demotion"]["held_bytes"]) == ("", 0)


def test_a_session_is_its_tenants_alone(asked):
    tenants = asked["of_tenants"]
    assert (tenants["bob"], tenants["nobody"], tenants["alice"]) == ("missing", "missing", "accepted")
    assert tenants["seen"][:2] == [[], ["agent"]] and "agent" in tenants["seen"][2]


def test_calls_that_cannot_be_carried_out_say_why(asked):
    wrong = asked["wrong"]
    assert wrong["missing"] == "missing"
    assert (wrong["remote"]["outcome"], wrong["remote"]["reason"]) == ("rejected", "this engine has no tier remote")
    assert wrong["tier"].startswith("InvalidArgument") and "use host, disk or remote" in wrong["tier"]
    assert wrong["near"].startswith("InvalidArgument") and 'use "host" or "device"' in wrong["near"]
    assert wrong["ttl"].startswith("InvalidArgument") and "ttl is 0" in wrong["ttl"]
    assert wrong["empty"].startswith("InvalidArgument")


def test_an_evicted_session_is_gone_from_all_tiers(asked):
    wrong = asked["wrong"]
    assert wrong["evicted"]["outcome"] == "accepted" and wrong["evicted"]["bytes"] > 0
    assert wrong["gone"] is None and wrong["cached"] == 0


def test_new_weights_forget_sessions_and_what_they_hold(asked):
    assert asked["forgotten_with_new_weights"] == {"before": True, "after": None, "held": 0}
