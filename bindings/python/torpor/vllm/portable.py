# SPDX-License-Identifier: Apache-2.0
"""TorporAdmit: requests that left a live engine come back by vLLM's own path for KV that was computed elsewhere.

This KV connector loads nothing but the KV of requests that sessions.py admits; of all others it knows nothing. What it
needs of vLLM is the part "portable" of the manifest. A request takes this way:

    admit() ─ the scheduler asks match() ─ it allocates blocks, allocated() ─ orders to the ranks ─ WorkerSide copies
    ─ the scheduler hears that the KV is there, arrived() ─ the next step computes the next token
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request, RequestStatus

from torpor import _core
from torpor.errors import Unsupported
from torpor.vllm import worker
from torpor.vllm.connector_base import ConnectorBase
from torpor.vllm.options import Options, holds_memory_of
from torpor.vllm.plugin import fits, require

logger = logging.getLogger("vllm.torpor")


@dataclass
class Orders(KVConnectorMetadata):
    """All ranks carry these out in one step, in this order."""

    runners: list[dict] = field(default_factory=list)  # requests that model runner V1 is about to be given as resumed
    loads: list[tuple[str, bytes]] = field(default_factory=list)  # of each request: what its rank memory is to do
    drops: list[bytes] = field(default_factory=list)  # images that nobody needs any more


def unsupported(vllm_config, kv_cache_config) -> list[str]:
    """Return the name of each setting of this engine with which no request can leave or enter it."""
    parallel = vllm_config.parallel_config
    groups = kv_cache_config.kv_cache_groups
    offloads = Options.of(vllm_config).offload_preempted
    checks = {
        "offload_preempted and async scheduling": offloads and vllm_config.scheduler_config.async_scheduling,
        "torpor does not hold the engine's memory": not holds_memory_of(vllm_config),
        "a pipeline": parallel.pipeline_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
        "data parallelism": parallel.data_parallel_size > 1,
        "speculation": vllm_config.speculative_config is not None,
        "LoRA": vllm_config.lora_config is not None,
        "layers without full attention, or several KV cache groups": len(groups) != 1
        or type(groups[0].kv_cache_spec) is not FullAttentionSpec,
    }
    return [name for name, is_so in checks.items() if is_so]


class TorporAdmit(ConnectorBase):
    """`scheduler` or `worker`, by its role."""

    def __init__(self, vllm_config, role: KVConnectorRole, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        require("portable")
        if found := unsupported(vllm_config, kv_cache_config):
            raise Unsupported(f"sessions with {', '.join(found)}", "leave the option sessions out")
        self.admissions: Admissions | None = None
        self.worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            fits("fork")  # its log and its tiers say so if forks alone are off
            self.admissions = Admissions()
        else:
            self.worker = WorkerSide()

    # --- workers ---

    def register_kv_caches(self, kv_caches) -> None:
        """The KV cache is allocated, in torpor's memory."""
        if self.worker:
            self.worker.bind(worker.of_this_process())

    def unregister_kv_caches(self) -> None:
        """Do nothing. vLLM's MultiConnector calls this before a sleep, since 0.33; torpor's memory knows where the KV
        cache lies."""

    def restore_kv_caches(self) -> None:
        """Do nothing. vLLM's MultiConnector calls this after that sleep."""

    def handle_preemptions(self, kv_connector_metadata) -> None:
        """Called before the model runner looks at the step."""
        if self.worker:
            self.worker.order_runner(kv_connector_metadata)

    def start_load_kv(self, forward_context, **kwargs) -> None:
        if self.worker and self.has_connector_metadata():
            self.worker.carry_out(self._get_connector_metadata())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self.worker is None:
            return KVConnectorTransferResults()
        received, failed = self.worker.take_results()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    # --- the scheduler ---

    def get_num_new_matched_tokens(self, request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.admissions.match(request, num_computed_tokens) if self.admissions else (0, False)

    def update_state_after_alloc(self, request, blocks, num_external_tokens: int) -> None:
        if self.admissions:
            self.admissions.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output) -> Orders:
        return self.admissions.step(scheduler_output.finished_req_ids) if self.admissions else Orders()

    def update_connector_output(self, connector_output) -> None:
        if self.admissions:
            self.admissions.arrived(connector_output.finished_recving or ())

    def request_finished(self, request, block_ids: list[int]) -> tuple[bool, dict | None]:
        if self.admissions:
            self.admissions.finished(request.request_id)
        return False, None

    def has_pending_push_work(self) -> bool:
        """While an image is to be freed the engine takes a step, which tells the ranks."""
        return self.admissions is not None and bool(self.admissions.orders.drops)


