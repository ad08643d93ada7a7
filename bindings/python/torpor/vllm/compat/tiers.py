# SPDX-License-Identifier: Apache-2.0
"""The tiers of torpor: a difference between vLLM and its manifest switches off all of torpor, or only checkpoints.

An object of vLLM stays in its process over a sleep, with fields that torpor does not know. A new process makes the
object from a checkpoint, which lacks these fields. So torpor refuses checkpoints, and nothing else, if a class of
LIVE_ON has an unknown field. Other classes decide which KV blocks are in use, or describe memory that a sleep frees. If
one of those has an unknown field, torpor is off.
"""

from __future__ import annotations

from torpor.vllm.compat.guards import UnknownField

LIVE_ON = frozenset(
    f"{module}.{name}"
    for module, names in {
        "vllm.v1.engine": "EngineCoreRequest",
        "vllm.v1.engine.output_processor": "OutputProcessor RequestState",
        "vllm.v1.engine.detokenizer": "IncrementalDetokenizer FastIncrementalDetokenizer SlowIncrementalDetokenizer",
        "vllm.v1.engine.logprobs": "LogprobsProcessor",
        "vllm.v1.engine.parallel_sampling": "ParentRequest",
        "vllm.v1.request": "Request",
        "vllm.v1.kv_hints": "KvHintsEnvelope",
        "vllm.v1.structured_output.request": "StructuredOutputRequest",
        "vllm.sampling_params": "RepetitionDetectionParams StructuredOutputsParams SamplingParams",
        "vllm.pooling_params": "PoolingParams",
        "vllm.lora.request": "LoRARequest",
        "vllm.multimodal.inputs": "MultiModalFeatureSpec",
        "vllm.outputs": "CompletionOutput WeightVersionSpan SamplingMask",
        "vllm.logprobs": "Logprob FlatLogprobs",
        "vllm.v1.outputs": "SamplingMaskLists LogprobsTensors",
        "vllm.v1.worker.gpu_input_batch": "InputBatch CachedRequestState",
    }.items()
    for name in names.split()
)


def split(problems: list[str]) -> tuple[list[str], list[str]]:
    """Return the problems that switch torpor off, and those that only refuse checkpoints."""
    new_process: list[str] = [each for each in problems if isinstance(each, UnknownField) and each.owner in LIVE_ON]
    return [each for each in problems if each not in new_process], new_process
