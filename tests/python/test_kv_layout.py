"""Where torpor takes the bytes of a KV block to lie, against vLLM's own views of a KV cache. Without an engine."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, UniformTypeKVCacheSpecs
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from torpor.vllm import kv_layout

BLOCKS = 5


def spec(head_size: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=head_size, dtype=torch.float16)


GROUPS = {
    "layers alike": KVCacheGroupSpec(["a", "b", "c"], spec(8)),
    "layers of two sizes": KVCacheGroupSpec(
        ["a", "b", "c"],
        UniformTypeKVCacheSpecs(block_size=4, kv_cache_specs={"a": spec(8), "b": spec(16), "c": spec(8)}),
    ),
}


def configuration(group: KVCacheGroupSpec, layout: KVCacheLayout):
    cache = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: layout, num_gpu_blocks_override=BLOCKS, prefix_cache_retention_interval=None
    )
    engine = SimpleNamespace(cache_config=cache, attention_config=SimpleNamespace(hisparse_config=None))
    config = get_kv_cache_config_from_groups(engine, [group], 1 << 20)
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
    for view in views.values():
        for block in range(BLOCKS):
            view[block].view(torch.int8).fill_(block + 1)
    [raw] = {view.untyped_storage().data_ptr(): view.untyped_storage() for view in views.values()}.values()
    memory = torch.frombuffer(bytearray(bytes(raw)), dtype=torch.int8)
    described = kv_layout.to_value(config, 0)
    assert described["num_blocks"] == BLOCKS
    for block in range(BLOCKS):
        found = []
        for tensor in described["tensors"]:
            for layer in range(tensor["layers"]):
                start = tensor["address"] + layer * tensor["layer_stride"] + block * tensor["block_stride"]
                found.append(memory[start : start + tensor["block_bytes"]])
        assert set(torch.cat(found).tolist()) == {block + 1}
        assert sum(len(piece) for piece in found) == sum(view[block].nbytes for view in views.values())
