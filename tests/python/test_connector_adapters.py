# SPDX-License-Identifier: Apache-2.0
"""The KV connector with LoRA adapters, whose blocks outlive the engine or are shared: keys tell of their content."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import result_of
from connector_served import BLOCKS
from feature_models import ADAPTERS, beside, with_adapters
from test_connector import damage, found_damaged

from redis_server import RedisServer

PROCESS = Path(__file__).parent / "connector_adapters_process.py"
BASE, FIRST, SECOND, THIRD = "base", *ADAPTERS
# Host memory has fewer blocks than the device: blocks go to disk and come from there.
DISK = {"host_bytes": "2MiB", "disk_bytes": "256MiB"}
CHANGES = (
    "reloaded", "evicted", "changed_in_between", "changed_while_it_waits", "changed_under_way",
    "changed_in_its_prompt", "in_place", "unreadable",
)  # fmt: skip


def put(folder: Path, name: str, content: str) -> None:
    """Put the files of the adapter `content` where those of `name` are."""
    for file in beside(folder / "model", content).iterdir():
        shutil.copy(file, beside(folder / "model", name) / file.name)


class Engines:
    """Engines of one model and its adapters, one after the other in the same folder."""

    def __init__(self, zygote, real_model, folder: Path):
        self.folder, self._zygote = folder, zygote
        with_adapters(folder / "model", real_model)

    def run(self, options: dict, *scenarios: str, first: int = 1, checkpoint: str = "") -> dict:
        words = [PROCESS, self.folder / "model", self.folder, json.dumps(options), first, *scenarios]
        return result_of(self._zygote.run(words, env=os.environ | {"TORPOR_TEST_CHECKPOINT": checkpoint}))


@pytest.fixture
def engines(zygote, real_model, tmp_path):
    return Engines(zygote, real_model, tmp_path)


@pytest.fixture(scope="module")
def right(zygote, real_model, tmp_path_factory):
    """The answers of an engine without a connector, by adapter."""
    return Answers(Engines(zygote, real_model, tmp_path_factory.mktemp("right")).run({}, "expected")["expected"])


class Answers:
    def __init__(self, of: dict):
        self.of = of
        every = [tuple(tokens) for each in of.values() for tokens in each]
        assert len(set(every)) == len(every)  # each adapter has its own for each prompt

    def are(self, found: dict, name: str) -> bool:
        """Whether these are the answers with the content of the adapter `name`."""
        return all(self.is_(tokens, name, number) for number, tokens in enumerate(found["tokens"]))

    def is_(self, tokens: list[int], name: str, number: int) -> bool:
        return tokens == self.of[name][number][: len(tokens)]

    def check(self, found: dict, names=(BASE, FIRST, SECOND)) -> None:
        for name in names:
            assert self.are(found[name], name), name


@pytest.fixture(scope="module")
def over_a_restart(zygote, real_model, tmp_path_factory):
    """An engine that is killed; another over what it left; and one that finds damage, and another content of "first"
    by the same name, number and path."""
    engines = Engines(zygote, real_model, tmp_path_factory.mktemp("restart"))
    before = engines.run(DISK, "rounds", "pressed", "slept", "aborted", "left_asleep", "left_on_disk", "killed")
    after = engines.run(
        DISK, "gone_on", "first_round", "stats", "killed", checkpoint=before["left_asleep"]["checkpoint"]
    )
    damaged = damage(engines.folder, every=200)
    put(engines.folder, FIRST, THIRD)
    other = engines.run(DISK, "first_round", "stats")
    return {"before": before, "after": after, "other": other, "damaged": damaged}


@pytest.mark.slow
def test_two_adapters_and_the_base_model_with_the_same_prompts(over_a_restart, right):
    before = over_a_restart["before"]
    for found in before["rounds"]:
        right.check(found)
    assert all(each["cached"] == 0 for each in before["rounds"][0].values())  # no one finds another's
    assert sum(each["cached"] for each in before["rounds"][1].values()) > 0
    assert before["pressed"]["preemptions"] > 0
    right.check(before["pressed"], (FIRST, SECOND))


@pytest.mark.slow
def test_a_sleep_and_an_abort_while_requests_with_adapters_load(over_a_restart, right):
    before = over_a_restart["before"]
    assert before["slept"]["loading"] > 0
    right.check(before["slept"], (FIRST, SECOND))
    aborted = before["aborted"]
    assert aborted["loading"] == aborted["held"] > 0 and aborted["requests"] == aborted["still"] == 0
    assert aborted["free"] == BLOCKS - 1


@pytest.mark.slow
def test_a_new_process_finds_what_was_left_on_disk_by_the_same_adapters(over_a_restart, right):
    after = over_a_restart["after"]
    right.check(after["first_round"])
    assert all(found["cached"] > 0 for found in after["first_round"].values())
    assert after["stats"]["cached_disk_tokens"] > 0


@pytest.mark.slow
def test_requests_with_an_adapter_go_on_in_a_new_process_by_the_same_keys(over_a_restart, right):
    asleep, woken = over_a_restart["before"]["left_asleep"], over_a_restart["after"]["gone_on"]
    assert woken["failed"] == [] and woken["salted"] == ["torpor adapter content"] * 2 and woken["in_prefix_cache"] > 0
    for number, request in enumerate(asleep["ids"]):
        assert right.is_(woken["answers"][request], FIRST, number)


@pytest.mark.slow
def test_a_checkpoint_of_an_engine_whose_keys_did_not_tell_of_adapters(engines, right):
    """Its requests go on with keys that nobody has, and nothing of its prefix cache is found by a key."""
    asleep = engines.run({"host_bytes": "64MiB"}, "left_asleep", "killed")["left_asleep"]
    woken = engines.run(DISK, "gone_on", checkpoint=asleep["checkpoint"])["gone_on"]
    assert woken["failed"] == [] and woken["salted"] == ["torpor adapter own"] * 2 and woken["in_prefix_cache"] == 0
    for number, request in enumerate(asleep["ids"]):
        assert right.is_(woken["answers"][request], FIRST, number)


@pytest.mark.slow
def test_other_content_of_the_same_name_number_and_path_finds_nothing_on_disk(over_a_restart, right):
    found = over_a_restart["other"]["first_round"]
    assert right.are(found[FIRST], THIRD) and found[FIRST]["cached"] == 0
    right.check(found, (BASE, SECOND))
    assert found[BASE]["cached"] + found[SECOND]["cached"] > 0  # what is not damaged


@pytest.mark.slow
def test_damaged_blocks_of_adapters_are_computed_again(over_a_restart):
    assert over_a_restart["damaged"] > 1 and found_damaged(over_a_restart["other"]["stats"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["eager", pytest.param("lazy", marks=pytest.mark.long)])
def test_the_content_changes_while_the_engine_runs(engines, right, offload):
    found = engines.run(DISK | {"host_bytes": "64MiB", "offload": offload}, "rounds", *CHANGES)
    for way in ("reloaded", "evicted"):
        for when, content in (("before", FIRST), ("other", THIRD), ("back", FIRST)):
            assert right.are(found[way][when], content), (way, when)
    # Nothing of that content was there, and of the other one all is. Who reloads tells the scheduler at once.
    assert found["reloaded"]["other"]["cached"] == found["reloaded"]["other"]["loaded"] == 0
    assert found["reloaded"]["back"]["cached"] > 0 and found["evicted"]["other"]["cached"] > 0
    # What a request was about to load of the older content, it does not compute with.
    between = found["changed_in_between"]
    for way in ("read by its first step", "reloaded while it loads"):
        assert between[way]["loading"] == 2 and right.is_(between[way]["tokens"], THIRD, 1), way
        assert between[way]["drawn"] == between["drawn"], way
    assert right.are({"tokens": between["again"]}, THIRD) and right.are({"tokens": between["back"]}, FIRST)
    waited = found["changed_while_it_waits"]
    assert waited["seen"] == ["WAITING"] and right.is_(waited["tokens"], THIRD, 1)
    # What was computed with both contents is found by neither.
    for way in ("changed_under_way", "changed_in_its_prompt"):
        assert found[way]["found"] == [found[way]["computed"]] * 2, way
    # vLLM reads it anew in each step: nothing of what is there is taken.
    assert [cached for _, cached in found["in_place"]] == [0, 0, 0]
    assert all(
        right.is_(tokens, content, 2)
        for (tokens, _), content in zip(found["in_place"], (FIRST, FIRST, THIRD), strict=True)
    )
    assert found["unreadable"] == "LoRAAdapterNotFoundError"


@pytest.mark.slow
def test_engines_share_through_a_store_what_adapters_of_the_same_content_computed(engines, right):
    """By whatever number; and nothing of another content by the same name and path."""
    with RedisServer(engines.folder / "redis") as server:
        patient = {"kv_store_timeout_ms": 60_000, "kv_store_wait_ms": 60_000}
        options = {"host_bytes": "64MiB", "kv_store": f"{server.url}/tests"} | server.options | patient
        one = engines.run(options, "first_round", "stats")["first_round"]
        shutil.copytree(beside(engines.folder / "model", FIRST), engines.folder / "own")
        put(engines.folder, FIRST, THIRD)
        other = engines.run(options, "first_round", "stats")["first_round"]
        put(engines.folder, FIRST, "own")
        same = engines.run(options, "first_round", "stats", first=5)["first_round"]
    right.check(one)
    right.check(same)
    right.check(other, (BASE, SECOND))
    assert right.are(other[FIRST], THIRD)
    assert [each[FIRST]["cached"] for each in (one, other)] == [0, 0]
    assert other[BASE]["cached"] > 0 and other[SECOND]["cached"] > 0
    assert all(found["cached"] > 0 for found in same.values())


@pytest.mark.long
@pytest.mark.slow
def test_beside_vllms_own_connectors(engines, right):
    """In host memory: the same tokens, and as many of them from the cache. With a disk too, where keys are salted."""
    host = {"host_bytes": "64MiB"}
    ways = {
        "none": {}, "Simple": {"peer": "Simple"}, "Offloading": {"peer": "Offloading"}, "torpor": host,
        "with a disk": host | {"disk_bytes": "256MiB"},
    }  # fmt: skip
    cached = {}
    for way, options in ways.items():
        found = engines.run(options, "beside_vllms")["beside_vllms"]
        for each in found:
            right.check(each)
        cached[way] = [sum(of["cached"] for of in each.values()) for each in found]
    assert cached["none"] == [0, 0, 0]
    assert cached["torpor"] == cached["with a disk"] and cached["torpor"][-1] > 0
    assert cached["torpor"][-1] >= max(cached["Simple"][-1], cached["Offloading"][-1])


# --- without an engine ---


def request(request_id: str, **more):
    """Of one block, whose hash is its salt."""
    from vllm.v1.request import RequestStatus

    made = SimpleNamespace(
        request_id=request_id, cache_salt=None, block_hashes=[], num_computed_tokens=0, num_preemptions=0,
        status=RequestStatus.WAITING,
        lora_request=SimpleNamespace(
            lora_name="a", lora_int_id=1, lora_path="/a", base_model_name=None, load_inplace=False,
            is_3d_lora_weight=False,
        ),
    )  # fmt: skip
    vars(made).update(more)
    made.update_block_hashes = lambda: made.block_hashes.append(made.cache_salt)
    return made


def report(step: int, adapters: dict | None):
    from torpor.vllm.connector_messages import Report

    return Report(step, adapters=adapters)


@pytest.fixture
def keys():
    from torpor.vllm.connector_adapters import AdapterKeys

    return AdapterKeys()


def test_a_request_waits_until_the_workers_have_told_what_its_adapter_is(keys):
    one = request("one", cache_salt="its user's")
    assert keys.begin(one) is False and keys.look(one) is None
    assert keys.take_wanted()["lora_int_id"] == 1 and keys.take_wanted() is None
    assert keys.reported(report(1, None)) == [] and keys.reported(report(2, {1: "d"})) == [one]
    assert one.cache_salt == "torpor adapter content d\nits user's" == one.block_hashes[0]
    assert keys.look(one) is False
    other = request("other", cache_salt="torpor adapter content e\n")  # nobody chooses a digest by its salt
    assert keys.begin(other) is True and other.cache_salt == "torpor adapter content d\n"


def test_what_was_told_before_a_doubt_does_not_count(keys):
    one = request("one")
    keys.reported(report(3, {1: "d"}))
    keys.invalidate(4)
    assert keys.begin(one) is False and keys.reported(report(4, {1: "d"})) == [] and keys.look(one) is None
    assert keys.reported(report(5, {1: "e"})) == [one] and keys.look(one) is False


@pytest.mark.parametrize("why", ["ranks differ", "it cannot be read", "vLLM reads it in each step"])
def test_a_request_whose_adapter_has_no_digest_shares_with_nobody(keys, why):
    both = [request("one"), request("two")]
    for each in both:
        each.lora_request.load_inplace = why == "vLLM reads it in each step"
        assert keys.begin(each) is each.lora_request.load_inplace
    keys.reported(report(1, {1: ""}))
    assert all(keys.look(each) is False for each in both)
    before = [each.cache_salt for each in both]
    assert len(set(before)) == 2 and all(salt.startswith("torpor adapter own ") for salt in before)
    for each in both:  # it may have computed with other content
        each.num_preemptions += 1
        assert keys.look(each) is True and keys.look(each) is False
    assert not {each.cache_salt for each in both} & set(before)


def test_a_preempted_request_has_the_keys_of_the_present_content(keys):
    one = request("one")
    keys.reported(report(1, {1: "d"}))
    keys.begin(one)
    keys.computed(["one", "another"])
    one.num_computed_tokens = 40
    assert keys.is_under_way(one) and keys.changed({1: "d", 2: "x"}) == [] and keys.changed({1: "e"}) == [one]
    keys.separate(one)
    assert keys.changed({1: "f"}) == [] and keys.reported(report(2, {1: "f"})) == []
    one.num_computed_tokens, one.num_preemptions = 0, 1
    assert keys.look(one) is True and one.cache_salt == "torpor adapter content f\n" and not keys.is_under_way(one)


def test_ranks_agree_on_a_digest_or_there_is_none():
    def together(one, other):
        return report(1, one).aggregate(report(1, other)).adapters

    assert together(None, None) is None
    assert together({1: "d", 2: "e"}, {1: "d", 2: "f"}) == {1: "d", 2: ""}
    assert together({1: "d"}, {}) == together({1: "d"}, None) == together(None, {1: "d"}) == {1: ""}
