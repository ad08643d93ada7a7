# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of each KV block lie, from vLLM's description of its KV cache."""

from __future__ import annotations

import torch
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs
from vllm.v1.kv_cache_layout import KVCacheLayout


def to_value(kv_cache_config, address: int) -> dict:
    """For RankMemory.set_kv_layout(). `address`: of the one allocation that all KV tensors lie in. Sizes in bytes."""
    return {
        "num_blocks": kv_cache_config.num_blocks,
        "tensors": [_tensor_to_value(kv_cache_config, tensor, address) for tensor in kv_cache_config.kv_cache_tensors],
    }


def description(kv_cache_config) -> str:
    """For the fingerprint: where layers and blocks of a worker lie, however many blocks there are."""
    return ";".join(_describe(tensor, kv_cache_config.num_blocks) for tensor in kv_cache_config.kv_cache_tensors)


def layers(kv_cache_config) -> str:
    """For the fingerprint: the layers of a worker that have KV."""
    return ",".join(name for tensor in kv_cache_config.kv_cache_tensors for name in tensor.layers)


def packing(vllm_config) -> dict[str, str]:
    """For the fingerprint and for keys: how attention on a CPU packs keys and values, where that is not as ever.

    With AMX vLLM packs bfloat16 in its own way, at the same size and under the same name of the layout.
    """
    layers = vllm_config.compilation_config.static_forward_context.values()
    return {"kv_packing": "amx"} if any(getattr(layer, "isa", None) == "amx" for layer in layers) else {}


def scattered_blocks(kv_cache_config) -> str | None:
    """The name of the layout, if a block of a layer is not one run of bytes in it."""
    layout = _layout(kv_cache_config)
    if layout is None or layout.is_block_compact or layout is KVCacheLayout.BHLNC:
        return None
    return layout.name


def is_bf16(kv_cache_config) -> bool:
    """Whether all that blocks hold are bfloat16 values."""
    tensors = kv_cache_config.kv_cache_tensors
    return all(getattr(_spec(kv_cache_config, tensor), "dtype", None) is torch.bfloat16 for tensor in tensors)


def _describe(tensor, num_blocks: int) -> str:
    offset, layer_stride = tensor.offset, tensor.layer_stride
    if layer_stride > tensor.block_stride:  # all blocks of a layer, then those of the next one: so much for each block
        offset, layer_stride = offset // num_blocks, layer_stride // num_blocks
    return f"{offset},{len(tensor.layers)},{layer_stride},{tensor.block_stride}"


def _spec(kv_cache_config, tensor):
    group = next(g for g in kv_cache_config.kv_cache_groups if tensor.layers[0] in g.layer_names)
    spec = group.kv_cache_spec
    return spec.kv_cache_specs[tensor.layers[0]] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _tensor_to_value(kv_cache_config, tensor, address: int) -> dict:
    """KVCacheTensor: layer l of block b begins at offset + l * layer_stride + b * block_stride."""
    block_bytes = _spec(kv_cache_config, tensor).page_size_bytes
    layers, layer_stride = len(tensor.layers), tensor.layer_stride
    if _layout(kv_cache_config) is KVCacheLayout.BHLNC:  # layers alternate inside a block: it is one run of all of them
        layers, layer_stride, block_bytes = 1, tensor.block_stride, layers * block_bytes
    return {
        "address": address + tensor.offset,
        "layers": layers,
        "layer_stride": layer_stride,
        "block_stride": tensor.block_stride,
        "block_bytes": block_bytes,
    }


def _layout(kv_cache_config) -> KVCacheLayout | None:
    name = kv_cache_config.kv_cache_layout
    return None if name is None else KVCacheLayout[name]
