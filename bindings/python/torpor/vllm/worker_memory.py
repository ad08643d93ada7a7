# SPDX-License-Identifier: Apache-2.0
"""What torpor asks of a worker's memory, on every device: memory.py has it for CPUs, gpu_memory.py for NVIDIA GPUs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from torpor import _core
from torpor.errors import WrongState


class WorkerMemory(Protocol):
    """One a worker. Called in the worker's thread, between steps."""

    rank_memory: _core.RankMemory
    new_weights: int  # how often weights were loaded after the first time
    weights_layout: str | None  # where each parameter lies in a checkpoint; None: it has no such places
    kv_is_bf16: bool  # valid after describe_kv()

    def allocating(self, tag: str, model_runner) -> AbstractContextManager[None]:
        """Around what vLLM allocates for `tag`. The model of `model_runner` is there when that of "weights" ends."""

    def start_prefault(self) -> None:
        """Prefault host memory in the background from now on, as the options say."""

    def close(self) -> None:
        """The engine has ended: give its memory back."""

    def make_room(self) -> None:
        """Before an order: it may wake tags, and somebody may have computed in this process while they slept."""

    def note_order(self) -> None:
        """An order of the controller was carried out: tags may have left the device, or be back."""

    def describe_kv(self, model_runner) -> None:
        """Tells the core where each block lies. Raises Unsupported for a KV cache that lies elsewhere."""

    def reloading_weights(self) -> AbstractContextManager[None]:
        """Around vLLM's reload_weights()."""

    def note_new_weights(self) -> None:
        """What is kept of the old ones is no longer theirs; nor is KV that was computed with them."""

    def elsewhere(self, model: torch.nn.Module) -> list[str]:
        """Parameters that a sleep would neither free nor save."""

    def release_unused(self) -> None:
        """Before a sleep: give back what nobody uses, so that it is not saved."""

    def keep_derived(self) -> None:
        """The next release_derived() frees nothing that can stay in host memory as it is. A GPU has nothing of that."""

    def release_derived(self) -> None:
        """Before the weights sleep: frees what follows from them, and saves what no weight file has."""

    def rebuild_derived(self) -> None:
        """After the weights woke: the reverse."""


def check_weights_awake(rank_memory: _core.RankMemory, call: str, tag: str = "weights") -> None:
    """Raise WrongState if the weights have no memory that `call` could write to.

    tag: where they lie; those of a draft model and of adapters on a GPU in "runtime", which each wake brings back.
    """
    if (state := rank_memory.states().get(tag, "attached")) != "attached":
        raise WrongState(f"{call}: the weights are {state}", 'call wake_up(tags=["weights"]) first')
