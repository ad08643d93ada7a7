# SPDX-License-Identifier: Apache-2.0
"""The KV connector in a pipeline: each stage stores its own layers of a block, which counts when all stages have it."""

import json
import os
from pathlib import Path

import pytest
from conftest import result_of
from connector_served import BLOCKS, CONVERSATIONS
from test_connector import damage, found_damaged

PROCESS = Path(__file__).parent / "connector_models_process.py"
BLOCK = 32  # tokens
# Host memory has fewer blocks than the device: blocks go to disk and come from there.
SMALL = {"host_bytes": "2MiB", "disk_bytes": "256MiB"}
LARGE = SMALL | {"host_bytes": "64MiB"}


@pytest.fixture(scope="module")
def run(zygote, tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")

    def run(connector: str, options: dict, *scenarios: str) -> dict:
        store = folder / ("checkpoints" if connector == "torpor" else connector)
        return result_of(
            zygote.run([PROCESS, connector, "pipeline", tiny_model, store, json.dumps(options), *scenarios])
        )

    run.folder = folder
    return run


@pytest.mark.long
@pytest.mark.slow
def test_two_stages_over_evictions_preemptions_sleeps_a_kill_and_damage_of_one_stage(run):
    first = run("torpor", SMALL, "rounds", "pressed", "slept_elsewhere", "disturbed", "left_on_disk", "stats", "killed")
    assert all(tokens == first["rounds"]["tokens"][0] for tokens in first["rounds"]["tokens"])
    assert first["pressed"]["preemptions"] > 0 and first["pressed"]["tokens"][0] == first["pressed"]["tokens"][1]
    for slept in first["slept_elsewhere"].values():
        assert slept["loading"] > 0 and slept["moving"] == 0 and slept["kept"] and slept["differing"] == []
    assert first["disturbed"]["differing"] == [] and first["disturbed"]["aborted"] > 0
    assert first["disturbed"]["free"] == BLOCKS - 1 and first["disturbed"]["stats"]["held_blocks"] == 0
    assert first["left_on_disk"]["blocks"] > 60 and first["stats"]["host_evicted"] > 0
    assert first["stats"]["loads_within_step"] == 0  # another step is in flight

    stage = run.folder / "second/checkpoints/offload/store"
    stage.mkdir(parents=True)
    os.symlink(run.folder / "checkpoints/offload/store/r1", stage / "r0")
    assert damage(run.folder / "second", every=100) > 1  # of the second stage alone
    after = run("torpor", LARGE, "rounds", "stats", "pressed")
    assert found_damaged(after["stats"]) > 0 and after["stats"]["recovered_blocks"] > 50
    assert 0 < after["rounds"]["cached"][0] < after["rounds"]["cached"][-1]
    assert after["rounds"]["cached"][-1] > CONVERSATIONS * BLOCK
    for scenario in ("rounds", "pressed"):
        assert all(tokens == first[scenario]["tokens"][0] for tokens in after[scenario]["tokens"])


@pytest.mark.long
@pytest.mark.slow
def test_beside_vllms_own_connectors(run):
    """On the same requests: the same tokens as without a connector, and as many or more of them from the cache."""
    results = {name: run(name, {}, "rounds", "pressed") for name in ("none", "torpor", "Simple", "Offloading")}
    for scenario in ("rounds", "pressed"):
        expected = results["none"][scenario]["tokens"][0]
        for result in results.values():
            assert all(tokens == expected for tokens in result[scenario]["tokens"])
        cached = {name: result[scenario]["cached"][-1] for name, result in results.items()}
        assert cached["torpor"] >= max(cached["Simple"], cached["Offloading"]) > cached["none"]
