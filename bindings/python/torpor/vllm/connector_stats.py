# SPDX-License-Identifier: Apache-2.0
"""What the connector counts, for vLLM's log and for Prometheus: `torpor_offload_*`."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

_GAUGES = {
    "host_blocks": "Blocks in host memory, also those that were forgotten and make room first.",
    "host_quarantined": "Slots of host memory that an unproven copy may still write to.",
    "disk_blocks": "Blocks on disk, also those that were forgotten and make room first.",
    "disk_quarantined": "Slots on disk that an unproven copy may still write to.",
    "kv_store_blocks": "Blocks of which it is known that the remote store has or had them.",
    "kv_store_onboarded_blocks": "Blocks that were loaded from the remote store, since the beginning.",
    "queued_blocks": "Blocks that wait to be stored or loaded.",
    "jobs_under_way": "Transfer jobs that the ranks work at.",
    "held_blocks": "Blocks of the engine that are kept until they are stored.",
    "loading_requests": "Requests that wait for their blocks.",
    "recovered_blocks": "Blocks on disk of an earlier process that were found again at the start.",
}
# To the device; from it to host memory; on to disk; to the store that engines share; lookups there.
_WAYS = ("onboard", "offload", "demote", "publish", "lookup")
_STORES = ("host", "disk")


@dataclass
class Stats(KVConnectorStats):
    """`data`: {"counters": by name, since the last time; "gauges": by name}."""

    def __post_init__(self):
        if not self.data:
            self.reset()

    def reset(self):
        self.data: dict = {"counters": {}, "gauges": {}}

    @staticmethod
    def since(counted: dict[str, int], stats: dict[str, int]) -> Stats:
        """`counted` becomes what was told."""
        counters = {}
        for name, number in stats.items():
            if name not in _GAUGES and (more := number - counted.get(name, 0)):
                counters[name], counted[name] = more, number
        gauges = {name: stats[name] for name in _GAUGES if name in stats}
        changed = {name: number for name, number in gauges.items() if counted.get(name) != number}
        counted.update(gauges)
        return Stats(data={"counters": counters, "gauges": changed})

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, more in other.data["counters"].items():
            self.data["counters"][name] = self.data["counters"].get(name, 0) + more
        self.data["gauges"].update(other.data["gauges"])
        return self

    def reduce(self) -> dict[str, int | float]:
        return self.data["counters"] | self.data["gauges"]

    def is_empty(self) -> bool:
        return not self.data["counters"] and not self.data["gauges"]


class Metrics(KVConnectorPromMetrics):
    """Counters by way and outcome of a block, and by store what was evicted; gauges of what there is."""

    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._blocks = self._counter_cls(
            name="torpor_offload_blocks",
            documentation="Blocks by way (onboard, offload, demote to disk, publish to the shared store, lookup "
            "there) and by outcome.",
            labelnames=[*labelnames, "way", "outcome"],
        )
        self._evicted = self._counter_cls(
            name="torpor_offload_evicted_blocks",
            documentation="Blocks that made room for others.",
            labelnames=[*labelnames, "store"],
        )
        self._gauges = {
            name: self._gauge_cls(
                name=f"torpor_offload_{name}",
                documentation=text,
                labelnames=labelnames,
                multiprocess_mode="mostrecent",
            )
            for name, text in _GAUGES.items()
        }

    def observe(self, transfer_stats_data: dict, engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, more in transfer_stats_data["counters"].items():
            kind, _, what = name.partition("_")
            if kind in _WAYS:
                self._blocks.labels(*labels, kind, what).inc(more)
            elif kind in _STORES and what == "evicted":
                self._evicted.labels(*labels, kind).inc(more)
        for name, number in transfer_stats_data["gauges"].items():
            self._gauges[name].labels(*labels).set(number)
