# SPDX-License-Identifier: Apache-2.0
"""What the connector counts, for vLLM's log and for Prometheus: `torpor_offload_*`."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

_GAUGES = {
    "host_capacity_blocks": "Blocks that have room in host memory.",
    "disk_capacity_blocks": "Blocks that have room on disk.",
    "block_bytes": "Bytes of a block, of all ranks together.",
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
    "sessions": "Sessions whose blocks are known.",
    "held_by_sessions_blocks": "Blocks in host memory that pinned and retained sessions hold.",
    "session_index_bytes": "Memory of what is known of sessions.",
}
# To the device; from it to host memory; on to disk; to the store that engines share; lookups there; from disk and from
# that store to host memory.
_WAYS = ("onboard", "offload", "demote", "publish", "lookup", "prefetch")
_MOVES = tuple(way for way in _WAYS if way != "lookup")
_STORES = ("host", "disk")
_TIERS = ("device", "host", "disk", "kv_store", "other")
# Of the blocks of sessions (kvcache/residency.h).
_SESSION_VERBS = ("demote", "prefetch", "retain", "pin", "evict")
_SESSION_TIERS = ("device", "host", "disk", "remote")
LOAD = "load"  # names the seconds of whole requests, beside those of ways
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass
class Stats(KVConnectorStats):
    """`data`: {"counters": by name, since the last call; "gauges": by name; "seconds": lists, by way or LOAD}."""

    def __post_init__(self):
        if not self.data:
            self.reset()

    def reset(self):
        self.data: dict = {"counters": {}, "gauges": {}, "seconds": {}}

    @staticmethod
    def since(counted: dict[str, int], stats: dict[str, int], seconds: dict[str, list[float]]) -> Stats:
        """`counted` becomes what was told."""
        counters = {}
        for name, number in stats.items():
            if name not in _GAUGES and (more := number - counted.get(name, 0)):
                counters[name], counted[name] = more, number
        gauges = {name: stats[name] for name in _GAUGES if name in stats}
        changed = {name: number for name, number in gauges.items() if counted.get(name) != number}
        counted.update(gauges)
        return Stats(data={"counters": counters, "gauges": changed, "seconds": seconds})

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, more in other.data["counters"].items():
            self.data["counters"][name] = self.data["counters"].get(name, 0) + more
        self.data["gauges"].update(other.data["gauges"])
        for name, more in other.data["seconds"].items():
            self.data["seconds"].setdefault(name, []).extend(more)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM's log shows: counters, gauges, and the mean of each list of seconds, in milliseconds."""
        means = {f"{name}_ms": round(sum(each) / len(each) * 1e3, 3) for name, each in self.data["seconds"].items()}
        return self.data["counters"] | self.data["gauges"] | means

    def is_empty(self) -> bool:
        return not any(self.data.values())


class Metrics(KVConnectorPromMetrics):
    """Blocks by way and outcome, bytes and seconds by way, seconds of loads, what was evicted, and what there is."""

    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._blocks = self._counter_cls(
            name="torpor_offload_blocks",
            documentation="Blocks by way (onboard, offload, demote to disk, publish to the shared store, lookup "
            "there, prefetch to host memory) and by outcome.",
            labelnames=[*labelnames, "way", "outcome"],
        )
        self._bytes = self._counter_cls(
            name="torpor_offload_bytes",
            documentation="Bytes of the blocks that were transferred, of all ranks together, by way. Its rate is the "
            "throughput.",
            labelnames=[*labelnames, "way"],
        )
        self._seconds = self._histogram_cls(
            name="torpor_offload_seconds",
            documentation="Seconds of a batch of blocks, from its plan to the last rank's report.",
            labelnames=[*labelnames, "way"],
            buckets=_SECONDS,
        )
        self._load_seconds = self._histogram_cls(
            name="torpor_offload_load_seconds",
            documentation="Seconds of the load of a request whose prefix was found, from when it had blocks until "
            "all of it had ended.",
            labelnames=labelnames,
            buckets=_SECONDS,
        )
        self._cached = self._counter_cls(
            name="torpor_offload_cached_tokens",
            documentation="Tokens of requests that have ended, of their prompts, that were not computed, by where "
            "their KV was: in vLLM's prefix cache, in host memory, on disk, in the remote store, or with another "
            "connector. They add up to what these requests have as num_cached_tokens.",
            labelnames=[*labelnames, "tier"],
        )
        for values in per_engine_labelvalues.values():
            for tier in _TIERS:
                self._cached.labels(*values, tier)
        self._policy = self._counter_cls(
            name="torpor_offload_policy",
            documentation="Questions to the policy of your own, by what became of them: answered; late, busy with an "
            "earlier one, wrong or raised, where it was bypassed.",
            labelnames=[*labelnames, "result"],
        )
        self._evicted = self._counter_cls(
            name="torpor_offload_evicted_blocks",
            documentation="Blocks that made room for others.",
            labelnames=[*labelnames, "store"],
        )
        self._session_blocks = self._counter_cls(
            name="torpor_session_blocks",
            documentation="Blocks of sessions by verb, and by the tier where they were when it was done; of evict, by "
            "each tier that dropped them.",
            labelnames=[*labelnames, "verb", "tier"],
        )
        self._session_freed = self._counter_cls(
            name="torpor_session_freed_blocks",
            documentation="Blocks of the device that calls of sessions have freed.",
            labelnames=labelnames,
        )
        self._session_idle = self._counter_cls(
            name="torpor_session_idle_demotions",
            documentation="Sessions that were demoted by themselves, after session_idle_seconds.",
            labelnames=labelnames,
        )
        self._session_forgotten = self._counter_cls(
            name="torpor_sessions_forgotten",
            documentation="Sessions that made room for others in what is known of sessions.",
            labelnames=labelnames,
        )
        self._loads_within_step = self._counter_cls(
            name="torpor_offload_loads_within_step",
            documentation="Loads of requests that ended before the forward pass of the step that planned them.",
            labelnames=labelnames,
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
            if name == "session_freed_blocks":
                self._session_freed.labels(*labels).inc(more)
            elif name == "session_idle":
                self._session_idle.labels(*labels).inc(more)
            elif name == "session_forgotten":
                self._session_forgotten.labels(*labels).inc(more)
            elif name == "loads_within_step":
                self._loads_within_step.labels(*labels).inc(more)
            elif kind == "session":
                self._session_blocks.labels(*labels, *what.split("_")).inc(more)
            elif kind in _WAYS and what == "bytes":
                self._bytes.labels(*labels, kind).inc(more)
            elif kind in _WAYS:
                self._blocks.labels(*labels, kind, what).inc(more)
            elif kind == "policy":
                self._policy.labels(*labels, what).inc(more)
            elif kind == "cached":
                self._cached.labels(*labels, what.removesuffix("_tokens")).inc(more)
            elif kind in _STORES and what == "evicted":
                self._evicted.labels(*labels, kind).inc(more)
        for name, number in transfer_stats_data["gauges"].items():
            self._gauges[name].labels(*labels).set(number)
        for name, times in transfer_stats_data["seconds"].items():
            histogram = self._load_seconds.labels(*labels) if name == LOAD else self._seconds.labels(*labels, name)
            for seconds in times:
                histogram.observe(seconds)


def with_bytes(stats: dict[str, int], block_bytes: int) -> dict[str, int]:
    """Add the bytes of each way that moves blocks. `block_bytes`: of a block, of all ranks."""
    moved = {f"{way}_bytes": stats[name] * block_bytes for way in _MOVES if (name := f"{way}_transferred") in stats}
    return stats | moved | {"block_bytes": block_bytes}
