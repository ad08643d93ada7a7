"""The way into a server that may be asleep: ASGI middleware that lets a request through, holds it, or answers 503."""

from __future__ import annotations

import hashlib

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from torpor.vllm.server.recorder import tenant_of_call

# Calls that begin a request of the engine; others (models, tokenize, health, metrics) need no engine.
_WORK = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate", "/generative_scoring", "/cohere", "/invocations")
_RETRY_AFTER_SECONDS = "5"


class Gate:
    def __init__(self, app, state):
        self.app = app
        self.state = state  # of the application; its `torpor` is the Server

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        server = self.state.torpor
        tenant_of_call.set(tenant(Headers(scope=scope), server.settings.tenant_header))
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if scope["method"] == "POST" and path.startswith(_WORK) and (refusal := await server.let_in()) is not None:
            response = JSONResponse({"error": {"message": refusal, "type": "ServiceUnavailableError", "code": 503}}, 503, {"Retry-After": _RETRY_AFTER_SECONDS})
            return await response(scope, receive, send)
        return await self.app(scope, receive, send)


def tenant(headers: Headers, tenant_header: str) -> str:
    """Who asks, by API key and by the header that the operator named; nothing of either can be read from it."""
    parts = [headers.get("Authorization", "")]
    if tenant_header:
        parts.append(headers.get(tenant_header, ""))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest() if any(parts) else ""
