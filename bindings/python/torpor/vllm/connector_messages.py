# SPDX-License-Identifier: Apache-2.0
"""What the two sides of the connector tell each other through vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass
class RankIsReady(KVConnectorHandshakeMetadata):
    sizes: dict  # ConnectorWorker.sizes()
    recovered: bytes = b""


@dataclass
class Orders(KVConnectorMetadata):
    """Of one step, for all ranks, in this order."""

    step: int
    adopted: bytes | None = None  # of what they recovered
    space: tuple[int, str, str] | None = None  # a namespace that begins: number, and the words in its names
    plan: bytes | None = None
    weights_maybe_written: bool = False  # before that namespace: somebody may have written them
    within_step: list[str] = field(default_factory=list)  # requests whose loads end before the step's forward pass
    adapter: dict | None = None  # a LoRA adapter that workers read and report, as adapters.to_value() has it
    wait_seconds: float = 0  # the step computes nothing: the most time to wait for a transfer that ends


@dataclass
class Report(KVConnectorWorkerMetadata):
    step: int  # that is over
    transfers: list[bytes] = field(default_factory=list)  # of all ranks
    new_weights: bool = False  # there are others than when the last step began
    # By number: the digests of the LoRA adapters that a worker has, "" where ranks differ or one cannot be read. None:
    # as before.
    adapters: dict[int, str] | None = None

    def aggregate(self, other: Report) -> Report:
        new_weights = self.new_weights or other.new_weights
        adapters = _agreed(self.adapters, other.adapters)
        return Report(min(self.step, other.step), self.transfers + other.transfers, new_weights, adapters)


def _agreed(one: dict[int, str] | None, other: dict[int, str] | None) -> dict[int, str] | None:
    """Ranks read the same adapters in the same steps, so all of them tell, or none does."""
    if one is None and other is None:
        return None
    one, other = one or {}, other or {}
    return {number: one.get(number, "") if one.get(number) == other.get(number) else "" for number in one | other}
