# SPDX-License-Identifier: Apache-2.0
"""Where torpor takes the bytes of a KV block to lie, against vLLM's own views of a KV cache. Without an engine."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from torpor import _core
from torpor.vllm import kv_layout

BLOCKS = 5


def spec(head_size: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=head_size, dtype=torch.float16)


def window(head_size: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=4, num_kv_heads=2, head_size=head_size, dtype=torch.float16, sliding_window=9)


PAGE = spec(8).page_size_bytes
STATE = MambaSpec(
    block_size=16, shapes=((3, 5), (2, 7)), dtypes=(torch.float32, torch.float32), page_size_padded=PAGE
)  # of 116 bytes
GROUPS = {
    "layers alike": [KVCacheGroupSpec(["a", "b", "c"], spec(8))],
    "layers of two sizes": [
        KVCacheGroupSpec(
            ["a", "b", "c"],
            UniformTypeKVCacheSpecs(block_size=4, kv_cache_specs={"a": spec(8), "b": spec(16), "c": spec(8)}),
        )
    ],
    "windows": [
        KVCacheGroupSpec(["a", "b"], window(8)),
        KVCacheGroupSpec(["c"], window(8)),
        KVCacheGroupSpec(["d", "e"], spec(8)),
    ],
    "pages of two sizes": [KVCacheGroupSpec(["a", "b"], window(16)), KVCacheGroupSpec(["c", "d", "e"], spec(8))],
    "states in larger pages": [KVCacheGroupSpec(["a"], spec(8)), KVCacheGroupSpec(["b", "c"], STATE)],
}


def configuration(groups: list[KVCacheGroupSpec], layout: KVCacheLayout, blocks: int = BLOCKS):
    cache = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: layout,
        num_gpu_blocks_override=blocks,
        prefix_cache_retention_interval=None,
    )
    engine = SimpleNamespace(cache_config=cache, attention_config=SimpleNamespace(hisparse_config=None))
    config = get_kv_cache_config_from_groups(engine, groups, 1 << 20)
    config.kv_cache_layout = layout.name
    return config


@pytest.mark.parametrize("layout", KVCacheLayout, ids=lambda layout: layout.name)
@pytest.mark.parametrize("layers", GROUPS)
def test_the_described_bytes_of_a_block_are_those_that_vllm_writes_for_it(layers, layout):
    try:
        config = configuration(GROUPS[layers], layout)
        views = allocate_kv_cache(config, torch.device("cpu"), layout)
    except (AssertionError, ValueError) as problem:
        pytest.skip(f"vLLM itself has no such cache: {problem}")
    if kv_layout.scattered_blocks(config) is not None:
        assert layout is KVCacheLayout.LHBNC
        return
    [raw] = {view.untyped_storage().data_ptr(): view.untyped_storage() for view in views.values()}.values()
    memory = torch.empty(0, dtype=torch.int8).set_(raw)
    for view in views.values():  # groups lie over one another: a block has the same mark in each
        for block in range(BLOCKS):
            view[block].view(torch.int8).fill_(block + 1)
    described = kv_layout.to_value(config, 0)
    assert described["num_blocks"] == BLOCKS
    seen = set()
    for block in range(BLOCKS):
        bytes_of_block = set()
        for tensor in described["tensors"]:
            for layer in range(tensor["layers"]):
                start = tensor["address"] + layer * tensor["layer_stride"] + block * tensor["block_stride"]
                bytes_of_block |= set(range(start, start + tensor["block_bytes"]))
        written = set((memory == block + 1).nonzero().flatten().tolist())
        assert written <= bytes_of_block and not bytes_of_block & seen
        assert layers == "states in larger pages" or written == bytes_of_block
        assert set(memory[sorted(bytes_of_block)].tolist()) <= {block + 1, 0}  # nothing of another block
        seen |= bytes_of_block
    # The core takes it, as any allocation might lie.
    rank = _core.RankMemory({"rank": 0})
    address = rank.allocate("kv_cache", "kv", len(memory))
    rank.set_kv_layout("kv_cache", kv_layout.to_value(config, address))


def test_the_description_tells_all_but_the_number_of_blocks():
    described = {}
    for layers, groups in GROUPS.items():
        for layout in KVCacheLayout:
            try:
                configurations = [configuration(groups, layout, blocks) for blocks in (BLOCKS, 8, 300)]
            except (AssertionError, ValueError):
                continue  # vLLM itself has no such cache
            [described[layers, layout.name]] = {kv_layout.description(config) for config in configurations}
    assert described["layers alike", "LBNHC"] != described["layers alike", "BLNHC"]
    assert described["layers alike", "LBNHC"] != described["layers of two sizes", "LBNHC"]


def test_attention_with_amx_packs_kv_its_own_way():
    """At the same size, and under the same name of the layout."""

    def config(*isas):
        layers = {str(number): SimpleNamespace(isa=isa) for number, isa in enumerate(isas)}
        return SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers | {"mlp": object()}))

    assert kv_layout.packing(config("vec", "vec16")) == kv_layout.packing(config()) == {}
    assert kv_layout.packing(config("vec", "amx")) == {"kv_packing": "amx"}
