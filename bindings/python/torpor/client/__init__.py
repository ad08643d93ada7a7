# SPDX-License-Identifier: Apache-2.0
"""An OpenAI client that loses no answer: over sleeps, drains, restarts and kills of a server of torpor.

    from torpor.client import OpenAI                     # or AsyncOpenAI

    client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key=KEY)
    for chunk in client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True):
        ...                                              # pauses while no server answers, then goes on

Chats and completions, streamed or whole. Each call gets an X-Request-Id if it has none; when its connection breaks, the
client takes its answer up by that id. Whatever takes an httpx client can have the same: http_client() and
async_http_client(). Needs httpx; OpenAI and AsyncOpenAI need openai.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import httpx

from torpor.client.answers import HAS_CHARACTERS, Interruption, NotResumable
from torpor.client.transports import AsyncResumingTransport, ResumingTransport

__all__ = [
    "HAS_CHARACTERS",
    "AsyncOpenAI",
    "Interruption",
    "NotResumable",
    "OpenAI",
    "async_http_client",
    "http_client",
]

# vLLM closes a connection that was idle for 5 s; who uses one at that moment gets "Server disconnected".
_LIMITS = httpx.Limits(max_connections=None, keepalive_expiry=2)
_SECONDS = 600.0
OnInterruption = Callable[[Interruption], None]


def http_client(
    *,
    give_up_after: float = _SECONDS,
    also_at: Sequence[str] = (),
    on_interruption: OnInterruption | None = None,
    **options: Any,
) -> httpx.Client:
    """An httpx.Client whose calls take up their answers.

    `give_up_after`: seconds without a byte of the answer after which the call fails as it would have before.
    `also_at`: base URLs of other servers that may have the answer, or take it over; tried in turn.
    `on_interruption` is called with an Interruption each time a connection broke, in the thread of the call.
    `options`: of httpx.Client.
    """
    inner = options.pop("transport", None) or httpx.HTTPTransport(limits=options.pop("limits", _LIMITS))
    transport = ResumingTransport(inner, give_up_after=give_up_after, also_at=also_at, on_interruption=on_interruption)
    return httpx.Client(transport=transport, **({"timeout": _SECONDS} | options))


def async_http_client(
    *,
    give_up_after: float = _SECONDS,
    also_at: Sequence[str] = (),
    on_interruption: OnInterruption | None = None,
    **options: Any,
) -> httpx.AsyncClient:
    """The same, an httpx.AsyncClient."""
    inner = options.pop("transport", None) or httpx.AsyncHTTPTransport(limits=options.pop("limits", _LIMITS))
    transport = AsyncResumingTransport(
        inner, give_up_after=give_up_after, also_at=also_at, on_interruption=on_interruption
    )
    return httpx.AsyncClient(transport=transport, **({"timeout": _SECONDS} | options))


def OpenAI(**options: Any):
    """An openai.OpenAI over http_client(). `options`: of either."""
    import openai

    client = http_client(**_taken(options))
    return openai.OpenAI(**({"http_client": client, "timeout": _SECONDS} | options))


def AsyncOpenAI(**options: Any):
    """The same, an openai.AsyncOpenAI."""
    import openai

    client = async_http_client(**_taken(options))
    return openai.AsyncOpenAI(**({"http_client": client, "timeout": _SECONDS} | options))


def _taken(options: dict) -> dict:
    return {name: options.pop(name) for name in ("give_up_after", "also_at", "on_interruption") if name in options}
