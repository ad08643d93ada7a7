# SPDX-License-Identifier: Apache-2.0
"""LLMEngine.step() returns more than vLLM's own step. This module holds that state beside each engine, not on it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field


@dataclass
class StepOutputs:
    first: list = field(default_factory=list)  # outputs that step() gives first
    aside: list | None = None  # outputs of restored requests, while LLM runs its own
    hibernated: set = field(default_factory=set)  # vLLM's ids of requests that step() cannot end
    asleep: bool = False  # step() of an engine core in another process gives nothing then
    weight_update: str | None = None  # why no request may run, if one is under way or has failed; nor then


_OF: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def of(engine) -> StepOutputs:
    """Return the state of an LLMEngine."""
    return _OF.setdefault(engine, StepOutputs())
