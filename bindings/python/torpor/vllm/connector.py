# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV connector: while serving, full KV blocks go to host memory, disk and a store that engines share, and come
back on a prefix hit.

    --kv-transfer-config '{"kv_connector": "TorporConnector", "kv_connector_module_path": "torpor.vllm.connector",
                           "kv_role": "kv_both", "kv_connector_extra_config": {"host_bytes": "4GiB"}}'

or additional_config={"torpor": {"offload": "eager", "host_bytes": "4GiB"}}. vLLM makes one of it in the scheduler's
process and one in each worker; both sides here only translate, what is decided and copied is C++.
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorTransferResults

from torpor.errors import Unsupported
from torpor.vllm import call_hooks, connector_stats
from torpor.vllm.compat import lookup
from torpor.vllm.connector_base import ConnectorBase
from torpor.vllm.connector_messages import Orders, RankIsReady, Report
from torpor.vllm.connector_options import ConnectorOptions
from torpor.vllm.connector_scheduler import SchedulerSide
from torpor.vllm.connector_worker import WorkerSide
from torpor.vllm.options import Options
from torpor.vllm.plugin import require
from torpor.vllm.support import unsupported_by_connector

CacheHitSource = lookup("vllm.v1.metrics.cache_hit_source", "CacheHitSource")


class TorporConnector(ConnectorBase):
    """`scheduler` or `worker`, by its role; neither with offload="off"."""

    _cache_hit_source = CacheHitSource and CacheHitSource.HOST

    def __init__(self, vllm_config, role: KVConnectorRole, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        require("connector")
        given = self._kv_transfer_config.kv_connector_extra_config or {}
        options = ConnectorOptions.of(given, Options.of(vllm_config).checkpoint_dir)
        self.options = options.of_rank(vllm_config.parallel_config)
        self.scheduler: SchedulerSide | None = None
        self.worker: WorkerSide | None = None
        # What cannot be loaded is computed. vLLM would end the request, unless told otherwise.
        self._kv_transfer_config.kv_load_failure_policy = "recompute"
        if self.options.offload == "off":
            return
        if found := unsupported_by_connector(vllm_config, kv_cache_config, self.options):
            raise Unsupported(f"torpor's KV connector: {', '.join(found)}", 'leave it out, or set offload to "off"')
        if role is KVConnectorRole.SCHEDULER:
            self.scheduler = SchedulerSide(vllm_config, kv_cache_config, self.options)
        else:
            self.worker = WorkerSide(vllm_config, kv_cache_config, self.options)

    # --- workers ---

    def get_handshake_metadata(self) -> RankIsReady | None:
        """After the KV cache was allocated: what this rank has room for, and what its disk has kept."""
        return self.worker.prepare() if self.worker else None

    def start_load_kv(self, forward_context, **kwargs) -> None:
        if self.worker and self.has_connector_metadata():
            call_hooks.around(call_hooks.TRANSFER, None, self.worker.begin, self._get_connector_metadata())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self.worker is None:
            return KVConnectorTransferResults()
        self.worker.look()
        return KVConnectorTransferResults(
            finished_recving=self.worker.take_finished(), failed_recving=self.worker.take_failed()
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.take_bad_blocks() if self.worker else set()

    def build_connector_worker_meta(self) -> Report | None:
        return self.worker.take_report() if self.worker else None

    def unregister_kv_caches(self) -> None:
        """Do nothing. vLLM's MultiConnector calls this before a sleep, since 0.33; torpor's memory knows where the KV
        cache lies. What goes on from host memory to a disk or store is not waited for."""

    def restore_kv_caches(self) -> None:
        """Do nothing. vLLM's MultiConnector calls this after that sleep."""

    # --- the scheduler ---

    def bind_kv_cache_manager(self, kv_cache_manager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self.scheduler:
            self.scheduler.bind(kv_cache_manager)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict) -> None:
        if self.scheduler:
            ranks = [metadata[rank] for rank in sorted(metadata)]
            if not all(isinstance(rank, RankIsReady) for rank in ranks):  # MultiConnector hands on one connector's only
                other = next(type(rank).__name__ for rank in ranks if not isinstance(rank, RankIsReady))
                raise Unsupported(
                    f"torpor's KV connector inside MultiConnector beside one with a handshake of its own ({other})",
                    "use one of them",
                )
            self.scheduler.ranks_are_ready(ranks)

    def get_num_new_matched_tokens(self, request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self.scheduler is None:
            return 0, False
        match = self.scheduler.match
        tokens = call_hooks.around(call_hooks.MATCH, request.request_id, match, request, num_computed_tokens)
        return tokens, bool(tokens) and not self.scheduler.fits_in_step()

    def on_new_request(self, request) -> None:
        if self.scheduler:
            self.scheduler.queued(request)

    def update_state_after_alloc(self, request, blocks, num_external_tokens: int) -> None:
        if self.scheduler:
            allocated = self.scheduler.allocated
            call_hooks.around(call_hooks.ALLOCATE, request.request_id, allocated, request, num_external_tokens)

    def get_external_cache_hit_sources(self, request, num_external_tokens: int) -> dict:
        if self.scheduler is None or num_external_tokens == 0:
            return {}
        sources = (CacheHitSource.HOST, CacheHitSource.DISK, CacheHitSource.EXTERNAL_UNSPECIFIED)
        found = self.scheduler.tokens_of_load(request.request_id)
        return {source: tokens for source, tokens in zip(sources, found, strict=True) if tokens > 0}

    def build_connector_meta(self, scheduler_output) -> Orders:
        if self.scheduler is None:
            return Orders(0)
        state = scheduler_output.kv_connector_block_state
        handed = None if state is None else state.boundary_state_offloads
        return self.scheduler.step(scheduler_output.num_scheduled_tokens, handed)

    def update_connector_output(self, connector_output) -> None:
        if self.scheduler and connector_output.kv_connector_worker_meta is not None:
            report = connector_output.kv_connector_worker_meta
            call_hooks.around(call_hooks.REPORT, None, self.scheduler.reported, report)

    def request_finished(self, request, block_ids: list[int]) -> tuple[bool, dict | None]:
        if self.scheduler:
            call_hooks.around(call_hooks.FINISH, request.request_id, self.scheduler.finished, request)
        return False, None

    def has_pending_push_work(self) -> bool:
        return self.scheduler is not None and self.scheduler.busy()

    def has_transfers_of_device(self) -> bool:
        return self.scheduler is not None and self.scheduler.has_rest(everything=False)

    def has_pending_block_frees(self) -> bool:
        return self.scheduler is not None and self.scheduler.held() > 0

    def reset_cache(self) -> bool | None:
        return self.scheduler.reset() if self.scheduler else None

    def take_events(self) -> Iterable:
        return self.scheduler.take_events() if self.scheduler else ()

    def get_kv_connector_stats(self):
        return self.scheduler.take_stats() if self.scheduler else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict | None = None):
        return connector_stats.Stats() if data is None else connector_stats.Stats(data=data)

    @classmethod
    def build_prom_metrics(cls, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        return connector_stats.Metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self.worker:
            self.worker.close()
