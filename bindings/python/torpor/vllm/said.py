# SPDX-License-Identifier: Apache-2.0
"""What a client, a gateway or a router said of a request, which its tokens do not depend on: the headers of its trace,
hints for the KV cache, parameters for KV connectors. It goes wherever the request goes, as it was said."""

from __future__ import annotations

import json

import msgspec
from vllm.v1.kv_hints import KvHintsEnvelope

from torpor.vllm.values import are_plain

# Of Request. The parameters of transfers stand in its sampling parameters too, which vLLM takes them from.
FIELDS = ("trace_headers", "kv_hints", "kv_transfer_params", "ec_transfer_params")


def _plain(name: str, item):
    if name == "kv_hints":
        return msgspec.to_builtins(item) if isinstance(item, KvHintsEnvelope) else item
    return dict(item) if name == "trace_headers" else item


def _of(request) -> dict:
    """Those that there are, of a Request or an EngineCoreRequest."""
    found = {name: getattr(request, name, None) for name in FIELDS}
    return {name: _plain(name, item) for name, item in found.items() if item is not None}


def unsupported(request) -> list[str]:
    """Those that are no plain values, by name."""
    return [f"its {name}" for name, item in _of(request).items() if not are_plain(item) or not isinstance(item, dict)]


def to_value(request) -> str | None:
    """As JSON; None: nothing was said."""
    found = _of(request)
    return json.dumps(found) if found else None


def restore(request, value: str | None) -> None:
    """Sets them, in a request that was made anew. Older checkpoints have none."""
    for name, item in json.loads(value or "{}").items():
        if name in FIELDS:
            setattr(request, name, msgspec.convert(item, KvHintsEnvelope) if name == "kv_hints" else item)
