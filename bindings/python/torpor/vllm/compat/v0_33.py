# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.33, by what differs from 0.32. How to read it: changes.py. What of it was run: docs/vllm.md."""

from torpor.vllm.compat import v0_32
from torpor.vllm.compat.changes import Changed, Changes, Moved, changed
from torpor.vllm.compat.guards import Class, Module

_SCHEDULER = Changed(
    also="""
        _pending_encoder_input_ids can_skip_drafts defer_async_loads deferred_loads last_prefill_step
        local_prefill_interval num_executed_steps num_hash_lookahead_tokens
    """
)

CHANGES: Changes = {
    "vllm.v1.core.sched.scheduler.Scheduler": _SCHEDULER,
    "vllm.v1.core.sched.async_scheduler.AsyncScheduler": _SCHEDULER,
    "vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator": Changed(also="drop_eagle_group_ids"),
    "vllm.v1.core.kv_cache_manager.KVCacheManager": Changed({
        "get_computed_blocks": "self, request, max_cache_hit_length=None",
    }),
    # What a pause says to new requests.
    "vllm.v1.engine.core.EngineCoreProc": Changed(used="reject_new_requests"),
    "vllm.v1.core.block_pool.BlockPool": Changed(also="num_hash_lookahead_tokens"),
    "vllm.pooling_params.PoolingParams": Changed(also="late_chunking_params"),
    # Follows from the grammar and the reasoning parser, and is computed when it is first used.
    "vllm.v1.structured_output.request.StructuredOutputRequest": Changed(also="masked_reasoning_end_ids"),
    # What a step reads beside the tables is written anew for each step.
    "vllm.v1.worker.gpu.block_table.BlockTables": Changed(
        also="_num_dirty_rows _sliding_window_reach has_sliding_window_groups sliding_window_reach"
    ),
    "vllm.v1.worker.gpu.pp_utils.PPHandler": Changed(also="sampled_tokens_broadcast"),
    "vllm.v1.worker.gpu.buffer_utils.StagedWriteTensor": Changed(also="_staged_write_max_len"),
    "vllm.entrypoints.launchers.cli_args": Moved("vllm.entrypoints.common.cli_args"),
    "vllm.entrypoints.serve.utils.api_utils.cli_env_setup": Moved("vllm.entrypoints.common.startup.cli_env_setup"),
}  # fmt: skip

CPU_SAMPLER_DRAWS = v0_32.CPU_SAMPLER_DRAWS
PARTS = changed(v0_32.PARTS, CHANGES)
PARTS["cuda"] += (Module("vllm.v1.worker.lora_model_runner_mixin", names=("get_mem_allocator_instance",)),)
# A KV connector that is not torpor's follows a sleep by these hooks. vLLM's own wake tells its peers of the KV cache.
PARTS["other_connectors"] += (
    Module(
        "vllm.v1.engine.core",
        classes=(Class("EngineCore", calls={"_set_kv_connector_handshake_metadata": "self"}),),
    ),
    Module(
        "vllm.distributed.kv_transfer.kv_connector.v1.base",
        classes=(
            Class(
                "KVConnectorBase_V1",
                calls={
                    "supports_sleep_mode": "cls, kv_transfer_config",
                    "unregister_kv_caches": "self",
                    "restore_kv_caches": "self",
                },
            ),
        ),
    ),
)
