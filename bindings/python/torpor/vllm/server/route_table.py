# SPDX-License-Identifier: Apache-2.0
"""Every route of vLLM's server and of torpor's: who may call it, and what becomes of a call while the engine sleeps.

A test compares this table with the routes of the installed vLLM. What is not in it at run time, as a route of another
plugin, is treated by UNKNOWN.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from starlette.routing import compile_path


class Who(Enum):
    """Who may call. Where no key is configured at all, the first three mean anybody."""

    ANYBODY = "as vLLM has it: it asks for a client's key under /v1, /v2, /inference and /cohere"
    CLIENT = "a client's key, or the admin key"
    OPERATOR = "a client's key, or the admin key; with an admin key alone, that"
    ADMIN = "the admin key"


class Asleep(Enum):
    """What becomes of a call while the engine is not awake."""

    SERVED = "it needs no engine, or acts on what is there in any state"
    HELD = "it begins a request: waits in the queue, wakes the engine, or is refused, as the operator has set it"
    ENDS_REQUESTS = "as with an engine that is awake. After a hand-over 409: the next server has the requests"
    NEEDS_WEIGHTS = "409 unless the weights are in the engine, as they are between the two wakes of a weight update"
    REFUSED = "409: wake the engine first"
    UNKNOWN = "503: torpor does not know what it would do to an engine that sleeps"


@dataclass(frozen=True)
class Rule:
    who: Who
    asleep: Asleep


def _all(who: Who, asleep: Asleep, *routes: str) -> dict[tuple[str, str], Rule]:
    rule = Rule(who, asleep)
    return {(method, path): rule for method, path in (route.split(" ") for route in routes)}


UNKNOWN = Rule(Who.OPERATOR, Asleep.UNKNOWN)

# (method, path as it is declared); WEBSOCKET and MOUNT (GET of it and of all that is below) stand for a method.
ROUTES: dict[tuple[str, str], Rule] = (
    _all(
        Who.ANYBODY, Asleep.SERVED,
        # about the server
        "GET /health", "GET /ping", "POST /ping", "GET /is_sleeping", "GET /torpor/ready", "GET /torpor/console",
        "GET /version", "GET /load", "GET /metrics", "MOUNT /metrics", "GET /server_info", "GET /kv_event_sources",
        "GET /is_paused", "GET /weight_info", "GET /get_world_size", "POST /is_scaling_elastic_ep",
        "GET /fault_tolerance/status",
        "GET /openapi.json", "GET /docs", "GET /docs/oauth2-redirect", "GET /redoc", "MOUNT /static",
        # of the tokenizer and the templates alone
        "GET /v1/models", "POST /tokenize", "POST /detokenize", "GET /tokenizer_info", "POST /v1/messages/count_tokens",
        "POST /v1/chat/completions/render", "POST /v1/completions/render", "POST /v1/responses/render",
        "POST /v1/messages/render", "POST /cohere/v2/chat/render",
        "POST /v1/chat/completions/derender", "POST /v1/completions/derender",
        # to requests that are there
        "GET /v1/responses/{response_id}",
    )
    | _all(
        Who.ANYBODY, Asleep.ENDS_REQUESTS,
        "POST /v1/responses/{response_id}/cancel", "POST /inference/v1/abort_requests",
    )
    | _all(
        Who.CLIENT, Asleep.SERVED,
        "GET /torpor/requests/{response:path}", "GET /torpor/requests/{response:path}/stream", "GET /v1/sessions",
    )
    | _all(
        Who.CLIENT, Asleep.ENDS_REQUESTS,
        "DELETE /torpor/requests/{response:path}", "DELETE /v1/sessions/{session:path}",
    )
    | _all(
        Who.CLIENT, Asleep.HELD,
        "POST /v1/chat/completions", "POST /v1/chat/completions/batch", "POST /v1/completions", "POST /v1/responses",
        "POST /v1/messages", "POST /v1/systemone", "POST /v1/decisions", "POST /inference/v1/generate",
        "POST /generative_scoring", "POST /cohere/v2/chat", "POST /invocations",
        "POST /v1/embeddings", "POST /v2/embed", "POST /pooling", "POST /classify",
        "POST /score", "POST /v1/score", "POST /rerank", "POST /v1/rerank", "POST /v2/rerank",
        "POST /v1/audio/transcriptions", "POST /v1/audio/translations", "WEBSOCKET /v1/realtime",
    )
    | _all(
        Who.CLIENT, Asleep.REFUSED,
        "POST /v1/sessions/{session:path}/hibernate", "POST /v1/sessions/{session:path}/resume",
        "POST /v1/sessions/{session:path}/fork", "POST /v1/sessions/{session:path}/demote",
        "POST /v1/sessions/{session:path}/prefetch", "POST /v1/sessions/{session:path}/retain",
        "POST /v1/sessions/{session:path}/pin", "POST /v1/sessions/{session:path}/evict",
    )
    | _all(Who.OPERATOR, Asleep.SERVED, "GET /torpor/state", "GET /torpor/checkpoints")
    | _all(
        Who.ADMIN, Asleep.SERVED,
        "GET /torpor/has/{request:path}",
        "POST /sleep", "POST /wake_up", "POST /swap", "POST /torpor/switch", "POST /torpor/take_over",
        "POST /torpor/checkpoint", "POST /torpor/plan",
        "POST /torpor/console/{method}",
        "POST /start_profile", "POST /stop_profile", "POST /reset_mm_cache",
        "POST /init_weight_transfer_engine", "POST /shutdown_weight_transfer_engine",
    )
    | _all(Who.ADMIN, Asleep.ENDS_REQUESTS, "POST /abort_requests")
    | _all(
        Who.ADMIN, Asleep.NEEDS_WEIGHTS,
        "POST /collective_rpc", "POST /start_weight_update", "POST /start_draft_weight_update", "POST /update_weights",
        "POST /finish_weight_update", "POST /update_weight_version", "POST /weight_checker",
    )
    | _all(
        Who.ADMIN, Asleep.REFUSED,
        "POST /reset_prefix_cache", "POST /reset_encoder_cache", "POST /release_kv_cache_memory",
        "POST /pause", "POST /resume", "POST /scale_elastic_ep", "POST /fault_tolerance/apply",
        "POST /v1/load_lora_adapter", "POST /v1/unload_lora_adapter",
        "POST /v1/sessions/{session:path}/move",
        "POST /adapters", "DELETE /adapters/{adapter_name}",
    )
)  # fmt: skip


def _pattern(method: str, path: str) -> re.Pattern:
    return re.compile(f"{re.escape(path)}(/.*)?$") if method == "MOUNT" else compile_path(path)[0]


_PATTERNS = [
    ("GET" if method == "MOUNT" else method, _pattern(method, path), rule) for (method, path), rule in ROUTES.items()
]


def rule_of(method: str, path: str) -> Rule | None:
    """Of a request (or WEBSOCKET); None: not in the table."""
    method = "GET" if method == "HEAD" else method
    for known, pattern, rule in _PATTERNS:
        if known == method and pattern.match(path):
            return rule
    return None
