# SPDX-License-Identifier: Apache-2.0
"""What a server can be asked, by what it takes: for the tests of who may call what, and when."""

CHANGES_THE_ENGINE = [
    "/collective_rpc", "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/pause", "/resume",
    "/abort_requests", "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/start_weight_update",
    "/start_draft_weight_update", "/update_weights", "/finish_weight_update", "/update_weight_version",
    "/weight_checker", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/adapters", "/start_profile",
    "/stop_profile", "/scale_elastic_ep", "/fault_tolerance/apply", "/release_kv_cache_memory",
]  # fmt: skip
BEGINS_A_REQUEST = [
    "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions", "/v1/responses", "/v1/messages",
    "/v1/systemone", "/v1/decisions", "/inference/v1/generate", "/generative_scoring", "/cohere/v2/chat",
    "/invocations", "/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/v1/score", "/rerank",
    "/v1/rerank", "/v2/rerank", "/v1/audio/transcriptions", "/v1/audio/translations",
]  # fmt: skip
NEEDS_NO_ENGINE = [
    ("POST", "/v1/responses/{response_id}/cancel"), ("GET", "/v1/responses/{response_id}"),
    ("POST", "/v1/chat/completions/render"), ("POST", "/v1/completions/render"), ("POST", "/v1/responses/render"),
    ("POST", "/v1/messages/render"), ("POST", "/cohere/v2/chat/render"), ("POST", "/v1/chat/completions/derender"),
    ("POST", "/v1/completions/derender"), ("POST", "/v1/messages/count_tokens"), ("POST", "/tokenize"),
    ("POST", "/detokenize"), ("GET", "/v1/models"), ("GET", "/version"), ("GET", "/load"), ("MOUNT", "/metrics"),
    ("POST", "/inference/v1/abort_requests"),
]  # fmt: skip
EVERYTHING = [
    *(("POST", path) for path in CHANGES_THE_ENGINE + BEGINS_A_REQUEST), *NEEDS_NO_ENGINE,
    ("WEBSOCKET", "/v1/realtime"),
]  # fmt: skip