class AskedFirst(KVConnectorBase_V1):
    """A mixin of vLLM's MultiConnector: it asks only TorporAdmit for the KV of a request that comes back. The blocks of
    such a request have no keys until their KV is there, and other connectors expect keys."""

    def get_num_new_matched_tokens(self: Any, request, num_computed_tokens: int) -> tuple[int | None, bool]:
        place, ours = next((i, each) for i, each in enumerate(self.sub_connectors) if isinstance(each, TorporAdmit))
        if ours.admissions is None or not ours.admissions.brings(request.request_id):
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        tokens, loads = ours.get_num_new_matched_tokens(request, num_computed_tokens)
        if tokens:
            self._requests_to_connector[request.request_id] = place
        return tokens, loads


class Admissions:
    """The requests that are on their way into the engine, in the scheduler's process."""

    def __init__(self) -> None:
        self.images: _core.RequestImages | None = None  # until somebody hibernates a request
        self.orders = Orders()  # of the next step
        self.kv_epoch: Callable[[], int] = int  # changes when KV from before is not to be used any more
        # Of each request that has no blocks yet: its tokens with KV, the runners' part of it, and kv_epoch.
        self._admitted: dict[str, tuple[int, dict | None, int]] = {}
        # Of each request that had begun its prompt when it left: vLLM's count of what was cached of it then.
        self._counted: dict[str, Any] = {}
        self._loading: set[str] = set()
        self._ending: set[str] = set()  # ended, and the runners have not heard of it

    @property
    def requests(self) -> set[str]:
        """The requests whose KV has not arrived."""
        return {*self._admitted, *self._loading}

    def admit(self, request: Request, computed: int, for_runners: dict) -> None:
        """Expect this request, which is about to be added, and bring the KV of its first `computed` tokens.

        `for_runners`: what model runner V1 must know of one that has output tokens.
        """
        self._admitted[request.request_id] = (computed, for_runners, self.kv_epoch())
        request.num_computed_tokens = 0  # as vLLM wants it before it looks for KV
        if computed > 0:
            # The content of a block with an equal key has other last digits: nothing is to be found by keys.
            request.block_hashes.clear()
        if request.num_output_tokens > 0:
            request.num_preemptions += 1  # so vLLM resumes it when its KV is there, and does not begin it
            request.status = RequestStatus.PREEMPTED
            request.skip_reading_prefix_cache = False  # of prompt_logprobs, which it has had: it would skip its KV
        else:
            request.num_preemptions = 0  # with any, vLLM would resume one that the model runner never began
            if (counted := request.prefill_stats) is not None and any(vars(counted).values()):
                self._counted[request.request_id] = copy.copy(counted)

    def expect_again(self, request: Request, computed: int) -> None:
        """Bring the KV of the first `computed` tokens of a request that vLLM has preempted. The runners know it."""
        self._admitted[request.request_id] = (computed, None, self.kv_epoch())
        request.block_hashes.clear()  # as in admit()
        if request.num_output_tokens > 0:
            request.skip_reading_prefix_cache = False  # else vLLM would skip the KV that is brought

    def withdraw(self, request_id: str) -> None:
        """Do not expect a request that was not added after all."""
        self._admitted.pop(request_id, None)
        self._counted.pop(request_id, None)

    def brings(self, request_id: str) -> bool:
        """Return whether this request is admitted with KV, and has no blocks yet."""
        return self._admitted.get(request_id, (0,))[0] > 0

    def expects(self, request_id: str) -> bool:
        """Return whether this request is admitted, with KV or without, and has no blocks yet."""
        return request_id in self._admitted

    def match(self, request: Request, local: int) -> tuple[int | None, bool]:
        """Return how many tokens of the request have KV in an image, and whether they are to be loaded.

        `local`: tokens that vLLM found in its prefix cache; 0 for a request that has KV in an image.
        """
        found = self._admitted.get(request.request_id)
        if found is None:
            return 0, False
        if request.request_id in self._ending:
            return None, False  # a runner that hears of its end later would forget it then
        computed, for_runners, epoch = found
        if computed > 0 and epoch != self.kv_epoch():  # the weights have changed since: it computes its tokens again
            computed = 0
            self._admitted[request.request_id] = (0, for_runners, epoch)
            request.update_block_hashes()
        return computed, computed > 0

    def allocated(self, request: Request, blocks, external: int) -> None:
        """Its blocks are there. vLLM calls this again when the request is scheduled."""
        if (counted := self._counted.get(request.request_id)) is not None and request.prefill_stats is not None:
            request.prefill_stats = copy.copy(counted)  # vLLM has just counted the KV that comes back
        found = self._admitted.pop(request.request_id, None)
        if found is None or self.images is None:
            return
        request.update_block_hashes()  # vLLM registers its blocks under them when their content is there
        if request.num_output_tokens > 0 and found[1] is not None:
            self.orders.runners.append(found[1])
        if external == 0:
            self._release(request.request_id)
            return
        (block_ids,) = blocks.get_block_ids()
        self.orders.loads.append((request.request_id, self.images.admit_order(request.request_id, list(block_ids))))
        self._loading.add(request.request_id)

    def step(self, finished: set[str]) -> Orders:
        self._ending -= finished
        orders, self.orders = self.orders, Orders()
        return orders

    def arrived(self, requests) -> None:
        """All ranks have tried to load their KV. A rank that failed has vLLM compute the request's tokens again."""
        for request_id in requests:
            if request_id in self._loading:
                self._loading.discard(request_id)
                self._release(request_id)

    def finished(self, request_id: str) -> None:
        self._ending.add(request_id)
        self._counted.pop(request_id, None)
        if self._admitted.pop(request_id, None) is not None or request_id in self._loading:
            self._loading.discard(request_id)
            self._release(request_id)

    def _release(self, request_id: str) -> None:
        if self.images is not None and (drop := self.images.release(request_id)) is not None:
            self.orders.drops.append(drop)


class WorkerSide:
    """Has the memory of its worker's rank carry out the orders of a step, within that step."""

    def __init__(self) -> None:
        self._worker: Any = None  # a worker with torpor's mixin
        self._received: set[str] = set()
        self._failed: set[str] = set()

    def bind(self, mine) -> None:
        if mine is None:
            raise Unsupported("sessions: torpor does not hold the engine's memory", "leave the option sessions out")
        self._worker = weakref.proxy(mine)

    def order_runner(self, orders: Orders) -> None:
        for request in orders.runners:
            self._worker.torpor_expect(request)

    def carry_out(self, orders: Orders) -> None:
        for request_id, order in orders.loads:
            self._received.add(request_id)
            if (why := _core.admit_error(self._worker.torpor_rank(order))) is not None:
                self._failed.add(request_id)
                logger.error("the KV of request %s cannot be brought back; it is computed again: %s", request_id, why)
        for order in orders.drops:
            self._worker.torpor_rank(order)

    def take_results(self) -> tuple[set[str], set[str]]:
        """Return requests whose load is over, and those of them whose load failed."""
        received, self._received = self._received, set()
        failed, self._failed = self._failed, set()
        return received, failed
