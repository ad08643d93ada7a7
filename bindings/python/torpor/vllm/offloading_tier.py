# SPDX-License-Identifier: Apache-2.0
"""A store of torpor's as a secondary tier of vLLM's OffloadingConnector: KV blocks on disk, or shared by engines.

    "secondary_tiers": [{"type": "TorporTier", "module_path": "torpor.vllm.offloading_tier",
                         "disk_dir": "/var/lib/torpor/kv", "disk_bytes": "200GiB"}]

vLLM decides which blocks are stored and loaded. This module translates its jobs for torpor's core, which moves bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
import vllm

from torpor import _core
from torpor.errors import Error, InvalidArgument
from torpor.vllm import compat
from torpor.vllm.connector_options import ConnectorOptions, directory_of_rank, storage_options
from torpor.vllm.described import BYTES, PATH, SWITCH, TEXT, WHOLE, described, value_of

compat.check(vllm.__version__, "offloading_tier")  # before what another release may not have

from vllm.logger import init_logger  # noqa: E402
from vllm.v1.kv_offload.base import (  # noqa: E402
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.file_mapper import FileMapper  # noqa: E402
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager  # noqa: E402

logger = init_logger("vllm.torpor.offloading_tier")

_LOOKUPS = (LookupResult.MISS, LookupResult.HIT, LookupResult.RETRY)  # as the core numbers them
_REMEMBERED_REMOVALS = 1 << 16


def _as_connector(name: str):
    """Return the field of an option that torpor's own connector has, too."""
    (known,) = (f for f in fields(ConnectorOptions) if f.name == name)
    return field(default=known.default, repr=known.repr, metadata=known.metadata)


@dataclass(frozen=True)
class TierOptions:
    disk_dir: str | None = described(None, PATH, "directory of the blocks on disk, for one engine at a time")
    disk_bytes: int = described(
        0, BYTES, "disk for KV blocks, of each data parallel rank; the blocks outlive the process"
    )
    durable: bool = _as_connector("durable")
    kv_store: str | None = described(
        None,
        TEXT,
        "store in which engines share blocks, instead of disk_dir, as torpor's own connector has it",
    )
    kv_store_credentials: str | None = _as_connector("kv_store_credentials")
    kv_store_ca: str | None = _as_connector("kv_store_ca")
    kv_store_blocks: int = _as_connector("kv_store_blocks")
    kv_store_timeout_ms: int = _as_connector("kv_store_timeout_ms")
    kv_store_wait_ms: int = _as_connector("kv_store_wait_ms")
    kv_store_expire_days: float = _as_connector("kv_store_expire_days")
    block_compression: str = _as_connector("block_compression")
    key_file: str | None = described(None, PATH, "file with the key that authenticates blocks")
    encrypt: bool = described(False, SWITCH, "blocks are encrypted with the key")
    weights: str = described(
        "",
        TEXT,
        "name of the weights; blocks of another name are not found. Change it when the weights of a model change",
    )
    forget_on_reset: bool = described(
        False, SWITCH, "a reset of vLLM's prefix cache with its connector forgets the blocks, for weights that change"
    )
    enable_kv_events: bool = described(False, SWITCH, "vLLM's KV cache events name the blocks of this tier")
    threads: int = described(4, WHOLE, "threads that move bytes", least=2, most=256)

    @staticmethod
    def of(given: dict) -> TierOptions:
        """Raises InvalidArgument, naming an option that is wrong or unknown."""
        known = {f.name: f for f in fields(TierOptions)}
        if unknown := sorted(set(given) - set(known)):
            raise InvalidArgument(
                f"unknown option {', '.join(map(str, unknown))} of TorporTier", f"the options are {', '.join(known)}"
            )
        options = TierOptions(**{name: value_of(known[name], item, name) for name, item in given.items()})
        if (options.disk_dir is None) == (options.kv_store is None):
            raise InvalidArgument("TorporTier needs disk_dir or kv_store, one of them", "for both, name two tiers")
        if (options.disk_dir is None) != (options.disk_bytes == 0):
            raise InvalidArgument("disk_dir and disk_bytes go together", "give both, or kv_store alone")
        if options.encrypt and options.key_file is None:
            raise InvalidArgument("encrypt without key_file", "give the key")
        return options


def kv_namespace(spec, options: TierOptions) -> str:
    """Return all that the bytes of a block depend on besides its key, as far as a tier can know it.

    vLLM's own tiers compare the same fields, without the versions and the layout of a block. The weights are known by
    the model's name alone.
    """
    mapper = FileMapper.from_offloading_spec(
        root_dir="", offloading_spec=spec, blocks_per_file=spec.blocks_per_chunk, parallel_agnostic=True
    )
    described_ = mapper.get_run_config() | {
        "rank": mapper.rank,
        "kv_cache_layout": spec.config.kv_cache_layout,
        "vllm_version": vllm.__version__,
        "torch_version": torch.__version__,
        "weights": options.weights,
    }
    return "\n".join(f"{name}: {described_[name]}" for name in sorted(described_))


