# SPDX-License-Identifier: Apache-2.0
"""What experts need of data parallel ranks and vLLM's communicator for CPUs lacks: pieces of each rank's own size."""

from __future__ import annotations

import torch


def install() -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv


def all_gatherv(self, input_, dim: int = 0, sizes: list[int] | None = None):
    if isinstance(input_, list):
        return [all_gatherv(self, each, dim, sizes) for each in input_]
    assert dim == 0
    sizes = sizes or [len(input_)] * self.world_size
    longest = max(sizes)
    padded = input_.new_zeros((longest, *input_.shape[1:]))
    padded[: len(input_)] = input_
    whole = self.all_gather(padded, 0)
    return torch.cat([whole[rank * longest : rank * longest + size] for rank, size in enumerate(sizes)])


def reduce_scatterv(self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
    assert dim == 0
    sizes = sizes or [len(input_) // self.world_size] * self.world_size
    whole = input_.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(whole, group=self.device_group)
    begin = sum(sizes[: self.rank_in_group])
    return whole[begin : begin + sizes[self.rank_in_group]].clone()
