# SPDX-License-Identifier: Apache-2.0
"""A spec of vLLM's OffloadingConnector whose worker copies on a CPU: vLLM's own needs a GPU. All else is vLLM's.

As strict as a copy engine: a transfer is under way for some looks, and its bytes are read and written in the last one.
"""

from __future__ import annotations

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

LOOKS = 3  # at a transfer before it is done
COUNTS = {"stored": 0, "loaded": 0}  # blocks


class OnCpu(CPUOffloadingSpec):
    def get_worker(self, kv_caches) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1
        return Worker(kv_caches, self.num_chunks)


class Worker(OffloadingWorker):
    def __init__(self, kv_caches, chunks: int):
        self._device = [each.tensor for each in kv_caches.tensors]
        self._host = [torch.zeros(chunks, *each.shape[1:], dtype=each.dtype) for each in self._device]
        self._open: dict[int, list] = {}  # looks left, whether it is a load, blocks of the device, chunks

    def submit_store(self, job_id: int, src_spec, dst_spec) -> bool:
        return self._submit(job_id, False, src_spec.block_ids, dst_spec.block_ids)

    def submit_load(self, job_id: int, src_spec, dst_spec) -> bool:
        return self._submit(job_id, True, dst_spec.block_ids, src_spec.block_ids)

    def _submit(self, job_id: int, loads: bool, blocks, chunks) -> bool:
        assert job_id not in self._open and len(blocks) == len(chunks)
        self._open[job_id] = [LOOKS, loads, blocks.tolist(), chunks.tolist()]
        return True

    def get_finished(self) -> list[TransferResult]:
        for transfer in self._open.values():
            transfer[0] -= 1
        done = [job_id for job_id, transfer in self._open.items() if transfer[0] <= 0]
        for job_id in done:
            self._carry_out(job_id)
        return [TransferResult(job_id, True, 1, 0.001) for job_id in done]

    def _carry_out(self, job_id: int) -> None:
        _, loads, blocks, chunks = self._open.pop(job_id)
        COUNTS["loaded" if loads else "stored"] += len(blocks)
        for device, host in zip(self._device, self._host, strict=True):
            if loads:
                device[blocks] = host[chunks]
            else:
                host[chunks] = device[blocks]

    def wait(self, job_ids: set[int]) -> None:
        for job_id in job_ids & self._open.keys():
            self._open[job_id][0] = 0  # get_finished() says so