class TorporTier(SecondaryTierManager):
    """One store of torpor's. It passes all calls on to its core; only drain_jobs() waits for bytes."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self, offloading_spec, primary_kv_view: memoryview, tier_type: str, backpressure_detector=None, **given: Any
    ):
        locality = given.pop("locality", None)
        options = TierOptions.of(given)
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._options = options
        self._keys: dict[int, list[bytes]] = {}  # of jobs under way
        self._failed: list[JobResult] = []  # that could not begin
        self._loads: set[int] = set()
        self.locality = Locality(locality) if locality is not None else None
        if self.locality is None and options.kv_store is not None:
            self.locality = Locality.REMOTE
        self._events: list[OffloadingEvent] | None = None
        if options.enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events:
            self._events = []
        folder = directory_of_rank(options.disk_dir, offloading_spec.config.parallel.data_parallel_index)
        self._core: _core.BlockTier | None = _core.BlockTier(
            primary_kv_view,
            kv_namespace(offloading_spec, options),
            {
                "rank": 0,  # a row has the bytes of all ranks
                "directory": folder,
                "durable": options.durable and folder is not None,
                "key_file": options.key_file,
                "encrypt": options.encrypt,
                "kv_store_wait_ms": options.kv_store_wait_ms,
                "threads": options.threads,
                "remembered_removals": 0 if self._events is None else _REMEMBERED_REMOVALS,
            }
            | storage_options(options),
        )
        stats = self._core.stats()
        logger.info("torpor's tier: %s blocks found, I/O %s", stats["recovered_blocks"], stats["io"])

    @property
    def core(self) -> _core.BlockTier:
        assert self._core is not None, "the tier was shut down"
        return self._core

    # ---- vLLM's calls

    def lookup(self, key, req_context) -> LookupResult:
        return _LOOKUPS[self.core.lookup(key, req_context.req_id)]

    def submit_store(self, job_metadata) -> None:
        self._begin(job_metadata, lambda keys, rows: self.core.store(job_metadata.job_id, keys, rows))

    def submit_load(self, job_metadata) -> None:
        self._loads.add(job_metadata.job_id)
        request = job_metadata.req_context.req_id
        self._begin(job_metadata, lambda keys, rows: self.core.load(job_metadata.job_id, request, keys, rows))

    def _begin(self, job, call) -> None:
        keys = list(job.keys)
        self._keys[job.job_id] = keys
        try:
            call(keys, [int(chunk) for chunk in job.chunk_ids])
        except Error as problem:  # there is no memory to begin it
            logger.warning("torpor's tier: %s", problem)
            self._failed.append(self._result(job.job_id, [False] * len(keys), 0, 0.0))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        failed, self._failed = self._failed, []
        return failed + [self._result(*each) for each in self.core.finished()]

    def _result(self, job_id: int, good: list[bool], moved: int, seconds: float) -> JobResult:
        keys = self._keys.pop(job_id)
        there = tuple(key for key, came in zip(keys, good, strict=True) if came)
        load = job_id in self._loads
        self._loads.discard(job_id)
        if self._events is not None and not load and there:
            self._event(list(there), removed=False)
        return JobResult(
            job_id=job_id,
            success=all(good),
            successful_keys=there if load and there and not all(good) else None,
            transfer_time=seconds,
            transfer_bytes=moved,
        )

    def _event(self, keys: list[bytes], removed: bool) -> None:
        assert self._events is not None
        self._events.append(OffloadingEvent(keys=keys, medium=self.medium, removed=removed, locality=self.locality))

    def take_events(self) -> Iterable[OffloadingEvent]:
        if self._events is None:
            return ()
        if removed := self.core.take_removed():
            self._event(removed, removed=True)
        events, self._events = self._events, []
        return events

    def on_new_request(self, req_context) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context) -> None:
        self.core.request_finished(req_context.req_id)

    def on_schedule_end(self, context) -> None:
        self.core.ask()

    def drain_jobs(self) -> None:
        """Wait for all jobs. vLLM calls this for a reset of its cache, and for nothing else."""
        self.core.wait()
        if self._options.forget_on_reset:
            self.core.forget()

    def stats(self) -> dict:
        """Return counters of the store: blocks, bytes, errors."""
        return self.core.stats()

    def shutdown(self) -> None:
        core, self._core = self._core, None
        if core is None:
            return
        try:
            core.close()
        except Error as problem:  # vLLM's memory is free all the same; of an error vLLM would keep it for ever
            logger.warning("torpor's tier: not all that was stored is safe: %s", problem)
