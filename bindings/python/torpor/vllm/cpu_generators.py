# SPDX-License-Identifier: Apache-2.0
"""Seeded requests of the CPU's model runner whose prompts are computed in several steps."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from torpor.vllm.mixed_in import Stock, mix_in


class CpuGenerators(Stock):
    """A mixin of a model runner: a prompt that takes several steps draws one number, that of its last step.

    Such a request draws a number in each step, and keeps only the last token. vLLM takes the other draws back by the
    generator's offset, which generators of the CPU do not have: the engine ends with an error. Requests that are
    computed again after a wake run into it easily. Here the generator's state is put back instead.
    """

    torpor_before_draw: Mapping = MappingProxyType({})  # by row of the batch: the state of its generator

    def _sample(self, *args, **kwargs):
        discarded = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0]
        generators = ((int(row), self.input_batch.generators.get(int(row))) for row in discarded)
        self.torpor_before_draw = {row: drawn.get_state() for row, drawn in generators if drawn is not None}
        return super()._sample(*args, **kwargs)

    def _bookkeeping_sync(self, *args, **kwargs):
        batch, before = self.input_batch, self.torpor_before_draw
        generators = batch.generators
        for row, state in before.items():
            generators[row].set_state(state)
        batch.generators = {row: generator for row, generator in generators.items() if row not in before}
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            batch.generators = generators


def adopt(runner) -> None:
    """Give a model runner of the CPU the mixin; another one stays as it is."""
    if isinstance(runner, CPUModelRunner):
        mix_in(runner, CpuGenerators)
