"""What a difference between vLLM and its manifest switches off: all of torpor, or only what goes to a new process.

An object of vLLM lives on over a sleep of its process, with fields that torpor does not know. A new process makes it
anew from what a checkpoint has, and would lose them. So where one of these classes has a field that torpor does not
know, checkpoints are refused, by its name, and nothing else. Other classes decide which KV blocks are in use, or have
what lies in memory that is given back: there, such a field switches torpor off.
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
    """Those that switch all off; those that refuse only what goes to a new process."""
    new_process = [each for each in problems if isinstance(each, UnknownField) and each.owner in LIVE_ON]
    return [each for each in problems if each not in new_process], new_process
