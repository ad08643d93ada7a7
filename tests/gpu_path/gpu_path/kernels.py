# SPDX-License-Identifier: Apache-2.0
"""Kernels that PyTorch stands in for: one that the interpreter cannot run, and two that it takes longest for. Each is a
function of the logits alone. All that keep the runner's state (staged writes, block tables, penalties) and the one that
samples by seed and position are run as they are.
"""

from __future__ import annotations


def install() -> None:
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.gpu.sample import logprob

    topk_topp_sampler.apply_top_k_top_p_triton = _top_k_top_p
    logprob._topk_log_softmax_kernel = Instead(_log_probabilities, logprob._topk_log_softmax_kernel)
    logprob._ranks_kernel = Instead(_ranks, logprob._ranks_kernel)


def _top_k_top_p(logits, k, p, **_):
    """What further arguments say is there for speed."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    return apply_top_k_top_p_pytorch(logits, k, p)


class Instead:
    """Is launched as the kernel; needs no grid."""

    def __init__(self, function, kernel):
        self._function = function
        self.kernel = kernel

    def __getitem__(self, grid):
        return self._function


def _log_probabilities(output, logits, logits_stride, token_ids, *_, **__) -> None:
    output.copy_(logits.float().log_softmax(-1).gather(-1, token_ids))


def _ranks(output, logits, logits_stride, token_ids, *_, **__) -> None:
    """How many words are as likely as the sampled one, itself included."""
    output.copy_((logits >= logits.gather(-1, token_ids.unsqueeze(-1))).sum(-1))
