# SPDX-License-Identifier: Apache-2.0
"""Every KV cache layout of vLLM, named by VLLM_KV_CACHE_LAYOUT; without it that of a GPU, LBNHC.

Where a block of a layer lies is as on a GPU. Inside of it vLLM's attention for CPUs has heads outside and tokens
inside, whatever the layout; where they should be the other way round, it is shown the same bytes as it wants them.

With TORPOR_GPU_PATH_KERNEL_BLOCK=TOKENS attention knows blocks of so many tokens only, as some on a GPU do: a block of
the scheduler is several of them.
"""

from __future__ import annotations

import os

import torch


def install() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

    stock_forward, stock_update = CPUAttentionBackendImpl.forward, CPUAttentionBackendImpl.do_kv_cache_update

    def forward(self, layer, query, key, value, kv_cache, *others, **named):
        return stock_forward(self, layer, query, key, value, _heads_outside(kv_cache), *others, **named)

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        stock_update(self, layer, key, value, _heads_outside(kv_cache), slot_mapping)

    CPUAttentionBackendImpl.forward = forward
    CPUAttentionBackendImpl.do_kv_cache_update = do_kv_cache_update
    CPUAttentionBackend.supported_kv_cache_layouts = classmethod(lambda cls: None)  # any, the GPU's first
    if tokens := os.environ.get("TORPOR_GPU_PATH_KERNEL_BLOCK"):
        CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(lambda spec=None: [int(tokens)])


def _heads_outside(cache: torch.Tensor) -> torch.Tensor:
    """`cache`: [blocks, heads, tokens, content]. With tokens outside, a block is in one piece.

    While vLLM measures how much memory a step takes, a cache is empty and has one dimension.
    """
    if cache.dim() == 1:
        return cache
    _, _, tokens, content = cache.shape
    if cache.stride(1) >= cache.stride(2):
        return cache
    return cache.as_strided(cache.shape, (cache.stride(0), tokens * content, content, 1))
