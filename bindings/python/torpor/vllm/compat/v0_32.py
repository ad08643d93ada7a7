# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.32: all of it that torpor imports, calls, replaces, reads or sets, each with its guard.

Where `exact` is set, a field that does not stand here would be state that a sleep loses: torpor then stays inactive.
What replaces parts of vLLM is in ../patches.py. A name that the adapter imports and that is missing here fails a
test (tests/python/test_compat.py).
"""

from torpor.vllm.compat.guards import Class, Module

# vLLM's own sleep mode, and names by which torpor is chosen for it.
_SLEEP_MODE = (
    Module(
        "vllm.platforms",
        names=("current_platform",),
    ),
    Module(
        "vllm.utils.import_utils",
        functions={"resolve_obj_by_qualname": "qualname"},
    ),
    Module(
        "vllm.device_allocator",
        names=("DEFERRABLE_TAGS",),
    ),
    Module(
        "vllm.device_allocator.sleep_mode_backend",
        classes=(
            Class(
                "SleepModeBackendFactory",
                calls={
                    "register_backend": "cls, name, module_path, class_name",
                },
            ),
            Class(
                "SleepModeBackend",
                calls={
                    "__init__": "self",
                    "suspend": "self, level=1",
                    "resume": "self, tags=None",
                    "discard": "self, tags",
                    "preserves_communicators": "cls",
                    "is_supported": "cls",
                },
                fields="_state",
            ),
        ),
    ),
)

# Front ends, engine core, scheduler, block pool: in every process.
ENGINE = (
    Module(
        "vllm",
        names=("__version__",),
        classes=(
            Class(
                "LLM",
                calls={
                    "sleep": "self, level=1, mode='abort'",
                    "wake_up": "self, tags=None",
                    "_run_engine": "self, output_type, *, use_tqdm=True",
                    "_run_tiling_engine": "self, io_processor, request_factory, num_requests, use_tqdm=True",
                    "wait_for_completion": "self, output_type=None, *, use_tqdm=True",
                },
                fields="llm_engine",
            ),
        ),
    ),
    Module(
        "vllm.v1.engine.llm_engine",
        classes=(
            Class(
                "LLMEngine",
                calls={
                    "sleep": "self, level=1, mode='abort'",
                    "wake_up": "self, tags=None",
                    "step": "self",
                    "has_unfinished_requests": "self",
                    "is_sleeping": "self",
                    "get_metrics": "self",
                },
                fields="engine_core output_processor renderer logger_manager vllm_config",
            ),
        ),
    ),
    Module(
        "vllm.v1.engine.async_llm",
        classes=(
            Class(
                "AsyncLLM",
                calls={
                    "sleep": "self, level=1, mode='abort'",
                    "wake_up": "self, tags=None",
                    "is_sleeping": "self",
                    "add_request": (
                        "self, request_id, prompt, params, arrival_time=None, lora_request=None, "
                        "tokenization_kwargs=None, trace_headers=None, priority=0, data_parallel_rank=None, "
                        "session_id=None, prompt_text=None, reasoning_ended=None, reasoning_parser_kwargs=None, "
                        "kv_hints=None"
                    ),
                    "_add_request": "self, request, prompt, parent_req, index, queue",
                    "abort": "self, request_id, internal=False",
                    "_run_output_handler": "self",
                },
                fields="engine_core output_processor renderer logger_manager vllm_config _client_count",
            ),
        ),
    ),
    Module(
        "vllm.v1.engine.core_client",
        classes=(
            Class(
                "InprocClient",
                calls={"get_output": "self"},
                fields="engine_core",
            ),
            Class(
                "MPClient",
                calls={"shutdown": "self, timeout=None"},
                fields="resources utility_results",
            ),
            Class(
                "SyncMPClient",
                calls={
                    "call_utility": "self, method, *args",
                },
                fields="outputs_queue",
            ),
            Class(
                "AsyncMPClient",
                calls={
                    "call_utility_async": "self, method, *args",
                    "_call_utility_async": "self, method, *args, engine",
                    "abort_requests_async": "self, request_ids",
                },
            ),
            Class("DPLBAsyncMPClient", fields="core_engines reqs_in_flight engine_inflight"),
        ),
    ),
    Module(
        "vllm.v1.executor.abstract",
        classes=(
            Class(
                "Executor",
                calls={"collective_rpc": "self, method, timeout=None, args=(), kwargs=None, non_block=False"},
            ),
        ),
    ),
    Module(
        "vllm.v1.engine.core",
        classes=(
            Class(
                "EngineCore",
                calls={
                    "pause_scheduler": "self, mode='abort', clear_cache=True",
                    "get_weight_version": "self",
                    "set_weight_version": "self, weight_version",
                    "collective_rpc": "self, method, timeout=None, args=(), kwargs=None",
                    "is_scheduler_paused": "self",
                    "_finish_pause": "self, clear_cache",
                    "release_kv_cache_memory": "self",
                    "shutdown": "self",
                    "step_with_batch_queue": "self",
                    "post_step": "self, model_executed",
                    "add_lora": "self, lora_request",
                    "remove_lora": "self, lora_id",
                },
                fields="""
                    vllm_config scheduler model_executor batch_queue step_fn request_block_hasher
                    structured_output_manager
                """,
            ),
            Class(
                "DPEngineCoreProc",
                calls={
                    "pause_scheduler": "self, mode='abort', clear_cache=True",
                    "resume_scheduler": "self",
                    "_finish_pause": "self, clear_cache",
                    "_pause_complete": "self",
                    "_send_abort_outputs": "self, aborted_reqs",
                },
                fields="eep_scaling_state",
            ),
            Class(
                "EngineCoreProc",
                calls={
                    "pause_scheduler": "self, mode='abort', clear_cache=True",
                    "has_work": "self",
                    "is_running": "self",
                    "_notify_idle_state_callbacks": "self",
                    "_pause_complete": "self",
                },
                fields="input_queue output_queue _idle_state_callbacks",
            ),
        ),
    ),
    Module(
        "vllm.v1.engine",
        classes=(
            Class(
                "EngineCoreRequest",
                fields="""
                    abort_immediately arrival_time cache_salt client_index current_wave
                    data_parallel_rank external_req_id kv_hints lora_request mm_features
                    pooling_params priority prompt_embeds prompt_is_token_ids prompt_token_ids
                    reasoning_ended reasoning_parser_kwargs request_id resumable sampling_params
                    session_id trace_headers
                """,
                exact=True,
            ),
            Class(
                "EngineCoreOutput",
                fields="request_id new_token_ids finish_reason stop_reason",
            ),
            Class(
                "FinishReason",
                members="ABORT ERROR",
            ),
            Class(
                "EngineCoreRequestType",
                members="WAKEUP",
            ),
        ),
    ),
    Module(
        "vllm.v1.engine.output_processor",
        classes=(
            Class(
                "OutputProcessor",
                calls={
                    "add_request": "self, request, prompt, parent_req=None, request_index=0, queue=None",
                    "process_outputs": (
                        "self, engine_core_outputs, engine_core_timestamp=None, iteration_stats=None, "
                        "weight_version=None"
                    ),
                    "abort_requests": "self, request_ids, internal",
                    "propagate_error": "self, e",
                },
                fields="""
                    admission_stats external_req_ids log_stats lora_states parent_requests
                    request_states stream_interval tokenizer tracing_enabled
                """,
                exact=True,
            ),
            Class(
                "OutputProcessorOutput",
                fields="request_outputs",
            ),
            Class(
                "RequestState",
                calls={
                    "from_new_request": (
                        "cls, tokenizer, request, prompt, parent_req, request_index, queue, log_stats, stream_interval"
                    ),
                    "make_request_output": (
                        "self, new_token_ids, pooling_output, finish_reason, stop_reason, kv_transfer_params=None, "
                        "ec_transfer_params=None, error=None"
                    ),
                },
                fields="""
                    detokenizer external_req_id input_chunk_queue is_prefilling
                    logprobs_processor lora_name lora_request max_tokens_param n
                    num_cache_creation_tokens num_cached_tokens output_kind parent_req prompt
                    prompt_embeds prompt_len prompt_token_ids queue remote_prefill_cached_tokens
                    request_id request_index routed_experts_chunks sampling_mask_chunks
                    sent_tokens_offset spec_decode_metrics stats stream_interval streaming_input
                    temperature top_p weight_version_starts
                """,
                exact=True,
            ),
            Class(
                "RequestOutputCollector",
                calls={
                    "__init__": "self, output_kind, request_id",
                    "put": "self, output",
                    "get": "self",
                    "get_nowait": "self",
                },
            ),
        ),
    ),
    Module(
        "vllm.v1.engine.detokenizer",
        classes=(
            Class(
                "IncrementalDetokenizer",
                calls={
                    "num_output_tokens": "self",
                    "update": "self, new_token_ids, stop_terminated",
                },
                fields="token_ids",
                exact=True,
                properties="output_token_ids",
            ),
            Class(
                "FastIncrementalDetokenizer",
                fields="""
                    _last_output_text_offset added_token_ids include_stop_str_in_output
                    last_special min_tokens output_text request_id skip_special_tokens
                    spaces_between_special_tokens stop stop_buffer_length stream token_ids
                    tokenizer
                """,
                exact=True,
            ),
            Class(
                "SlowIncrementalDetokenizer",
                fields="""
                    _last_output_text_offset include_stop_str_in_output min_tokens output_text
                    prefix_offset prompt_len read_offset skip_special_tokens
                    spaces_between_special_tokens stop stop_buffer_length token_ids tokenizer
                    tokens
                """,
                exact=True,
            ),
        ),
    ),
    Module(
        "vllm.v1.engine.logprobs",
        classes=(
            Class(
                "LogprobsProcessor",
                fields="""
                    cumulative_logprob logprobs num_logprobs num_prompt_logprobs prompt_logprobs
                    prompt_token_id_logprobs tokenizer
                """,
                exact=True,
            ),
        ),
    ),
    Module(
        "vllm.v1.engine.parallel_sampling",
        classes=(
            Class(
                "ParentRequest",
                fields="""
                    cached_child_sampling_params child_requests external_req_id
                    max_num_generation_tokens output_aggregator request_id sampling_params
                """,
                exact=True,
            ),
        ),
    ),
    Module(
        "vllm.v1.metrics.reader",
        names=("Counter", "Gauge", "Histogram", "Metric"),
    ),
    Module(
        "vllm.v1.metrics.stats",
        classes=(
            Class(
                "RequestStateStats",
                fields="""
                    first_token_latency first_token_ts is_corrupted last_token_ts
                    num_generation_tokens num_preemptions queued_ts scheduled_ts
                """,
            ),
        ),
    ),
    Module(
        "vllm.v1.metrics.loggers",
        classes=(
            Class(
                "StatLoggerManager",
                calls={
                    "record_sleep_state": "self, sleep=0, level=0",
                },
            ),
        ),
    ),
    Module(
        "vllm.renderers.base",
        classes=(
            Class(
                "BaseRenderer",
                calls={
                    "clear_mm_cache": "self",
                    "clear_mm_cache_async": "self",
                },
                properties="mm_processor_cache",
            ),
        ),
    ),
    Module(
        "vllm.v1.kv_hints",
        classes=(Class("KvHintsEnvelope", fields="actions message_id protocol_version", exact=True),),
    ),
    Module(
        "vllm.v1.request",
        classes=(
            Class(
                "Request",
                calls={
                    "__init__": (
                        "self, request_id, prompt_token_ids, sampling_params, pooling_params, client_index=0, "
                        "arrival_time=None, prompt_embeds=None, prompt_is_token_ids=None, mm_features=None, "
                        "lora_request=None, cache_salt=None, priority=0, trace_headers=None, block_hasher=None, "
                        "resumable=False, session_id=None, reasoning_ended=None, reasoning_parser_kwargs=None, "
                        "abort_immediately=False, kv_hints=None"
                    ),
                    "append_output_token_ids": "self, token_ids",
                    "update_block_hashes": "self",
                },
                fields="""
                    _all_token_ids _block_hasher _output_token_ids
                    _prompt_embeds_per_block_hashes abort_immediately all_token_ids arrival_time
                    block_hashes cache_salt client_index drop_stale_output ec_transfer_params
                    events is_prefill_chunk kv_cache_report_mode kv_hints kv_transfer_params
                    last_sched_seq lora_request max_tokens mm_features next_decode_eligible_step
                    num_computed_tokens num_in_flight_tokens num_nans_in_logits
                    num_output_placeholders num_preemptions num_prompt_tokens
                    num_stale_output_tokens output_token_ids pooling_params prefill_stats
                    priority prompt_embeds prompt_is_token_ids prompt_token_ids replay_start
                    request_id resumable sampling_params session_id shared_prefix_boundary
                    skip_reading_prefix_cache spec_decode_metrics spec_token_ids status
                    stop_reason streaming_queue structured_output_request trace_headers
                """,
                exact=True,
                properties="num_output_tokens num_tokens",
            ),
            Class(
                "RequestStatus",
                members="WAITING WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR WAITING_FOR_STREAMING_REQ RUNNING PREEMPTED",
            ),
        ),
    ),
    Module(
        "vllm.lora.request",
        classes=(
            Class(
                "LoRARequest",
                fields="base_model_name is_3d_lora_weight load_inplace lora_int_id lora_name lora_path",
                exact=True,
            ),
        ),
    ),
    Module(
        "vllm.lora.lora_model",
        classes=(
            Class(
                "LoRAModel",
                fields="id is_3d_lora_weight loras modules_to_save rank",
                exact=True,
            ),
        ),
    ),
    Module(
        "vllm.envs",
        names=("VLLM_ALLOW_INSECURE_SERIALIZATION",),
    ),
    Module(
        "vllm.pooling_params",
        classes=(
            Class(
                "PoolingParams",
                fields="""
                    dimensions extra_kwargs late_interaction_params output_kind requires_token_ids returned_token_ids
                    skip_reading_prefix_cache step_tag_id task use_activation
                """,
                exact=True,
            ),
        ),
    ),
    Module(
        "vllm.multimodal.cache",
        names=("ShmObjectStoreSenderCache",),
    ),
    Module(
        "vllm.multimodal.inputs",
        classes=(
            Class(
                "MultiModalFeatureSpec",
                fields="data identifier mm_hash mm_position modality",
                exact=True,
            ),
        ),
    ),
    Module(
        "vllm.v1.serial_utils",
        classes=(
            Class(
                "MsgpackEncoder",
                calls={
                    "__init__": "self, size_threshold=None, oob_tensor_consumer=None",
                    "encode": "self, obj",
                },
            ),
            Class(
                "MsgpackDecoder",
                calls={
                    "decode": "self, bufs",
                },
            ),
        ),
    ),
    Module(
        "vllm.distributed.kv_events",
        names=("AllBlocksCleared",),
    ),
    Module(
        "vllm.v1.structured_output",
        classes=(
            Class(
                "StructuredOutputManager",
                calls={
                    "grammar_init": "self, request",
                    "accept_tokens": "self, request, new_token_ids",
                },
            ),
        ),
    ),
    Module(
        "vllm.v1.structured_output.request",
        classes=(
            Class(
                "StructuredOutputRequest",
                fields="_grammar params reasoner reasoning_ended reasoning_parser_kwargs",
                exact=True,
                properties="grammar is_grammar_ready",
            ),
        ),
    ),
    Module(
        "vllm.sampling_params",
        classes=(
            Class(
                "RepetitionDetectionParams",
                fields="max_pattern_size min_count min_pattern_size",
                exact=True,
            ),
            Class(
                "StructuredOutputsParams",
                fields="""
                    _backend _backend_was_auto choice disable_additional_properties disable_any_whitespace
                    grammar json json_object regex structural_tag whitespace_pattern
                """,
                exact=True,
            ),
            Class(
                "SamplingParams",
                fields="""
                    _all_stop_token_ids _bad_words_token_ids _eos_token_id _watermarking_skipped
                    allowed_token_ids bad_words detokenize extra_args flat_logprobs
                    frequency_penalty ignore_eos include_stop_str_in_output logit_bias
                    logprob_token_ids logprobs max_tokens min_p min_tokens n output_kind
                    output_text_buffer_length presence_penalty prompt_logprob_start
                    prompt_logprob_token_ids prompt_logprobs repetition_detection
                    repetition_penalty routed_experts_prompt_start seed skip_clone
                    skip_reading_prefix_cache skip_special_tokens spaces_between_special_tokens
                    stop stop_token_ids stream_interval structured_outputs temperature
                    thinking_token_budget top_k top_p trace_decode_token_ids watermarking
                """,
                exact=True,
                properties="sampling_type",
            ),
            Class(
                "SamplingType",
                members="RANDOM_SEED",
            ),
            Class(
                "RequestOutputKind",
            ),
        ),
    ),
    Module(
        "vllm.outputs",
        classes=(
            Class("WeightVersionSpan", fields="end start version", exact=True),
            Class("SamplingMask", fields="token_ids", exact=True),
            Class(
                "CompletionOutput",
                fields="""
                    cumulative_logprob finish_reason index logprobs lora_request routed_experts
                    sampling_mask spec_decode_metrics stop_reason text token_ids weight_versions
                """,
                exact=True,
            ),
            Class(
                "RequestOutput",
                fields="finished outputs",
            ),
        ),
    ),
    Module(
        "vllm.logprobs",
        classes=(
            Class(
                "Logprob",
                fields="decoded_token logprob rank",
                exact=True,
            ),
            Class(
                "FlatLogprobs",
                fields="decoded_tokens end_indices logprobs ranks start_indices token_ids",
                exact=True,
            ),
        ),
    ),
    Module(
        "vllm.v1.outputs",
        classes=(
            Class(
                "SamplingMaskLists",
                calls={"to_nested_list": "self"},
                fields="cu_num_generated_tokens offsets token_ids",
                exact=True,
            ),
            Class(
                "LogprobsTensors",
                fields="""
                    cu_num_generated_tokens cu_num_generated_tokens_tensor logprob_token_ids
                    logprobs selected_token_ranks
                """,
                exact=True,
            ),
        ),
    ),
    Module(
        "vllm.v1.core.sched.interface",
        classes=(
            Class(
                "PauseState",
                members="UNPAUSED PAUSED_NEW PAUSED_ALL",
            ),
        ),
    ),
    Module(
        "vllm.v1.core.sched.request_queue",
        classes=(
            Class(
                "RequestQueue",
                calls={
                    "add_request": "self, request",
                    "prepend_request": "self, request",
                    "remove_requests": "self, requests",
                },
            ),
        ),
    ),
    Module(
        "vllm.v1.core.sched.scheduler",
        classes=(
            Class(
                "Scheduler",
                calls={
                    "schedule": "self, throttle_prefills=False",
                    "has_requests": "self",
                    "finish_requests": "self, request_ids, finished_status",
                    "set_pause_state": "self, pause_state",
                    "reset_encoder_cache": "self",
                    "_preempt_request": "self, request, timestamp, drop_stale_output=False",
                    "_handle_blocked_waiting_request": "self, request",
                    "_update_request_as_session": "self, session, update",
                    "get_num_unfinished_requests": "self",
                    "has_finished_requests": "self",
                },
                fields="""
                    _inflight_prefills _kv_fetch_counts _kv_fetch_stages _pause_state
                    _spec_decode_step_blocks adaptive_long_prefill_threshold
                    aux_output_connector block_size cache_config connector
                    connector_prefix_cache_stats current_step dcp_world_size defer_block_free
                    deferred_frees deferred_waiting dynamic_sd_lookup ec_connector
                    enable_kv_cache_events encoder_cache_manager encoder_cache_mismatch_reqs
                    failed_recving_kv_req_ids finished_recving_kv_req_ids finished_req_ids
                    finished_req_ids_dict grammar_compile_error_reqs has_mamba_layers
                    hash_block_size is_encoder_decoder is_mm_encoder_only kv_cache_config
                    kv_cache_manager kv_event_publisher kv_events_config kv_holding_waiting
                    kv_metrics_collector log_stats lora_config
                    mamba_has_prefill_checkpoint_blocks mamba_partial_cache_hit
                    mamba_prefill_checkpoint_alignment mamba_shared_prefix_checkpoint
                    max_model_len max_num_active_reqs max_num_encoder_input_tokens
                    max_num_running_reqs max_num_scheduled_tokens model_uses_mrope
                    need_mamba_block_aligned_split needs_kv_cache_zeroing num_lookahead_tokens
                    num_prefill_lookahead num_sampled_tokens_per_step num_spec_tokens
                    num_waiting_for_streaming_input observability_config parallel_config
                    pcp_world_size perf_metrics policy prefill_capacity_bound
                    prefix_replay_group_ids prefix_replay_tokens prev_step_scheduled_req_ids
                    processed_step_seq recompute_kv_load_failures requests requires_kv_delivery
                    reset_preempted_req_ids return_sampling_mask running sched_step_seq
                    scheduler_config scheduler_reserve_full_isl spec_decode_metrics_level
                    structured_output_manager use_eagle use_eagle_block_drop use_pp
                    use_v2_model_runner vllm_config waiting
                """,
                exact=True,
                properties="pause_state",
            ),
        ),
    ),
    Module(
        "vllm.v1.core.sched.async_scheduler",
        classes=(
            Class(
                "AsyncScheduler",
                fields="""
                    _inflight_prefills _kv_fetch_counts _kv_fetch_stages _pause_state
                    _spec_decode_step_blocks _spec_token_placeholders
                    adaptive_long_prefill_threshold aux_output_connector block_size cache_config
                    connector connector_prefix_cache_stats current_step dcp_world_size
                    decode_stagger defer_block_free deferred_frees deferred_waiting
                    dynamic_sd_lookup ec_connector enable_kv_cache_events encoder_cache_manager
                    encoder_cache_mismatch_reqs failed_recving_kv_req_ids
                    finished_recving_kv_req_ids finished_req_ids finished_req_ids_dict
                    grammar_compile_error_reqs has_mamba_layers hash_block_size
                    is_encoder_decoder is_mm_encoder_only kv_cache_config kv_cache_manager
                    kv_event_publisher kv_events_config kv_holding_waiting kv_metrics_collector
                    log_stats lora_config mamba_has_prefill_checkpoint_blocks
                    mamba_partial_cache_hit mamba_prefill_checkpoint_alignment
                    mamba_shared_prefix_checkpoint max_model_len max_num_active_reqs
                    max_num_encoder_input_tokens max_num_running_reqs max_num_scheduled_tokens
                    model_uses_mrope need_mamba_block_aligned_split needs_kv_cache_zeroing
                    num_lookahead_tokens num_prefill_lookahead num_sampled_tokens_per_step
                    num_spec_tokens num_waiting_for_streaming_input observability_config
                    parallel_config pcp_world_size perf_metrics policy pp_size
                    prefill_capacity_bound prefix_replay_group_ids prefix_replay_tokens
                    prev_step_scheduled_req_ids processed_step_seq recompute_kv_load_failures
                    requests requires_kv_delivery reset_preempted_req_ids return_sampling_mask
                    running sched_step_seq scheduler_config scheduler_reserve_full_isl
                    spec_decode_metrics_level structured_output_manager use_eagle
                    use_eagle_block_drop use_pp use_v2_model_runner vllm_config waiting
                """,
                exact=True,
            ),
        ),
    ),
    Module(
        "vllm.v1.core.sched.output",
        classes=(
            Class(
                "SchedulerOutput",
                fields="finished_req_ids num_scheduled_tokens preempted_req_ids total_num_scheduled_tokens",
            ),
        ),
    ),
    Module(
        "vllm.v1.core.kv_cache_manager",
        classes=(
            Class(
                "KVCacheManager",
                fields="""
                    block_pool coordinator empty_kv_cache_blocks enable_caching
                    enable_kv_cache_events kv_cache_config kv_cache_event_metadata log_stats
                    mamba_shared_prefix_checkpoint max_model_len metrics_collector
                    num_kv_cache_groups prefix_cache_stats retained_hit_group_ids use_eagle
                    watermark_blocks
                """,
                exact=True,
            ),
        ),
    ),
    Module(
        "vllm.v1.core.kv_cache_coordinator",
        classes=(
            Class(
                "KVCacheCoordinator",
                fields="""
                    block_pool eagle_group_ids group_block_sizes kv_cache_config
                    num_reprefillable_tokens retention_interval scheduler_block_size
                    single_type_managers
                """,
                exact=True,
            ),
        ),
    ),
    Module(
        "vllm.v1.core.single_type_kv_cache_manager",
        classes=(
            Class(
                "FullAttentionManager",
                fields="""
                    _null_block _partial_hit_reqs _pending_boundary_state_offloads
                    _pending_cow_copies _record_new_block_ids block_pool block_size
                    cache_hit_alignment_tokens dcp_world_size enable_caching kv_cache_group_id
                    kv_cache_spec max_admission_blocks_per_request new_block_ids
                    num_cached_block pcp_world_size req_to_blocks scheduler_block_size
                    shared_prefix_checkpoint use_eagle
                """,
                exact=True,
            ),
            Class(
                "SlidingWindowManager",
                fields="""
                    _null_block _partial_hit_reqs _pending_boundary_state_offloads
                    _pending_cow_copies _record_new_block_ids block_pool block_size
                    cache_hit_alignment_tokens dcp_world_size enable_caching extra_retained_tokens
                    kv_cache_group_id kv_cache_spec max_admission_blocks_per_request new_block_ids
                    num_cached_block pcp_world_size req_to_blocks scheduler_block_size
                    shared_prefix_checkpoint sliding_window use_eagle
                """,
                exact=True,
            ),
            Class(
                "ChunkedLocalAttentionManager",
                fields="""
                    _null_block _partial_hit_reqs _pending_boundary_state_offloads
                    _pending_cow_copies _record_new_block_ids attention_chunk_size block_pool
                    block_size cache_hit_alignment_tokens dcp_world_size enable_caching
                    kv_cache_group_id kv_cache_spec max_admission_blocks_per_request new_block_ids
                    num_cached_block pcp_world_size req_to_blocks scheduler_block_size
                    shared_prefix_checkpoint use_eagle
                """,
                exact=True,
            ),
            Class(
                "MambaManager",
                fields="""
                    _allocated_block_reqs _checkpoints _null_block _num_retired_blocks
                    _partial_hit_reqs _pending_boundary_state_offloads _pending_cow_copies
                    _producer_partial_tail_reqs _record_new_block_ids block_pool block_size
                    cache_hit_alignment_tokens cached_blocks_this_step dcp_world_size
                    drop_eagle_checkpoint_block enable_caching has_prefill_checkpoint_blocks
                    kv_cache_group_id kv_cache_spec last_state_block_idx mamba_cache_mode
                    max_admission_blocks_per_request new_block_ids num_cached_block
                    num_speculative_blocks pcp_world_size req_to_blocks scheduler_block_size
                    shared_prefix_checkpoint use_eagle
                """,
                exact=True,
            ),
        ),
    ),
    Module(
        "vllm.v1.core.block_pool",
        classes=(
            Class(
                "BlockPool",
                calls={
                    "free_blocks": "self, ordered_blocks",
                    "get_num_free_blocks": "self",
                    "_maybe_evict_cached_block": "self, block",
                    "emit_cached_block_events": "self, request, num_cached_blocks, block_size, kv_cache_group_id",
                },
                fields="""
                    _reuse_watchers blocks cached_block_hash_to_block
                    cached_block_hashes_by_block enable_caching enable_kv_cache_events
                    free_block_queue hash_block_size kv_event_queue medium metrics_collector
                    null_block num_gpu_blocks
                """,
                exact=True,
            ),
            Class(
                "BlockHashToBlockMap",
                fields="_cache",
                exact=True,
            ),
        ),
    ),
    Module(
        "vllm.transformers_utils.repo_utils",
        functions={"try_get_local_file": "model, file_name, revision='main'"},
    ),
    Module(
        "vllm.v1.core.kv_cache_utils",
        functions={
            "get_none_hash_seed": "",
        },
        classes=(
            Class(
                "FreeKVCacheBlockQueue",
                calls={
                    "append_n": "self, blocks",
                    "remove": "self, block",
                },
                fields="fake_free_list_head fake_free_list_tail num_free_blocks",
                exact=True,
            ),
            Class(
                "KVCacheBlock",
                fields="""
                    _block_hash _block_hash_num_tokens block_id is_null next_free_block pool
                    prev_free_block ref_cnt
                """,
                exact=True,
            ),
        ),
    ),
    Module(
        "vllm.v1.kv_cache_interface",
        classes=(
            Class(
                "KVCacheConfig",
                fields="num_blocks kv_cache_tensors kv_cache_groups kv_cache_layout prefix_cache_retention_interval",
            ),
            Class(
                "KVCacheTensor",
                fields="block_stride host_resident layer_stride layers offset size",
                exact=True,
            ),
            Class(
                "KVCacheGroupSpec",
                fields="layer_names kv_cache_spec",
            ),
            Class(
                "KVCacheSpec",
                fields="block_size",
                properties="page_size_bytes",
            ),
            Class(
                "UniformTypeKVCacheSpecs",
                fields="kv_cache_specs",
                properties="page_size_bytes",
            ),
        ),
    ),
    Module(
        "vllm.v1.kv_cache_layout",
        classes=(
            Class(
                "KVCacheLayout",
                properties="is_block_compact",
                members="BHLNC",
            ),
        ),
    ),
    Module(
        "vllm.config",
        classes=(
            Class(
                "VllmConfig",
                calls={"_post_init_kv_transfer_config": "self"},
                fields="""
                    additional_config model_config cache_config parallel_config scheduler_config
                    compilation_config lora_config speculative_config kv_transfer_config
                    ec_transfer_config kv_events_config observability_config structured_outputs_config
                    reasoning_config
                """,
            ),
            Class(
                "StructuredOutputsConfig",
                fields="""
                    reasoning_parser enable_in_reasoning disable_any_whitespace disable_additional_properties
                """,
            ),
            Class(
                "ReasoningConfig",
                properties="""
                    enabled reasoning_start_token_ids reasoning_end_token_ids natural_reasoning_end_token_ids
                """,
            ),
            Class("ObservabilityConfig", fields="otlp_traces_endpoint"),
            Class(
                "KVTransferConfig",
                fields="""
                    kv_connector kv_connector_module_path kv_role kv_load_failure_policy kv_connector_extra_config
                """,
            ),
            Class(
                "ModelConfig",
                fields="""
                    hf_config dtype quantization max_model_len runner_type convert_type logprobs_mode use_fp64_gumbel
                    enable_sleep_mode enable_cumem_allocator sleep_mode_backend sleep_preserve_parameter_names
                """,
                properties="is_multimodal_model is_encoder_decoder",
            ),
            Class(
                "SpeculativeConfig",
                fields="""
                    method num_speculative_tokens num_speculative_tokens_per_batch_size
                    draft_sample_method draft_model_config prompt_lookup_min prompt_lookup_max
                    rejection_sample_method synthetic_acceptance_length synthetic_acceptance_rates
                """,
            ),
            Class(
                "LoRAConfig",
                fields="max_loras max_lora_rank lora_dtype",
            ),
            Class(
                "CacheConfig",
                fields="""
                    cache_dtype enable_prefix_caching prefix_caching_hash_algo mamba_cache_mode
                    mamba_cache_dtype mamba_ssm_cache_dtype use_replayssm
                """,
            ),
            Class(
                "ParallelConfig",
                fields="""
                    tensor_parallel_size pipeline_parallel_size data_parallel_size
                    decode_context_parallel_size prefill_context_parallel_size enable_eplb
                    data_parallel_index distributed_executor_backend
                """,
            ),
            Class(
                "SchedulerConfig",
                fields="""
                    policy max_num_seqs max_num_batched_tokens enable_chunked_prefill async_scheduling scheduler_cls
                """,
            ),
            Class(
                "CompilationConfig",
                fields="mode",
            ),
            Class(
                "KVEventsConfig",
                fields="enable_kv_cache_events",
            ),
        ),
    ),
    *_SLEEP_MODE,
)

_WORKER = Module(
    "vllm.v1.worker.gpu_worker",
    classes=(
        Class(
            "Worker",
            calls={
                "_maybe_get_memory_pool_context": "self, tag",
                "add_lora": "self, lora_request",
                "compile_or_warm_up_model": "self",
                "finish_weight_update": "self",
                "pin_lora": "self, lora_id",
                "reload_weights": "self, *args, **kwargs",
                "shutdown": "self",
                "start_draft_weight_update": "self",
                "start_weight_update": "self",
                "synchronize_device": "self",
                "update_weights": "self, update_info",
            },
            fields="vllm_config rank device model_runner use_v2_model_runner _pp_send_work _weight_update_is_draft",
        ),
    ),
)

# LoRA adapters and queries of scores, in workers of every device.
_ADAPTERS = (
    Module(
        "vllm.lora.worker_manager",
        classes=(
            Class(
                "WorkerLoRAManager",
                calls={
                    "_load_adapter": "self, lora_request",
                },
                fields="_adapter_manager",
            ),
        ),
    ),
    Module(
        "vllm.v1.pool.late_interaction_runner",
        classes=(
            Class(
                "LateInteractionRunner",
                calls={"clear": "self"},
                fields="_doc_query_keys _flash_enabled _query_cache _query_uses",
                exact=True,
            ),
        ),
    ),
    Module(
        "vllm.lora.model_manager",
        classes=(
            Class(
                "LoRAModelManager",
                calls={
                    "activate_adapter": "self, lora_id",
                    "deactivate_adapter": "self, adapter_id",
                    "list_adapters": "self",
                },
                fields="lora_index_to_id",
                properties="lora_slots capacity",
            ),
            Class(
                "LRUCacheLoRAModelManager",
                calls={
                    "add_adapter": "self, lora",
                    "remove_oldest_adapter": "self",
                },
            ),
        ),
    ),
    Module(
        "vllm.v1.worker.lora_model_runner_mixin",
        classes=(
            Class(
                "LoRAModelRunnerMixin",
                calls={
                    "add_lora": "self, lora_request",
                    "remove_lora": "self, lora_id",
                    "list_loras": "self",
                },
                fields="lora_manager",
            ),
        ),
    ),
)

# A loader of weights of torpor's own, in workers of every device.
_LOADER = (
    Module("vllm.config", names=("replace",)),
    Module(
        "vllm.distributed.parallel_state",
        functions={"get_pp_group": "", "get_tp_group": ""},
        classes=(Class("GroupCoordinator", calls={"broadcast_object": "self, obj=None, src=0"}),),
    ),
    Module(
        "vllm.model_executor.model_loader",
        functions={"get_model_loader": "load_config", "register_model_loader": "load_format"},
    ),
    Module(
        "vllm.model_executor.model_loader.base_loader",
        classes=(
            Class(
                "BaseModelLoader",
                calls={
                    "download_model": "self, model_config",
                    "load_weights": "self, model, model_config",
                    "load_model": "self, vllm_config, model_config, prefix=''",
                },
                fields="load_config",
            ),
        ),
    ),
    Module(
        "vllm.model_executor.model_loader.default_loader",
        classes=(Class("DefaultModelLoader", calls={"get_all_weights": "self, model_config, model"}),),
    ),
    Module("vllm.config.load", classes=(Class("LoadConfig", fields="load_format model_loader_extra_config"),)),
)

# Workers on the CPU.
CPU_WORKER = (
    _WORKER,
    *_ADAPTERS,
    *_LOADER,
    Module(
        "vllm.platforms.cpu",
        classes=(
            Class(
                "CpuPlatform",
                calls={
                    "is_sleep_mode_available": "self",
                },
            ),
        ),
    ),
    Module(
        "vllm.v1.worker.cpu_worker",
        classes=(
            Class(
                "CPUWorker",
                calls={
                    "_maybe_get_memory_pool_context": "self, tag",
                    "compile_or_warm_up_model": "self",
                },
                fields="vllm_config rank device model_runner use_v2_model_runner",
            ),
        ),
    ),
    Module(
        "vllm.v1.worker.cpu_model_runner",
        classes=(
            Class(
                "CPUModelRunner",
                calls={
                    "_sample": "self, logits, spec_decode_metadata",
                    "_bookkeeping_sync": (
                        "self, scheduler_output, sampler_output, logits, hidden_states, num_scheduled_tokens"
                    ),
                    "_init_mrope_positions": "self, req_state",
                    "reset_encoder_cache": "self",
                },
                fields="""
                    model requests input_batch num_prompt_logprobs kv_cache_config kv_caches
                    discard_request_mask vllm_config mamba_state_idx uses_mrope sampler
                """,
            ),
        ),
    ),
    Module(
        "vllm.v1.pool.metadata",
        classes=(Class("PoolingStates", calls={"clean": "self"}),),
    ),
    Module(
        "vllm.v1.sample.sampler",
        classes=(Class("Sampler", fields="topk_topp_sampler"),),
    ),
    Module(
        "vllm.v1.sample.thinking_budget_state",
        classes=(Class("ThinkingBudgetStateHolder", fields="_state"),),
    ),
    Module(
        "vllm.v1.sample.ops.topk_topp_sampler",
        classes=(Class("TopKTopPSampler", fields="use_fp64_gumbel"),),
    ),
    Module(
        "vllm.v1.worker.gpu_input_batch",
        classes=(
            Class(
                "InputBatch",
                calls={
                    "add_request": "self, request",
                    "remove_request": "self, req_id",
                    "condense": "self",
                    "refresh_metadata": "self",
                },
                fields="""
                    _req_ids allowed_token_ids_mask allowed_token_ids_mask_cpu_tensor
                    async_copy_ready_event bad_words_token_ids batch_update_builder block_table
                    device frequency_penalties frequency_penalties_cpu
                    frequency_penalties_cpu_tensor frequency_penalties_reqs generators
                    greedy_reqs has_allowed_token_ids is_pooling_model is_token_ids
                    is_token_ids_tensor logits_processing_needs_token_ids logitsprocs
                    logitsprocs_need_output_token_ids logprob_token_ids lora_id_to_lora_request
                    lora_id_to_request_ids max_model_len max_num_batched_tokens max_num_reqs
                    num_accepted_tokens_cpu num_accepted_tokens_cpu_tensor
                    num_computed_tokens_cpu num_computed_tokens_cpu_tensor num_logprobs
                    num_prompt_tokens num_prompt_tokens_cpu_tensor num_tokens_no_spec
                    num_tokens_no_spec_cpu_tensor pooling_params pooling_states
                    presence_penalties presence_penalties_cpu presence_penalties_cpu_tensor
                    presence_penalties_reqs prev_req_id_to_index prev_sampled_token_ids
                    random_reqs repetition_penalties repetition_penalties_cpu
                    repetition_penalties_cpu_tensor repetition_penalties_reqs
                    replayssm_decode_base replayssm_decode_base_cpu_tensor req_id_to_index
                    req_output_token_ids req_prompt_embeds request_lora_mapping
                    sampled_token_ids_cpu sampling_metadata spec_token_ids temperature
                    temperature_cpu temperature_cpu_tensor thinking_budget_state_holder
                    thinking_token_budget_reqs token_ids_cpu token_ids_cpu_tensor top_k
                    top_k_cpu top_k_cpu_tensor top_k_reqs top_p top_p_cpu top_p_cpu_tensor
                    top_p_reqs use_replayssm vocab_size
                """,
                exact=True,
                properties="req_ids num_reqs",
            ),
            Class(
                "CachedRequestState",
                fields="""
                    block_ids generator in_progress_prompt_logprobs_cpu lora_request mm_features
                    mrope_position_delta mrope_positions num_computed_tokens num_prompt_tokens
                    output_token_ids pooling_params pooling_states prev_num_draft_len
                    prompt_embeds prompt_is_token_ids prompt_token_ids req_id sampling_params
                """,
                exact=True,
            ),
        ),
    ),
    Module(
        "vllm.model_executor.layers.utils",
        functions={
            "dispatch_cpu_unquantized_gemm": "layer, remove_weight",
        },
    ),
)

# Model runner V2, on any device: looked at when a worker has it.
V2_RUNNER = (
    Module(
        "vllm.v1.worker.gpu.pp_utils",
        classes=(
            Class(
                "PPHandler",
                fields="""
                    aux_hidden_state_relay_keys broadcast_group broadcast_stream device is_last_rank
                    last_rank main_stream max_sample_len num_speculative_steps queue req_idx_gen_np
                """,
                exact=True,
            ),
        ),
    ),
    Module(
        "vllm.v1.worker.gpu.model_runner",
        classes=(
            Class(
                "GPUModelRunner",
                calls={
                    "add_requests": "self, scheduler_output",
                    "_remove_request": "self, req_id",
                    "update_pp_decode_requests": "self",
                    "reset_encoder_cache": "self",
                },
                fields="""
                    _draft_workspace_lane adaptive_verification attn_groups aux_output_connector
                    batch_sharder block_tables cache_config check_ep_fault compilation_config
                    cp_interleave cudagraph_manager dcp_rank dcp_size decode_query_len device
                    draft_tokens_handler dtype ec_connector encoder_cache eplb
                    execute_model_state fast_prefill input_buffers intermediate_tensors
                    is_encoder_decoder is_first_pp_rank is_last_pp_rank is_pooling_model
                    jit_warmup_registry kernel_block_sizes kv_block_zeroer kv_cache_config
                    kv_cache_dtype kv_caches kv_connector load_config lora_capture_cases
                    lora_config lora_manager lora_state max_model_len max_num_reqs
                    max_num_tokens mm_registry model model_config model_memory_usage model_state
                    num_speculative_steps observability_config output_copy_stream
                    parallel_config pcp_manager pooling_runner pp_handler prompt_logprobs_worker
                    rejection_sampler req_states sampler scheduler_config speculative_config
                    speculator step_timing structured_outputs_worker supports_mm_inputs
                    ubatch_runner use_aux_hidden_state_outputs use_dcp use_pp uses_inputs_embeds
                    vllm_config vocab_size
                """,
                exact=True,
            ),
        ),
    ),
    Module(
        "vllm.v1.worker.gpu.states",
        classes=(
            Class(
                "RequestState",
                calls={
                    "apply_staged_writes": "self",
                },
                fields="""
                    all_token_ids device draft_tokens free_indices index_to_req_id
                    last_sampled_tokens max_model_len max_num_batched_tokens max_num_reqs
                    max_seq_len next_prefill_tokens num_computed_prefill_tokens
                    num_computed_tokens num_computed_tokens_np num_speculative_steps prefill_len
                    prompt_len req_id_to_index total_len vocab_size
                """,
                exact=True,
            ),
        ),
    ),
    Module(
        "vllm.v1.worker.gpu.block_table",
        classes=(
            Class(
                "BlockTables",
                calls={
                    "apply_staged_writes": "self",
                },
                fields="""
                    _slot_mapping_enabled block_sizes block_sizes_tensor block_table_ptrs
                    block_table_strides block_tables cp_interleave cp_rank cp_size dcp_sharded
                    device fused_writer input_block_table_ptrs input_block_tables
                    max_num_batched_tokens max_num_reqs num_blocks num_kv_cache_groups
                    slot_mapping_enabled slot_mappings
                """,
                exact=True,
            ),
        ),
    ),
    Module(
        "vllm.v1.worker.gpu.buffer_utils",
        classes=(
            Class(
                "StagedWriteTensor",
                fields="""
                    _staged_write_contents _staged_write_cu_lens _staged_write_indices
                    _staged_write_starts _uva_buf device dtype gpu max_concurrency num_rows
                    write_contents write_cu_lens write_indices write_starts
                """,
                exact=True,
            ),
            Class(
                "UvaBackedTensor",
                fields="""
                    cpu dtype gpu np pool
                """,
                exact=True,
            ),
        ),
    ),
    Module(
        "vllm.v1.worker.gpu.sample.sampler",
        classes=(
            Class(
                "Sampler",
                calls={
                    "apply_staged_writes": "self",
                },
                fields="""
                    compute_nans logits_processors logprob_token_ids_state logprobs_mode
                    needs_logits_processing num_speculative_tokens penalties_state req_states
                    return_sampling_mask sampling_states thinking_budget_state
                    trace_replay_state use_flashinfer use_fp64_gumbel use_xpu_sampler
                """,
                exact=True,
            ),
        ),
    ),
    Module(
        "vllm.v1.worker.gpu.sample.states",
        classes=(
            Class(
                "SamplingStates",
                fields="""
                    max_num_reqs min_p num_logprobs seeds seeds_set temperature top_k top_p
                    vocab_size
                """,
                exact=True,
            ),
        ),
    ),
    Module(
        "vllm.v1.worker.gpu.sample.penalties",
        classes=(
            Class(
                "PenaltiesState",
                fields="""
                    _new_penalties_reqs device frequency_penalty output_bin_counts
                    presence_penalty prompt_bin_mask repetition_penalty req_states use_penalty
                """,
                exact=True,
            ),
        ),
    ),
    Module(
        "vllm.v1.worker.gpu.sample.logit_bias",
        classes=(
            Class(
                "LogitBiasState",
                fields="""
                    allowed_token_ids logit_bias logit_bias_token_ids min_lens
                    num_allowed_token_ids num_logit_bias num_stop_token_ids prompt_len_np
                    restore_when_all_masked stop_token_ids use_logit_bias
                """,
                exact=True,
            ),
        ),
    ),
    Module(
        "vllm.v1.worker.gpu.sample.bad_words",
        classes=(
            Class(
                "BadWordsState",
                fields="""
                    bad_word_offsets bad_word_token_ids num_bad_words req_states
                """,
                exact=True,
            ),
        ),
    ),
    Module(
        "vllm.v1.worker.gpu.sample.logprob",
        classes=(
            Class(
                "LogprobTokenIdsState",
                fields="""
                    max_num_reqs num_token_ids token_ids
                """,
                exact=True,
            ),
        ),
    ),
    Module(
        "vllm.v1.worker.gpu.sample.prompt_logprob",
        classes=(
            Class(
                "PromptLogprobsWorker",
                fields="""
                    device in_progress_prompt_logprobs logprobs_mode max_num_reqs
                    num_prompt_logprobs token_id_scores uses_prompt_logprobs
                """,
                exact=True,
            ),
        ),
    ),
    Module(
        "vllm.v1.worker.gpu.model_states.default",
        classes=(
            Class(
                "DefaultModelState",
                fields="""
                    device dtype encoder_cache encoder_runner inputs_embeds inputs_embeds_size
                    max_num_reqs max_num_tokens mm_pruner model model_config prompt_embeds_state
                    rope_state scheduler_config supports_mm_inputs vllm_config
                """,
                exact=True,
            ),
        ),
    ),
    Module(
        "vllm.v1.worker.gpu.model_states.mamba_hybrid",
        classes=(
            Class(
                "MambaHybridModelState",
                fields="""
                    _align_mode _mamba_ctx _mamba_group_ids _mamba_spec _mamba_src_col_gpu
                    _mamba_src_off_gpu _mamba_state_copy_funcs _mamba_state_idx_gpu cache_config
                    device dtype encoder_cache encoder_runner inputs_embeds inputs_embeds_size
                    max_num_reqs max_num_tokens mm_pruner model model_config
                    num_accepted_tokens_gpu prompt_embeds_state recoverssm rope_state
                    scheduler_config supports_mm_inputs vllm_config
                """,
                exact=True,
            ),
        ),
    ),
    Module(
        "vllm.v1.core.sched.output",
        classes=(
            Class(
                "SchedulerOutput",
                calls={
                    "make_empty": "cls",
                },
                fields="""
                    scheduled_new_reqs
                """,
            ),
            Class(
                "NewRequestData",
                fields="""
                    block_ids lora_request mm_features num_computed_tokens pooling_params
                    prefill_token_ids prompt_embeds prompt_is_token_ids prompt_token_ids
                    replay_start req_id sampling_params
                """,
                exact=True,
            ),
        ),
    ),
)

# Workers on a GPU.
CUDA_WORKER = (
    _WORKER,
    *_ADAPTERS,
    *_LOADER,
    Module(
        "vllm.third_party",
        names=("pynvml",),
    ),
    Module(
        "vllm.compilation.cudagraph_pool",
        functions={
            "capture_pool": "pool, vllm_config",
            "get_mem_allocator_instance": "",
        },
    ),
    Module(
        "vllm.config",
        classes=(
            Class(
                "VllmConfig",
                fields="model_config compilation_config",
                properties="use_cumem_cudagraph_pool",
            ),
            Class(
                "ModelConfig",
                fields="enable_sleep_mode sleep_mode_backend sleep_mode_offload_cudagraph",
            ),
        ),
    ),
)

# vLLM's OpenAI-compatible server.
SERVER = (
    Module(
        "vllm.entrypoints.openai.models.serving",
        classes=(
            Class(
                "OpenAIServingModels",
                fields="base_model_paths lora_id_counter",
            ),
        ),
    ),
    Module(
        "vllm.utils.counter",
        classes=(
            Class(
                "AtomicCounter",
                calls={
                    "inc": "self, num=1",
                },
                properties="value",
            ),
        ),
    ),
    Module(
        "vllm.envs",
        names=(
            "VLLM_API_KEY",
            "VLLM_SERVER_DEV_MODE",
        ),
    ),
    Module(
        "vllm.exceptions",
        classes=(
            Class(
                "GracefulHTTPError",
                calls={
                    "__init__": "self, message, http_status",
                },
            ),
        ),
    ),
    Module(
        "vllm.logger",
        functions={
            "init_logger": "name",
            "configure_logging_from_args": "args",
        },
    ),
    Module(
        "vllm.v1.engine.exceptions",
        names=("EngineDeadError",),
    ),
    Module(
        "vllm.config",
        classes=(Class("VllmConfig", fields="shutdown_timeout"),),
    ),
    Module(
        "vllm.entrypoints.serve.dev.sleep.metrics",
        functions={
            "sleep_mode_operation_metrics": "",
        },
    ),
    Module(
        "vllm.entrypoints.launchers.api_server.entry",
        functions={
            "run_server": "args, **uvicorn_kwargs",
        },
    ),
    Module(
        "vllm.entrypoints.launchers.cli_args",
        functions={
            "make_arg_parser": "parser",
            "validate_parsed_serve_args": "args",
        },
    ),
    Module(
        "vllm.entrypoints.serve.utils.api_utils",
        functions={
            "cli_env_setup": "",
        },
    ),
    Module(
        "vllm.utils.argparse_utils",
        names=("FlexibleArgumentParser",),
    ),
)

# What torpor's KV connector uses, where it is switched on.
CONNECTOR = (
    Module(
        "vllm.distributed.kv_transfer.kv_connector.v1.base",
        names=("KVConnectorRole", "SupportsHMA", "KVConnectorMetadata", "KVConnectorWorkerMetadata"),
        classes=(
            Class(
                "KVConnectorBase_V1",
                calls={
                    "bind_connector_metadata": "self, connector_metadata",
                    "has_connector_metadata": "self",
                    "start_load_kv": "self, forward_context, **kwargs",
                    "get_transfer_results": "self, finished_req_ids",
                    "get_block_ids_with_load_errors": "self",
                    "get_handshake_metadata": "self",
                    "build_connector_worker_meta": "self",
                    "bind_kv_cache_manager": "self, kv_cache_manager",
                    "set_xfer_handshake_metadata_pp_aware": "self, metadata",
                    "get_num_new_matched_tokens": "self, request, num_computed_tokens",
                    "get_external_cache_hit_sources": "self, request, num_external_tokens",
                    "on_new_request": "self, request",
                    "update_state_after_alloc": "self, request, blocks, num_external_tokens",
                    "build_connector_meta": "self, scheduler_output",
                    "update_connector_output": "self, connector_output",
                    "request_finished": "self, request, block_ids",
                    "has_pending_block_frees": "self",
                    "has_pending_push_work": "self",
                    "take_events": "self",
                    "get_kv_connector_stats": "self",
                    "reset_cache": "self",
                    "shutdown": "self",
                },
            ),
            Class("KVConnectorTransferResults", fields="finished_sending finished_recving failed_recving", exact=True),
            Class("KVConnectorHandshakeMetadata"),
        ),
    ),
    Module(
        "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
        classes=(
            Class("KVConnectorStats", fields="data"),
            Class(
                "KVConnectorPromMetrics",
                fields="per_engine_labelvalues _counter_cls _gauge_cls",
            ),
        ),
    ),
    Module("vllm.distributed.kv_transfer", functions={"get_kv_transfer_group": ""}),
    Module("vllm.v1.metrics.cache_hit_source", classes=(Class("CacheHitSource", members="HOST DISK"),)),
    Module(
        "vllm.distributed.kv_events",
        classes=(
            Class(
                "BlockStored",
                fields="block_hashes parent_block_hash token_ids block_size lora_id medium lora_name group_idx",
            ),
            Class("BlockRemoved", fields="block_hashes medium group_idx"),
        ),
    ),
    Module(
        "vllm.v1.core.block_pool",
        classes=(
            Class(
                "BlockPool",
                calls={
                    "touch": "self, blocks",
                    "free_blocks": "self, ordered_blocks",
                    "evict_blocks": "self, block_ids",
                    "get_new_blocks": "self, num_blocks",
                    "get_num_free_blocks": "self",
                    "_insert_block_hash": "self, block_hash_with_group_id, block, num_tokens",
                },
                fields="blocks cached_block_hash_to_block",
            ),
        ),
    ),
    Module("vllm.v1.core.kv_cache_utils", functions={"maybe_convert_block_hash": "hash_bytes"}),
    Module(
        "vllm.v1.core.kv_cache_manager",
        classes=(
            Class(
                "KVCacheManager",
                calls={
                    "reset_prefix_cache": "self",
                    "evict_blocks": "self, block_ids",
                    "take_boundary_state_offloads": "self",
                },
            ),
        ),
    ),
    Module(
        "vllm.v1.kv_cache_interface",
        names=("FullAttentionSpec",),
        classes=(
            Class("SlidingWindowSpec", fields="sliding_window extra_retained_tokens"),
            Class("ChunkedLocalAttentionSpec", fields="attention_chunk_size"),
            Class("MambaSpec", fields="mamba_cache_mode mamba_type"),
        ),
    ),
    Module(
        "vllm.v1.core.sched.scheduler",
        classes=(
            Class(
                "Scheduler",
                calls={
                    "update_from_output": "self, scheduler_output, model_runner_output",
                    "_handle_blocked_waiting_request": "self, request",
                    "_preempt_request": "self, request, timestamp, drop_stale_output=False",
                },
                fields="prev_step_scheduled_req_ids running",
            ),
        ),
    ),
    Module(
        "vllm.v1.core.sched.output",
        classes=(
            Class("SchedulerOutput", calls={"make_empty": "cls"}, fields="has_sync_kv_loads kv_connector_block_state"),
            Class("KVConnectorBlockState", fields="boundary_state_offloads"),
        ),
    ),
    Module(
        "vllm.v1.outputs",
        classes=(
            Class("ModelRunnerOutput", calls={"with_kv_conn_output_only": "kv_connector_output"}),
            Class(
                "KVConnectorOutput",
                fields="failed_recving finished_recving invalid_block_ids kv_connector_worker_meta",
            ),
        ),
    ),
)

# What a sleep beside a KV connector that is not torpor's uses. The hooks of the connector are there since vLLM 0.33.
OTHER_CONNECTORS = (
    Module(
        "vllm.distributed.kv_transfer.kv_connector.factory",
        classes=(Class("KVConnectorFactory", calls={"get_connector_class": "cls, kv_transfer_config"}),),
    ),
    Module(
        "vllm.distributed.kv_transfer.kv_connector.v1.base",
        classes=(
            Class("KVConnectorBase_V1", calls={"has_pending_block_frees": "self", "has_pending_push_work": "self"}),
        ),
    ),
    Module(
        "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector",
        classes=(Class("MultiConnector", properties="sub_connectors"),),
    ),
    Module("vllm.distributed.kv_transfer", functions={"get_kv_transfer_group": ""}),
    Module(
        "vllm.v1.core.sched.scheduler",
        classes=(Class("Scheduler", calls={"_handle_blocked_waiting_request": "self, request"}),),
    ),
)

# For each token of a seeded request: "a number", or "a number a word" of the vocabulary.
# vLLM's own sleeps, with torpor's memory below them on a GPU (memory_worker.py).
MEMORY = (
    *_SLEEP_MODE,
    Module(
        "vllm.v1.worker.gpu_worker",
        classes=(
            Class(
                "Worker",
                calls={"_maybe_get_memory_pool_context": "self, tag", "shutdown": "self"},
                fields="vllm_config",
            ),
        ),
    ),
    Module(
        "vllm.config",
        classes=(Class("ModelConfig", fields="enable_sleep_mode enable_cumem_allocator sleep_mode_backend"),),
    ),
)

# A post-copy wake (deferred_blocks.py) needs these besides: where vLLM gives blocks to requests, and looks prefixes up.
EARLY_WAKE = (
    Module(
        "vllm.v1.core.kv_cache_manager",
        classes=(Class("KVCacheManager", calls={"get_computed_blocks": "self, request"}),),
    ),
    Module(
        "vllm.v1.core.block_pool",
        classes=(Class("BlockPool", calls={"get_new_blocks": "self, num_blocks"}),),
    ),
)

# Requests that leave a live engine and come back (portable.py, sessions.py). That and "engine" are all they need but in
# model runners.
PORTABLE = (
    Module(
        "vllm.distributed.kv_transfer.kv_connector.v1.base",
        names=("KVConnectorRole", "SupportsHMA", "KVConnectorMetadata"),
        classes=(
            Class(
                "KVConnectorBase_V1",
                calls={
                    "bind_connector_metadata": "self, connector_metadata",
                    "has_connector_metadata": "self",
                    "_get_connector_metadata": "self",
                    "register_kv_caches": "self, kv_caches",
                    "handle_preemptions": "self, kv_connector_metadata",
                    "start_load_kv": "self, forward_context, **kwargs",
                    "get_transfer_results": "self, finished_req_ids",
                    "get_num_new_matched_tokens": "self, request, num_computed_tokens",
                    "update_state_after_alloc": "self, request, blocks, num_external_tokens",
                    "build_connector_meta": "self, scheduler_output",
                    "update_connector_output": "self, connector_output",
                    "request_finished": "self, request, block_ids",
                    "has_pending_push_work": "self",
                },
            ),
            Class("KVConnectorTransferResults", fields="finished_sending finished_recving failed_recving", exact=True),
        ),
    ),
    Module(
        "vllm.distributed.kv_transfer.kv_connector.factory",
        classes=(Class("KVConnectorFactory", calls={"register_connector": "cls, name, module_path, class_name"}),),
    ),
    Module(
        "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector",
        classes=(
            Class(
                "MultiConnector",
                calls={"get_num_new_matched_tokens": "self, request, num_computed_tokens"},
                fields="_requests_to_connector",
                properties="sub_connectors",
            ),
        ),
    ),
    Module("vllm.v1.kv_cache_interface", names=("FullAttentionSpec",)),
    Module(
        "vllm.v1.core.kv_cache_manager",
        classes=(
            Class("KVCacheManager", calls={"get_block_ids": "self, request_id"}),
            Class("KVCacheBlocks", calls={"get_block_ids": "self, allow_none=False, *, group_ids=None"}),
        ),
    ),
    Module(
        "vllm.v1.core.sched.scheduler",
        classes=(
            Class(
                "Scheduler",
                calls={
                    "add_request": "self, request",
                    "_handle_blocked_waiting_request": "self, request",
                },
            ),
        ),
    ),
    Module(
        "vllm.v1.request",
        classes=(Class("RequestStatus", members="FINISHED_ABORTED WAITING_FOR_REMOTE_KVS"),),
    ),
)

# Requests that share blocks of another one (forks.py). It comes on top of "portable".
FORK = (
    Module(
        "vllm.v1.core.block_pool",
        classes=(
            Class(
                "BlockPool",
                calls={"get_new_blocks": "self, num_blocks", "touch": "self, blocks", "get_num_free_blocks": "self"},
                fields="enable_caching hash_block_size",
            ),
        ),
    ),
    Module(
        "vllm.v1.core.single_type_kv_cache_manager",
        classes=(
            Class("FullAttentionManager", calls={"free": "self, request_id"}, fields="num_cached_block req_to_blocks"),
        ),
    ),
    Module(
        "vllm.v1.metrics.stats",
        classes=(
            Class(
                "PrefillStats",
                calls={"set": "self, num_prompt_tokens, num_local_cached_tokens, num_external_cached_tokens"},
            ),
        ),
    ),
    Module(
        "vllm.v1.core.sched.scheduler",
        classes=(
            Class("Scheduler", calls={"_enqueue_waiting_request": "self, request", "add_request": "self, request"}),
        ),
    ),
    Module(
        "vllm.v1.engine.detokenizer",
        classes=(Class("BaseIncrementalDetokenizer", calls={"get_next_output_text": "self, finished, delta"}),),
    ),
    Module(
        "vllm.v1.engine.output_processor",
        classes=(Class("RequestOutputCollector", calls={"__init__": "self, output_kind, request_id"}),),
    ),
)

# A secondary tier of vLLM's own OffloadingConnector (offloading_tier.py).
OFFLOADING_TIER = (
    Module(
        "vllm.v1.kv_offload.tiering.base",
        classes=(
            Class(
                "SecondaryTierManager",
                calls={
                    "__init__": "self, offloading_spec, primary_kv_view, tier_type, backpressure_detector=None",
                    "lookup": "self, key, req_context",
                    "submit_store": "self, job_metadata",
                    "submit_load": "self, job_metadata",
                    "get_finished_jobs": "self",
                    "take_events": "self",
                    "on_new_request": "self, req_context",
                    "on_request_finished": "self, req_context",
                    "on_schedule_end": "self, context",
                    "drain_jobs": "self",
                    "shutdown": "self",
                },
            ),
            Class("TransferJob", fields="job_id keys chunk_ids req_context"),
            Class("JobResult", fields="job_id success successful_keys transfer_time transfer_bytes"),
        ),
    ),
    Module(
        "vllm.v1.kv_offload.base",
        classes=(
            Class("LookupResult", members="MISS HIT RETRY"),
            Class("Medium", members="STORAGE"),
            Class("Locality", members="REMOTE"),
            Class("OffloadingEvent", fields="keys medium removed locality"),
            Class("ReqContext", fields="req_id"),
            Class("OffloadingSpec", fields="config blocks_per_chunk kv_events_config"),
        ),
        names=("RequestOffloadingContext",),
    ),
    Module(
        "vllm.v1.kv_offload.file_mapper",
        classes=(
            Class(
                "FileMapper",
                calls={
                    "from_offloading_spec": (
                        "cls, root_dir, offloading_spec, blocks_per_file=1, parallel_agnostic=False"
                    ),
                    "get_run_config": "self",
                },
                fields="rank",
            ),
        ),
    ),
    Module(
        "vllm.v1.kv_offload.config",
        classes=(
            Class("OffloadingConfig", fields="kv_cache_layout parallel"),
            Class("OffloadingParallelConfig", fields="data_parallel_index data_parallel_size"),
        ),
    ),
)

CPU_SAMPLER_DRAWS = "a number"

# What a manifest is looked up by.
PARTS = {
    "engine": ENGINE,
    "cpu": CPU_WORKER,
    "cuda": CUDA_WORKER,
    "v2": V2_RUNNER,
    "memory": MEMORY,
    "early_wake": EARLY_WAKE,
    "server": SERVER,
    "connector": CONNECTOR,
    "other_connectors": OTHER_CONNECTORS,
    "portable": PORTABLE,
    "fork": FORK,
    "offloading_tier": OFFLOADING_TIER,
}
