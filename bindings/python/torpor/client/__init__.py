# SPDX-License-Identifier: Apache-2.0
"""An OpenAI client that loses no answer: over sleeps, drains, restarts and kills of a server of torpor that was
started with --torpor-on-disconnect continue.

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
from torpor.client.transports import AsyncResumingTransport, AsyncSender, ResumingTransport, Sender

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
_OF_RESUMING = ("give_up_after", "also_at", "on_interruption", "abort_on_close")
# Options of httpx.Client that say how a request is sent.
_OF_SENDING = ("verify", "cert", "http1", "http2", "proxy", "mounts", "limits", "transport", "trust_env")


def http_client(
    *,
    give_up_after: float = _SECONDS,
    also_at: Sequence[str] = (),
    on_interruption: OnInterruption | None = None,
    abort_on_close: bool = True,
    **options: Any,
) -> httpx.Client:
    """An httpx.Client whose calls take up their answers.

    `give_up_after`: seconds without a byte of the answer after which the call fails: as it would have before, or, with
    `also_at`, as NotResumable with the reply of each server.
    `also_at`: base URLs of other servers that may have the answer, or take it over; tried in turn.
    `on_interruption` is called with an Interruption each time a connection broke, in the thread of the call.
    `abort_on_close`: a call that is closed before its end, or cancelled, ends at its server, too: within a second or
    two, or it runs on there. False: it runs on, for whoever takes its answer up later.
    `options`: of httpx.Client, with the meaning that they have there. So it goes through the proxies of `proxy`, of
    `mounts` and, unless `trust_env=False`, of the environment (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY).
    """
    inner = Sender({"limits": _LIMITS} | _taken(options, _OF_SENDING))
    transport = ResumingTransport(
        inner, abort_on_close, give_up_after=give_up_after, also_at=also_at, on_interruption=on_interruption
    )
    return httpx.Client(transport=transport, **({"timeout": _SECONDS} | options))


def async_http_client(
    *,
    give_up_after: float = _SECONDS,
    also_at: Sequence[str] = (),
    on_interruption: OnInterruption | None = None,
    abort_on_close: bool = True,
    **options: Any,
) -> httpx.AsyncClient:
    """The same, an httpx.AsyncClient."""
    inner = AsyncSender({"limits": _LIMITS} | _taken(options, _OF_SENDING))
    transport = AsyncResumingTransport(
        inner, abort_on_close, give_up_after=give_up_after, also_at=also_at, on_interruption=on_interruption
    )
    return httpx.AsyncClient(transport=transport, **({"timeout": _SECONDS} | options))


def OpenAI(**options: Any):
    """An openai.OpenAI over http_client(). `options`: of openai.OpenAI without `http_client`, those that http_client()
    has of its own, and those of httpx.Client that say how a request is sent."""
    import openai

    client = http_client(**_of_http_client(options))
    return openai.OpenAI(**({"http_client": client, "timeout": _SECONDS} | options))


def AsyncOpenAI(**options: Any):
    """The same, an openai.AsyncOpenAI over async_http_client()."""
    import openai

    client = async_http_client(**_of_http_client(options))
    return openai.AsyncOpenAI(**({"http_client": client, "timeout": _SECONDS} | options))


def _of_http_client(options: dict) -> dict:
    if options.get("http_client") is not None:
        raise TypeError(
            "http_client is given: this client would not resume. Give its options here, or give a client that "
            "torpor.client.http_client() or async_http_client() makes to openai's own OpenAI or AsyncOpenAI"
        )
    options.pop("http_client", None)
    return _taken(options, (*_OF_RESUMING, *_OF_SENDING))


def _taken(options: dict, names: Sequence[str]) -> dict:
    return {name: options.pop(name) for name in names if name in options}
