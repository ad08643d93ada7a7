# SPDX-License-Identifier: Apache-2.0
"""The KV connector with models whose KV groups have states, blocks of several sizes, or hashes of a part of a block;
alone, and beside vLLM's own connectors on the same requests."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import result_of
from grouped_models import MODELS
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from torpor.vllm import connector_groups

PROCESS = Path(__file__).parent / "hybrid_process.py"
ENOUGH = 64 << 20  # host memory for all blocks
# Model, options of the engine, sizes of its groups' blocks, the tokens that a hit is a multiple of.
KINDS = {
    "windows": ("windows", {}, [32, 32, 32], 32),
    "sizes": ("sizes", {}, [64, 64, 32], 64),
    "states": ("convolutions", {}, [32, 32, 32], 32),
    "states, hashes of half a block": ("convolutions", {"prefix_match_unit": 16}, [32, 32, 32], 16),
}


def config_of(*specs) -> SimpleNamespace:
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layer {at}"]) for at, spec in enumerate(specs)]
    return SimpleNamespace(kv_cache_groups=groups)


def test_states_that_nobody_has_tried_are_refused_by_name():
    def states(kind: str, mode: str = "align") -> MambaSpec:
        shapes, dtypes = ((4, 8),), (torch.float32,)
        return MambaSpec(32, shapes, dtypes, mamba_type=MambaAttentionBackendEnum[kind], mamba_cache_mode=mode)

    whole = FullAttentionSpec(32, num_kv_heads=1, head_size=64, dtype=torch.float32)
    assert connector_groups.unsupported(config_of(states("SHORT_CONV"), whole)) == []
    [refused] = connector_groups.unsupported(config_of(states("MAMBA2"), states("SHORT_CONV"), whole))
    assert "MAMBA2" in refused and "untried_states" in refused
    assert connector_groups.unsupported(config_of(states("MAMBA2"), whole), untried_states=True) == []
    for mode in ("none", "all"):
        [refused] = connector_groups.unsupported(config_of(states("MAMBA2", mode), whole), untried_states=True)
        assert f"mamba_cache_mode={mode}" in refused


def test_models_whose_blocks_differ_in_what_they_hold_do_not_find_each_others():
    small, large = (FullAttentionSpec(size, num_kv_heads=1, head_size=64, dtype=torch.float32) for size in (32, 64))
    names = [connector_groups.describe(config_of(*specs)) for specs in ((small, small), (small, large), (large, small))]
    assert len({*names}) == 3 and connector_groups.describe(config_of(small)) is None


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_a_sleep_copies_a_block_of_which_a_part_was_loaded(zygote, real_model, mode):
    """Its slot in host memory has the part; what was computed since is on the device alone."""
    result = result_of(zygote.run([Path(__file__).parent / "connector_partial_process.py", real_model, mode]))
    assert result["loaded"] == 4 + 1
    assert result["attention"] == [[32, 32], [64, 64], [96, 96], [128, None]] and result["state"] == [[128, None]]


def test_states_of_other_types_or_shapes_do_not_find_each_others():
    """vLLM pads them to the size of an attention block, where neither shows."""

    def named(shapes, dtype) -> str:
        kind = MambaAttentionBackendEnum["SHORT_CONV"]
        return connector_groups.describe(config_of(MambaSpec(32, shapes, (dtype,), mamba_type=kind)))

    names = {named(((4, 8),), torch.float32), named(((4, 8),), torch.bfloat16), named(((8, 4),), torch.float32)}
    assert len(names) == 3


def run(zygote, folder: Path, kind: str, connector: str, host_bytes: int = ENOUGH, **options) -> dict:
    name, given, sizes, _ = KINDS[kind]
    model = folder / "model"
    if not model.exists():
        MODELS[name](model)
    words = [model, folder / connector, connector, host_bytes, json.dumps(given | options)]
    result = result_of(zygote.run([PROCESS, *words]))
    assert result["block_tokens"] == sizes
    return result


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sizes", "states, hashes of half a block"])
def test_all_that_a_hit_can_have_comes_from_host_memory(kind, zygote, tmp_path):
    result = run(zygote, tmp_path, kind, "torpor")
    first, *others = result["tokens"]
    assert all(tokens == first for tokens in others) and len({str(tokens) for tokens in first}) > len(first) // 2
    most = [(length - 1) // KINDS[kind][3] * KINDS[kind][3] for length in result["lengths"]]
    assert result["cached"][1] == result["cached"][2] == most
    assert sum(result["cached"][0]) < sum(most) and result["stats"]["onboard_transferred"] > len(most)
    assert result["slept"] == result["whole"] and len(result["whole"]) == 11
    # The block was copied before the answer's tokens came into it. With blocks of two sizes no stride was full.
    first, last = result["slots"]
    assert last == -1 and (first >= 0) == (KINDS[kind][3] == 16)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_beside_vllms_own_connectors(kind, zygote, tmp_path):
    """The same tokens, and at least as many of them from the cache."""
    without = run(zygote, tmp_path, kind, "none")
    mine = run(zygote, tmp_path, kind, "torpor")
    assert mine["tokens"] == without["tokens"]
    for connector in ("Simple", "Offloading"):
        other = run(zygote, tmp_path, kind, connector)
        assert other["tokens"] == mine["tokens"]
        for round_ in range(3):
            found = [sum(each["cached"][round_]) for each in (mine, other)]
            print(kind, connector, "round", round_, "cached tokens of torpor's and of this one:", *found)
            assert found[0] >= found[1], (connector, round_)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "blocks", "few"),
    [("sizes", 48, 16 << 20), ("states", 30, 4 << 20), ("states, hashes of half a block", 30, 4 << 20)],
)
def test_blocks_are_evicted_and_requests_preempted_while_blocks_move(kind, blocks, few, zygote, tmp_path):
    expected = run(zygote, tmp_path, kind, "none")["tokens"]
    for host_bytes in (few, ENOUGH):
        result = run(zygote, tmp_path, kind, "torpor", host_bytes, num_gpu_blocks_override=blocks, max_model_len=512)
        assert result["tokens"] == expected
        assert result["preemptions"] > 0 and result["stats"]["onboard_transferred"] > 0
        assert (result["stats"]["host_evicted"] > 0) == (host_bytes == few)
        assert result["stats"]["held_blocks"] == result["stats"]["loading_requests"] == 0
