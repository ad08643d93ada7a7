# SPDX-License-Identifier: Apache-2.0
"""Functions of vLLM whose behaviour torpor relies on or does itself, beyond their signatures, and where.

`tools/dev contract` says which of them a release has changed: each is to be read then beside what is named here.
"""

from __future__ import annotations

_POOL = "vllm.v1.core.block_pool.BlockPool"
_SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"
_CORE = "vllm.v1.engine.core"
_V1 = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
_V2 = "vllm.v1.worker.gpu"

RELIED_ON = {
    # KV blocks: what a reference count, a hash and the free queue mean.
    f"{_POOL}.touch": (
        "bindings/engine_blocks.cpp counts itself where this would only count; forks.py shares blocks by it"
    ),
    f"{_POOL}.free_blocks": "bindings/engine_blocks.cpp counts itself; pool_values.py frees blocks of lost requests",
    f"{_POOL}.get_new_blocks": "deferred_blocks.py, bindings/engine_prefixes.cpp know which free blocks it takes",
    f"{_POOL}._insert_block_hash": "bindings/engine_prefixes.cpp caches blocks that no request has loaded",
    f"{_POOL}._maybe_evict_cached_block": "deferred_blocks.py, hooks.py drop cached blocks by it",
    f"{_POOL}.cache_full_blocks": "block_versions.py: each time a block is cached its hash is a new object",
    f"{_POOL}.emit_cached_block_events": "pool_values.py announces restored blocks by it",
    f"{_POOL}.reset_prefix_cache": "hooks.py, pool_values.py: what is left of an emptied pool",
    "vllm.v1.core.block_pool.BlockHashToBlockMap.insert": "pool_values.py fills the map itself",
    "vllm.v1.core.block_pool.BlockHashToBlockMap.pop": "pool_values.py fills the map itself",
    "vllm.v1.core.kv_cache_utils.FreeKVCacheBlockQueue.append_n": "pool_values.py links the free queue anew",
    "vllm.v1.core.kv_cache_utils.FreeKVCacheBlockQueue.popleft_n": "deferred_blocks.py walks it in this order",
    "vllm.v1.core.kv_cache_utils.make_block_hash_with_group_id": "block_versions.py, engine_blocks.cpp read it",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.get_computed_blocks": "deferred_blocks.py calls it again",
    "vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager.cache_blocks": "pool_values.py: cached counts",
    "vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager.free": "pool_values.py: what a request holds",
    # Requests and the scheduler: which fields say how far a request is, and who reads them.
    "vllm.v1.request.Request.__init__": "scheduler_values.py makes requests anew",
    "vllm.v1.request.Request.append_output_token_ids": "scheduler_values.py gives a new request its tokens",
    "vllm.v1.request.Request.update_block_hashes": "hooks.py hashes blocks again under another salt",
    f"{_SCHEDULER}.schedule": "hooks.py, slots.py look at what it gives; deferred_blocks.py waits before it",
    f"{_SCHEDULER}._update_after_schedule": "scheduler_values.py keeps the counters that it moves",
    "vllm.v1.core.sched.async_scheduler.AsyncScheduler._update_after_schedule": "scheduler_values.py: tokens in flight",
    f"{_SCHEDULER}.update_from_output": "connector_sleep.py ends transfers by it, without a step",
    f"{_SCHEDULER}._preempt_request": "scheduler_values.py puts pooling requests back by it",
    f"{_SCHEDULER}._update_request_as_session": "scheduler.py: which tokens of a prompt in pieces it keeps",
    f"{_SCHEDULER}._handle_blocked_waiting_request": "scheduler.py holds requests by it, connector_sleep.py ends loads",
    f"{_SCHEDULER}.reset_prefix_cache": "connector_sleep.py: what it takes back of running requests",
    f"{_SCHEDULER}.has_requests": "hooks.py: a frozen engine has none",
    f"{_SCHEDULER}._update_from_kv_xfer_finished": "other_connectors.py: when a transfer has ended",
    f"{_SCHEDULER}._free_request": "other_connectors.py: whose blocks a connector still holds",
    f"{_SCHEDULER}._enqueue_waiting_request": "forks.py: a request with KV waits among those that hold blocks",
    f"{_SCHEDULER}._update_waiting_for_remote_kv": "portable.py: what a request is when its KV has arrived",
    f"{_SCHEDULER}._handle_failed_recving": "portable.py: KV that did not arrive is computed again",
    # The engine core: steps that compute nothing, pauses, and what a wake ends.
    f"{_CORE}.EngineCore.step": "other_connectors.py ends transfers by it",
    f"{_CORE}.EngineCore.step_with_batch_queue": "other_connectors.py ends transfers by it",
    f"{_CORE}.EngineCoreProc.pause_scheduler": "hooks.py pauses and drops requests by it",
    f"{_CORE}.EngineCoreProc.pause_generation": "hooks.py keeps its answer to new requests over a sleep",
    f"{_CORE}.EngineCoreProc.resume_scheduler": "hooks.py ends a pause as it does",
    f"{_CORE}.EngineCoreProc._handle_client_request": "hooks.py: who is turned away during a pause",
    f"{_CORE}.EngineCoreProc._notify_idle_state_callbacks": "freezing.py: pauses wait for requests, not for a freeze",
    f"{_CORE}.EngineCoreProc._process_input_queue": "freezing.py: when it takes the engine for idle",
    f"{_CORE}.EngineCoreProc._pause_complete": "freezing.py answers for it while the engine is frozen",
    f"{_CORE}.DPEngineCoreProc._pause_complete": "freezing.py answers for it while the engine is frozen",
    f"{_CORE}.EngineCore._finish_pause": "hooks.py drops requests by it",
    f"{_SCHEDULER}.get_num_unfinished_requests": "freezing.py: whose end a pause waits for",
    f"{_CORE}.DPEngineCoreProc.resume_scheduler": "data_parallel.py lets all ranks go on by it",
    f"{_CORE}.EngineCore.release_kv_cache_memory": "engine_core.py does it for memory that torpor holds",
    f"{_CORE}.EngineCore.wake_up": "engine_core.py: a wake ends a pause from before only where this does",
    # Front ends.
    "vllm.v1.engine.output_processor.RequestState.from_new_request": "outputs.py makes requests of a front end anew",
    "vllm.v1.engine.detokenizer.BaseIncrementalDetokenizer.update": "outputs.py feeds it the tokens again",
    # Structured output.
    "vllm.v1.structured_output.StructuredOutputManager.grammar_init": "hooks.py compiles grammars again by it",
    "vllm.v1.structured_output.StructuredOutputManager.accept_tokens": "grammar.py feeds it the tokens again",
    # Model runners: rows, slots and numbers drawn.
    f"{_V1}._update_states": "runner_v1.py rebuilds what it keeps of requests",
    f"{_V1}._bookkeeping_sync": "patches.py: which draws it takes back",
    "vllm.v1.worker.gpu_input_batch.InputBatch.add_request": "runner_v1.py rebuilds the batch by it",
    "vllm.v1.worker.gpu_input_batch.InputBatch.condense": "runner_v1.py empties the batch by it",
    "vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler.forward_cpu": "runner_v1.py draws as often as it does",
    f"{_V2}.model_runner.GPUModelRunner.add_requests": "runner_v2.py puts requests into their slots by it",
    f"{_V2}.model_runner.GPUModelRunner._remove_request": "runner_v2.py empties slots by it",
    f"{_V2}.model_runner.GPUModelRunner.update_pp_decode_requests": "runner_v2.py notes what stages heard of by it",
    f"{_V2}.states.RequestState.add_request": "runner_v2.py corrects what it sets",
    f"{_V2}.block_table.BlockTables.append_block_ids": "runner_v2.py reads the tables that it fills",
    f"{_V2}.sample.states.SamplingStates.add_request": "runner_v2.py corrects the seed that it draws",
}
