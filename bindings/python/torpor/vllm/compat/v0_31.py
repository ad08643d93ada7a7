# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.31, by what differs from 0.32. How to read it: changes.py."""

from torpor.vllm.compat import v0_32
from torpor.vllm.compat.changes import ABSENT, Changed, Changes, changed

_SCHEDULER = Changed(
    without="_kv_fetch_counts _kv_fetch_stages _spec_decode_step_blocks prefix_replay_group_ids",
    also="_skip_zero_block_ids",  # of a KV connector's loads
)

CHANGES: Changes = {
    # Which version of the weights drew which tokens is not recorded.
    "vllm.outputs.WeightVersionSpan": ABSENT,
    "vllm.outputs.CompletionOutput": Changed(without="weight_versions"),
    "vllm.v1.engine.output_processor.OutputProcessor": Changed({
        "process_outputs": "self, engine_core_outputs, engine_core_timestamp=None, iteration_stats=None",
    }),
    "vllm.v1.engine.output_processor.RequestState": Changed(
        {
            "make_request_output": (
                "self, new_token_ids, pooling_output, finish_reason, stop_reason, kv_transfer_params=None, "
                "ec_transfer_params=None"
            )
        },
        without="weight_version_starts",
    ),
    "vllm.sampling_params.SamplingParams": Changed(without="_watermarking_skipped"),
    "vllm.v1.core.sched.scheduler.Scheduler": _SCHEDULER,
    "vllm.v1.core.sched.async_scheduler.AsyncScheduler": _SCHEDULER,
    "vllm.lora.request.LoRARequest": Changed(also="tensorizer_config_dict"),
    # A table has the blocks of the attention kernel, which may be smaller.
    "vllm.v1.worker.gpu.block_table.BlockTables": Changed(
        also="blocks_per_kv_block kernel_block_sizes kernel_block_sizes_tensor"
    ),
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner": Changed(also="dp_rank dp_size"),
    "vllm.v1.pool.late_interaction_runner.LateInteractionRunner": Changed(without="_flash_enabled"),
    # Hits are not told apart by tier.
    "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1": Changed(
        without="get_external_cache_hit_sources"
    ),
    "vllm.v1.metrics.cache_hit_source": ABSENT,
    # CUDA graphs do not sleep, and the server counts no sleeps.
    "vllm.compilation.cudagraph_pool": ABSENT,
    "vllm.config.VllmConfig": Changed(without="use_cumem_cudagraph_pool"),
    "vllm.config.ModelConfig": Changed(without="sleep_mode_offload_cudagraph"),
    "vllm.device_allocator.DEFERRABLE_TAGS": ABSENT,
    "vllm.entrypoints.serve.dev.sleep.metrics": ABSENT,
}  # fmt: skip

CPU_SAMPLER_DRAWS = "a number a word"
PARTS = changed(v0_32.PARTS, CHANGES)
