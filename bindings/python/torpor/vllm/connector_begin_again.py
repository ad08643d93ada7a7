# SPDX-License-Identifier: Apache-2.0
"""Requests that begin again because a step computed on top of KV that is not theirs: its outputs for them are dropped.

vLLM preempts them, and draws their tokens anew. Model runner V1 has a generator for each seeded request, and the
dropped draw has advanced it: the workers put its state back. Model runner V2 draws by seed and position.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence

import torch

_STEPS_BEGUN = 2  # most that have begun when the first one's outputs are taken, without a pipeline


def begin_again(scheduler, side, requests: Sequence, step: int) -> None:
    """Preempt these running requests, and drop what `step` and later ones in flight have made of them.

    side: SchedulerSide, whose orders number the steps. Call it before another step is scheduled.
    """
    for request in reversed(requests):
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
    if requests and side.draw_again is not None and not scheduler.use_v2_model_runner:
        side.draw_again(step, [request.request_id for request in requests])


class GeneratorStates:
    """A worker with model runner V1 keeps the states here that its requests' generators had before the last steps."""

    def __init__(self) -> None:
        self._before: deque[tuple[int, dict[str, torch.Tensor]]] = deque(maxlen=_STEPS_BEGUN)

    def keep(self, model_runner, step: int) -> None:
        """Call it before a step's forward pass, when the batch is made up."""
        batch = getattr(model_runner, "input_batch", None)
        if batch is None or not getattr(batch, "generators", None):
            return
        generators = ((each, model_runner.requests[each].generator) for each in batch.req_id_to_index)
        self._before.append((step, {each: drawn.get_state() for each, drawn in generators if drawn is not None}))

    def put_back(self, model_runner, step: int, request_ids: Iterable[str]) -> None:
        """Let the generators of these requests be as before `step`, or before the first later one that they are in."""
        for request_id in request_ids:
            since = (states for number, states in self._before if number >= step)
            state = next((states[request_id] for states in since if request_id in states), None)
            request = model_runner.requests.get(request_id)
            if state is not None and request is not None and request.generator is not None:
                request.generator.set_state(state)
