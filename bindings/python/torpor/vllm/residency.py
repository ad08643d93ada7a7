# SPDX-License-Identifier: Apache-2.0
"""Where the KV blocks of finished sessions lie, in the engine core: it hands calls on to C++ (kvcache/residency.h)."""

from __future__ import annotations

from torpor.errors import Unsupported, WrongState
from torpor.vllm import connector_sleep

_BLOCKS = ("blocks", "freed_blocks", "kept_blocks")
_VIEW_BLOCKS = ("blocks", "device_blocks", "host_blocks", "disk_blocks", "kv_store_blocks", "held_blocks")


def _side(scheduler):
    """Return the connector's side in the scheduler's process. Raises Unsupported where the engine has no tiers."""
    side = connector_sleep.side_of(scheduler)
    if side is None:
        raise Unsupported("sessions in tiers: this engine has none", "start it with the option offload and host_bytes")
    if side.core is None:
        raise WrongState("the tiers of this engine have no room for blocks", "give it more host_bytes")
    return side


def _with_bytes(value: dict, names: tuple[str, ...], block_bytes: int) -> dict:
    """Add the bytes of each count of blocks, of all ranks together."""
    return value | {f"{name.removesuffix('blocks')}bytes": value[name] * block_bytes for name in names}


def call(scheduler, options: dict) -> dict:
    """Begin a call of a session. Return its answer so far."""
    side = _side(scheduler)
    return _with_bytes(side.core.session_call(options), _BLOCKS, side.block_bytes)


def answer(scheduler, options: dict) -> dict:
    """Return what has become of an action by now. NotFound: there is none of this id."""
    side = _side(scheduler)
    return _with_bytes(side.core.session_answer(options["tenant"], options["action"]), _BLOCKS, side.block_bytes)


def views(scheduler, options: dict) -> dict:
    """Return {"sessions": […], "next": …}: the next sessions of a tenant, of all tenants if it is None; and where those
    behind them begin, or None. An engine without room for blocks has none."""
    side = connector_sleep.side_of(scheduler)
    if side is not None and side.core is None:
        return {"sessions": [], "next": None}
    side = _side(scheduler)
    page = side.core.session_views(options["tenant"], options["from"])
    return page | {"sessions": [_with_bytes(each, _VIEW_BLOCKS, side.block_bytes) for each in page["sessions"]]}


def tenants(scheduler, options: dict) -> list[str]:
    """Return the tenants that have a session of this id."""
    side = connector_sleep.side_of(scheduler)
    if side is not None and side.core is None:
        return []
    return _side(scheduler).core.session_tenants(options["session"])
