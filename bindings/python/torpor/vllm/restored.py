# SPDX-License-Identifier: Apache-2.0
"""LLM.generate() and its relatives beside requests that LLM did not make: a wake in a new process has restored them, or
LLMEngine.add_request() was given their ids.

vLLM returns whatever ends while it runs the engine, in the order of ids, which are numbers if LLM made them itself.
Restored requests have ids of another process, equal to new ones or no numbers at all, and a caller's may be any text.
So while LLM runs the engine for its own requests, outputs of others are put aside; `LLMEngine.step()` and
`LLM.wait_for_completion()` give them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vllm.v1.engine.llm_engine import LLMEngine

from torpor.vllm import frontend, step_outputs


@contextmanager
def run_without(engine: LLMEngine) -> Iterator[None]:
    """While LLM runs its engine until its own requests have ended. Asleep, it would wait for ever."""
    frontend.refuse_while_asleep(engine)
    with put_aside(engine):
        yield


def is_another(one) -> bool:
    """Whether LLM did not make this request, or the one that this output is of. A caller's number counts as LLM's."""
    name = getattr(one, "external_req_id", None) or one.request_id  # outputs have the caller's id alone
    return getattr(one, "torpor_restored", False) or not name.isdecimal()


def _are_there(engine: LLMEngine) -> bool:
    """Whether other requests run, or have outputs that nobody was given."""
    given = step_outputs.of(engine)
    return any(map(is_another, _states(engine))) or any(map(is_another, given.first))


def _states(engine: LLMEngine) -> list:
    """Return the front end's states of all requests but the hibernated ones, which step() cannot end."""
    hibernated = step_outputs.of(engine).hibernated
    return [state for i, state in engine.output_processor.request_states.items() if i not in hibernated]


@contextmanager
def put_aside(engine: LLMEngine) -> Iterator[None]:
    """Meanwhile step() and has_unfinished_requests() know only LLM's own requests."""
    given = step_outputs.of(engine)
    if given.aside is not None or not _are_there(engine):
        yield
        return
    given.aside = []
    try:
        yield
    finally:
        given.first, given.aside = given.aside + given.first, None


def others(engine: LLMEngine, outputs: list) -> list:
    """Those of step() that are not put aside."""
    if (aside := step_outputs.of(engine).aside) is None:
        return outputs
    aside += filter(is_another, outputs)
    return [output for output in outputs if not is_another(output)]


def has_others(engine: LLMEngine) -> bool:
    given = step_outputs.of(engine)
    return not all(map(is_another, _states(engine))) or not all(map(is_another, given.first))


def finish(engine: LLMEngine) -> list:
    """Run the engine until the other requests have ended. Return their last outputs, as they ended."""
    ended = []
    while _are_there(engine):
        ended += [output for output in engine.step() if output.finished]
    return ended
