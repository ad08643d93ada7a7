# SPDX-License-Identifier: Apache-2.0
"""A pause that vLLM's users asked for, over a sleep: which requests wait, and whether new ones are turned away.

From vLLM 0.33 on, pause_generation() with "abort" or "wait" has the engine core answer new requests with an error that
says to try again, until resume_generation(). The front end of a core in its own process calls it, others cannot.
"""

from __future__ import annotations

from vllm.v1.core.sched.interface import PauseState


def turns_away(core) -> bool:
    return getattr(core, "reject_new_requests", False)


def turn_away(core, wanted: bool) -> None:
    if hasattr(core, "reject_new_requests"):
        core.reject_new_requests = wanted


def to_value(core, state: PauseState) -> dict:
    return {"state": state.name, "turns_away": turns_away(core)}


def from_value(core, value: dict) -> PauseState:
    """Turns new requests away as before; returns the state, which is the caller's to set."""
    turn_away(core, value["turns_away"])
    return PauseState[value["state"]]
