# SPDX-License-Identifier: Apache-2.0
"""The KV connector with drafting models, beside vLLM's own connectors on the same requests.

docs/offloading.md has a table of what was tried; each Y there names a test of this file.
"""

import json
from pathlib import Path

import pytest
from conftest import result_of
from connector_served import BLOCKS, CONVERSATIONS
from features import FEATURES
from test_connector import damage, found_damaged

PROCESS = Path(__file__).parent / "connector_models_process.py"
BLOCK = 32  # tokens
EAGLE, DRAFT_MODEL = "speculation, EAGLE", "speculation, draft model"
# Host memory has fewer blocks than the device: blocks go to disk and come from there.
SMALL = {"host_bytes": "2MiB", "disk_bytes": "256MiB", "sync_load_budget_bytes": 0}
ALL_FIT = {"host_bytes": "64MiB", "sync_load_budget_bytes": 0}
WITHIN_STEP = {"host_bytes": "64MiB", "disk_bytes": "256MiB", "sync_load_budget_bytes": "64MiB"}
MODELS = [EAGLE, pytest.param(DRAFT_MODEL, marks=pytest.mark.long)]


class Runs:
    """Engines of one model, one after the other over the same directory."""

    def __init__(self, zygote, real_model, folder: Path, feature: str):
        self.feature, self.folder, self._zygote = feature, folder, zygote
        FEATURES[feature].model(folder / "model", real_model)

    def run(self, connector: str, options: dict, *scenarios: str) -> dict:
        store = self.folder / ("checkpoints" if connector == "torpor" else connector)
        words = [PROCESS, connector, self.feature, self.folder / "model", store, json.dumps(options), *scenarios]
        return result_of(self._zygote.run(words))


@pytest.fixture(scope="module", params=MODELS)
def runs(request, zygote, real_model, tmp_path_factory):
    return Runs(zygote, real_model, tmp_path_factory.mktemp("models"), request.param)


@pytest.fixture(scope="module")
def served(runs):
    """An engine whose host memory has room for all, and whose requests wait for their loads."""
    return runs.run("torpor", ALL_FIT, "as_it_was", "goes_on_otherwise", "slept", "aborted_while_loading")


@pytest.fixture(scope="module")
def torpors(runs):
    """An engine that is killed; then one over what it left on disk, of which some is damaged."""
    first = runs.run("torpor", SMALL, "rounds", "pressed", "disturbed", "left_on_disk", "stats", "killed")
    bytes_ = damage(runs.folder, every=200)
    after = runs.run("torpor", WITHIN_STEP, "rounds", "stats", "pressed", "damaged")
    return {"first": first, "bytes": bytes_, "after": after}


def volatile(runs) -> int:
    """Return how many tokens at the end of a hit are computed again: with EAGLE the last block."""
    return BLOCK if runs.feature == EAGLE else 0


@pytest.mark.long
@pytest.mark.slow
def test_tokens_are_the_same_over_evictions_and_preemptions(runs, torpors):
    first = torpors["first"]
    assert all(tokens == first["rounds"]["tokens"][0] for tokens in first["rounds"]["tokens"])
    assert first["pressed"]["preemptions"] > 0 and first["pressed"]["tokens"][0] == first["pressed"]["tokens"][1]
    assert first["left_on_disk"]["blocks"] > 60 and first["stats"]["host_evicted"] > 0
    assert first["stats"]["held_blocks"] == first["stats"]["loading_requests"] == 0


@pytest.mark.slow
def test_what_is_loaded_is_what_its_step_wrote_the_drafting_models_kv_too(served):
    result = served["as_it_was"]
    assert result["contents"] > 50 and result["changed"] == 0
    assert result["loaded"] > CONVERSATIONS and result["others"] == 0


@pytest.mark.slow
def test_the_block_before_another_continuation_is_computed_again_where_vllm_does_so(runs, served):
    """There EAGLE's own KV depends on the next token. A draft model's depends on its own tokens alone."""
    expected = 2 * BLOCK - volatile(runs)
    assert served["goes_on_otherwise"]["cached"] == [0, expected, expected]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["preserve_state", "recompute"])
def test_a_sleep_while_drafting_requests_load(served, way):
    slept = served["slept"][way]
    assert slept["loading"] > 0 and slept["moving"] == 0 and slept["kept"]
    assert slept["differing"] == [] and slept["finished"] == CONVERSATIONS


@pytest.mark.slow
def test_a_request_that_is_aborted_while_it_loads_leaves_nothing(served):
    result = served["aborted_while_loading"]
    assert result["loading"] == result["held"] > 0 and result["requests"] == result["still"] == 0
    assert result["free"] == BLOCKS - 1


@pytest.mark.long
@pytest.mark.slow
def test_aborts_and_resets_in_the_middle_change_no_token(torpors):
    disturbed = torpors["first"]["disturbed"]
    assert disturbed["differing"] == [] and disturbed["aborted"] > 0 and disturbed["resets"] > 0
    assert disturbed["free"] == BLOCKS - 1 and disturbed["stats"]["held_blocks"] == 0


@pytest.mark.long
@pytest.mark.slow
def test_a_new_process_finds_what_was_left_and_computes_what_is_damaged(torpors):
    first, after = torpors["first"], torpors["after"]
    assert torpors["bytes"] > 1 and found_damaged(after["stats"]) > 0
    assert after["stats"]["recovered_blocks"] > 50 and after["rounds"]["cached"][0] > 0
    assert after["stats"]["loads_within_step"] > 0
    assert [*after["rounds"]["tokens"], *after["pressed"]["tokens"]] == [
        *first["rounds"]["tokens"], *first["pressed"]["tokens"]
    ]  # fmt: skip


@pytest.mark.long
@pytest.mark.slow
def test_a_block_that_is_damaged_in_host_memory_serves_no_drafting_request(runs, torpors):
    result = torpors["after"]["damaged"]
    for number, each in enumerate(result["each"]):
        # With EAGLE no prompt of this length loads its last block: two longer ones begin to, in the same step.
        loads = 2 if runs.feature == EAGLE and number == 5 else 1
        assert each["written"] >= 1 and len(each["within"]) == 1 and each["damaged"] == loads
        assert each["first"] == [] and each["differing"] == [] and each["answers"] == (11 if number < 2 else 8)
        assert each["cached"] == 7 * BLOCK - volatile(runs) and each["left"] == [0, 0, 0]
    assert result["free"] == BLOCKS - 1


@pytest.mark.long
@pytest.mark.slow
def test_beside_vllms_own_connectors(runs):
    """On the same requests: the same tokens as without a connector, and as many or more of them from the cache."""
    results = {name: runs.run(name, {}, "rounds", "pressed") for name in ("none", "torpor", "Simple", "Offloading")}
    tokens = results["none"]["rounds"]["tokens"][0], results["none"]["pressed"]["tokens"][0]
    for result in results.values():
        assert all(each == tokens[0] for each in result["rounds"]["tokens"])
        assert all(each == tokens[1] for each in result["pressed"]["tokens"])
    for scenario in ("rounds", "pressed"):
        cached = {name: result[scenario]["cached"][-1] for name, result in results.items()}
        assert cached["torpor"] >= cached["Simple"] > cached["none"]
        # OffloadingConnector loads the volatile block, too.
        requests = CONVERSATIONS if scenario == "rounds" else 10
        assert cached["torpor"] >= cached["Offloading"] - requests * volatile(runs)
