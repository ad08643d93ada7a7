# SPDX-License-Identifier: Apache-2.0
"""Models with several KV groups: windows, states. What is in the tables of a sleeping engine, and found after its wake.

That they go on with the same tokens is in test_features.py, too.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import gpu_path
from conftest import result_of
from grouped_models import MODELS
from inspector import look

from torpor import errors
from torpor.vllm import fingerprint, kv_groups

HERE = Path(__file__).parent
# Kinds of models, options, what their groups are.
KINDS = {
    "windows": ({}, ["SlidingWindowManager", "SlidingWindowManager", "FullAttentionManager"]),
    "states": ({"enable_prefix_caching": False}, ["MambaManager", "MambaManager", "FullAttentionManager"]),
    "chunks": ({}, ["ChunkedLocalAttentionManager", "ChunkedLocalAttentionManager", "FullAttentionManager"]),
    "convolutions": ({"prefix_match_unit": 16}, ["MambaManager", "MambaManager", "FullAttentionManager"]),
}
# Tables there are as on the CPU; that tokens are, is in test_features.py.
IN_PROOF = tuple(KINDS) if gpu_path.active() else ("chunks", "windows", "convolutions")


@pytest.mark.slow
@pytest.mark.gpu_path
@pytest.mark.cpu
@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.long) if k in IN_PROOF else k for k in KINDS])
def test_tables_and_prefixes_of_all_groups_survive(kind, zygote, tmp_path):
    options, managers = KINDS[kind]
    words = [HERE / "groups_process.py", kind, tmp_path, json.dumps(options)]
    result = result_of(zygote.run(words))
    groups = result["tables"]
    assert [group["manager"] for group in groups] == managers
    if kind != "states":  # there each request has the one block of its state, where it always was
        assert groups[0]["null"] > 0 and groups[1]["null"] > 0 and groups[0]["longest"] == groups[2]["longest"] > 6
    assert groups[2]["null"] == 0
    for name in ("kept", "preempted"):
        paused = result[name]["pause"]
        assert len(paused["answers"]) == 6
        for way, run in result[name].items():
            assert run == paused | {"recomputed": 0}, (name, way)
        assert (paused["found"]["later"] > 0) == (kind != "states")
    if "in part" in result:
        paused = result["in part"]["pause"]
        assert all(run == paused for run in result["in part"].values())
        assert paused["second"]["found"]["second"] == 112  # not a whole number of blocks
    found = look("verify", result["checkpoint"])
    assert found["whole"] and found["hashes_not_checked"] is None
    assert (found["checked"]["hashes"] > 0) == (kind != "states")
    [request] = [r for r in look("requests", result["checkpoint"])["requests"] if r["id"].startswith("prefix-a")]
    shown = look("show", result["checkpoint"], request["id"])
    assert len(shown["blocks_by_group"]) == 3
    if kind == "states":  # layers see these weights as tensors of their own, too
        assert result["convolutions"] == {"layers": 2, "loaded": [True, True], "shared": [True, True]}


@pytest.mark.slow
@pytest.mark.skipif(gpu_path.active(), reason="preempted requests there: the test above")
@pytest.mark.parametrize(("kind", "blocks"), [("windows", 44), ("convolutions", 34)])
@pytest.mark.long
def test_so_few_blocks_that_requests_of_all_groups_are_preempted(kind, blocks, zygote, tmp_path):
    model = MODELS[kind](tmp_path / "model")
    options = json.dumps({"num_gpu_blocks_override": blocks, "max_model_len": 704})
    result = result_of(zygote.run([HERE / "variant_process.py", model, tmp_path / "store", options]))
    assert result["differing"] == [] and result["preemptions"] > 0
    assert result["recomputed"] > 0  # vLLM computes the KV of a preempted request again, with a sleep or without


def manager_of(**attributes) -> SimpleNamespace:
    """A manager with one request of two blocks, and nothing of a step."""
    nothing = dict.fromkeys(kv_groups._OF_ONE_STEP, ())
    return SimpleNamespace(req_to_blocks={"r": ["first", "second"]}, _partial_hit_reqs={}, **(nothing | attributes))


def test_notes_of_a_block_that_a_request_does_not_have_are_refused():
    manager = manager_of()
    kv_groups.from_value(manager, {"partial_hits": {"r": 1, "gone": 7}})
    assert manager._partial_hit_reqs == {"r": (1, "second")}
    for index in (2, -1):
        with pytest.raises(errors.Incompatible, match="no block"):
            kv_groups.from_value(manager, {"partial_hits": {"r": index}})


def test_other_kinds_of_groups_and_what_is_on_its_way_are_refused_by_name():
    assert kv_groups.unsupported([manager_of()]) == ["KV caches of the kind SimpleNamespace"]
    for name, what in kv_groups._OF_ONE_STEP.items():
        assert what in kv_groups.unsupported([manager_of(**{name: [1]})])


def test_a_fingerprint_tells_layouts_of_states_apart(monkeypatch):
    """They have the same shapes and strides in vLLM's KV cache."""
    group = SimpleNamespace(layer_names=["a"])
    scheduler = SimpleNamespace(
        kv_cache_config=SimpleNamespace(kv_cache_groups=[group], prefix_cache_retention_interval=0),
        kv_cache_manager=SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=[object()])),
        hash_block_size=16, has_mamba_layers=True,
    )  # fmt: skip
    cache = SimpleNamespace(mamba_cache_mode="align", mamba_cache_dtype="auto", mamba_ssm_cache_dtype="auto")
    found = []
    for layout in (None, "SD", "DS"):
        if layout is not None:
            monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", layout)
        found.append(fingerprint._of_groups(scheduler, cache)["mamba_cache"])
    assert found == ["align, auto, auto", "align, auto, auto", "align, auto, auto, DS"]
