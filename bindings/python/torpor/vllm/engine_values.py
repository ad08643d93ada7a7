# SPDX-License-Identifier: Apache-2.0
"""Types of the answers of `llm.torpor`: state(), ledger(), plan_sleep(…), continue_wake() and others return them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeferredBlocks:
    """Counts of the KV blocks that a post-copy wake deferred, by what has become of them."""

    arrived: int
    unreadable: int  # could not be read; their tokens are computed again
    skipped: int  # no request needed them any more
    pending: int  # still to come
    recomputed: tuple[str, ...]  # ids of requests that computed lost blocks again

    @classmethod
    def from_value(cls, value: dict) -> DeferredBlocks:
        return cls(
            value["arrived"], value["unreadable"], value["skipped"], value["pending"], tuple(value["recomputed"])
        )


@dataclass(frozen=True)
class EngineState:
    engine: str  # "awake", "falling asleep", "asleep", "waking" or "unrecoverable"
    level: int  # of the sleep in force; -1: none is
    tags: dict[str, str]  # of each tag of memory: "attached", "detached" or "broken"
    checkpoint: str  # path of the checkpoint that the engine sleeps on; "" if there is none
    tiers: dict[str, str | None]  # None for a tier of the adapter that is on, or why it is off
    recomputed_tokens: int  # since the engine last slept
    console: str | None  # path of the socket of a console
    preempted: dict[str, int]  # with the option offload_preempted: requests that were offloaded, and recomputed
    deferred: DeferredBlocks

    @classmethod
    def from_value(cls, value: dict) -> EngineState:
        plain = {name: item for name, item in value.items() if name != "deferred"}
        return cls(**plain, deferred=DeferredBlocks.from_value(value["deferred"]))


@dataclass(frozen=True)
class SleepPlan:
    """The plan of a sleep that is not done: what it would move and free on all ranks. Sizes in bytes."""

    save_bytes: dict[str, int]  # of each tag: that would be copied
    free_bytes: dict[str, int]  # of each tag: device memory that would be given back
    reused_bytes: int  # that would be kept without a copy
    host_bytes: int  # that would lie in host memory then
    disk_bytes: int  # that would lie on disk then
    requests: int
    kept_blocks: int  # KV blocks
    dropped_blocks: int
    problems: tuple[str, ...]  # why the sleep would be refused

    @classmethod
    def from_value(cls, value: dict) -> SleepPlan:
        return cls(**value | {"problems": tuple(value["problems"])})


@dataclass(frozen=True)
class Hibernated:
    """Requests that left the running engine together, and whose KV lies in host memory or on disk: an image."""

    id: str
    requests: tuple[str, ...]  # their ids, as they were made with
    bytes: int  # of KV, on all ranks
    tokens: int  # whose KV it has
    path: str = ""  # of an image on disk

    @classmethod
    def from_value(cls, value: dict, names: dict[str, str]) -> Hibernated:
        """`names`: the id that each request was made with, by vLLM's own."""
        requests = dict.fromkeys(names.get(request, request) for request in value["requests"])
        return cls(value["id"], tuple(requests), value["bytes"], value["tokens"], value["path"])


@dataclass(frozen=True)
class Resumed:
    """Requests of an image that are on their way back into the engine."""

    id: str
    requests: tuple[str, ...]
    recomputed: bool  # weights have changed: their KV is not taken, and is computed again from their tokens

    @classmethod
    def from_value(cls, value: dict, names: dict[str, str]) -> Resumed:
        requests = dict.fromkeys(names.get(request, request) for request in value["requests"])
        return cls(value["id"], tuple(requests), value["recomputed"])


@dataclass(frozen=True)
class Moved:
    """Requests of an image that another engine has taken."""

    id: str
    requests: tuple[str, ...]


@dataclass(frozen=True)
class Forked:
    """Requests that were made of another one, and go on from where it was."""

    parent: str  # its id, as it was made with
    children: tuple[str, ...]  # their ids
    shared_blocks: int  # KV blocks of the parent that each child has, too; of these nothing was copied
    bytes: int  # that were copied, of all children on all ranks


@dataclass(frozen=True)
class SessionAnswer:
    """The result of a call of a session. Sizes are in bytes, of all ranks together."""

    outcome: str  # "accepted", "clipped" (a part of it), "deferred" (call later), "rejected" or "missing"
    reason: str  # of an outcome other than "accepted"
    bytes: int  # of the session's blocks that are in the tier; of evict(): that were dropped
    freed_bytes: int  # that became free on the device
    kept_bytes: int  # that stay where they were: running requests, or other sessions, want them
    epoch: int  # of the session: changes with each request that ends, and each move
    repeated: bool  # the answer of an earlier call with this id
    action_id: str

    @classmethod
    def from_value(cls, value: dict) -> SessionAnswer:
        return cls(**{name: value[name] for name in cls.__dataclass_fields__})

    def __bool__(self) -> bool:
        return self.outcome == "accepted"


@dataclass(frozen=True)
class KnownSession:
    """A session whose finished prefixes the engine knows. Sizes in bytes, on all ranks."""

    id: str
    tenant: str
    tier: str  # the nearest where it wants its blocks: "device", "host", "disk" or "remote"
    epoch: int
    prefixes: int
    running: int  # requests
    bytes: int  # of all its blocks
    device_bytes: int  # of these, in each tier
    host_bytes: int
    disk_bytes: int
    kv_store_bytes: int
    held: str  # "pinned", "retained" or ""
    priority: int
    seconds_left: float  # of that
    held_bytes: int

    @classmethod
    def from_value(cls, value: dict) -> KnownSession:
        return cls(**{name: value[name] for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class TagLedger:
    """Memory of one tag on one rank. Sizes in bytes."""

    state: str  # "attached", "detached" or "broken"
    region_bytes: int  # as asked for
    physical_bytes: int  # device memory behind it now
    backup_host_bytes: int
    backup_disk_bytes: int
    reused_bytes: int  # of the backup: what the last sleep found there, and did not copy


@dataclass(frozen=True)
class RankLedger:
    """Memory of one rank. Sizes in bytes."""

    tags: dict[str, TagLedger]
    device_physical_bytes: int
    device_capacity_bytes: int  # 0: no limit of its own
    device_used_bytes: int  # by all processes, as the device counts; 0: it does not
    arena_held_bytes: int  # of host memory for saved bytes
    arena_used_bytes: int
    arena_budget_bytes: int  # 0: no limit
    arena_unpinned_bytes: int  # held, but the device would not pin it
    chunks_by_outcome: dict[str, int]  # of chunks that were copied or digested since the start: how they ended
    process_resident_bytes: int
    process_resident_region_bytes: int  # the part of it that is device memory without a GPU
    process_other_bytes: int  # the part of it that is neither that nor host memory for saved bytes

    @classmethod
    def from_value(cls, value: dict) -> RankLedger:
        tags = {tag: TagLedger(**entry) for tag, entry in value["tags"].items()}
        return cls(**value | {"tags": tags})
