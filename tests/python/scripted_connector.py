# SPDX-License-Identifier: Apache-2.0
"""A KV connector of the tests that is not torpor's. It sends the KV of each request that ends, and loads what was sent.

Both sides share LEDGER, where they live in one process; else nothing is loaded. A transfer takes as many steps as
LEDGER says, and its bytes move in the last one. The connector is as strict as one that registers memory with a network
card: it raises if a transfer finds no registration, if it is to unregister while a transfer is open, and if it is to
restore before the KV is what it was.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector


@dataclass
class Ledger:
    steps: int = 3  # that each transfer takes
    held: bool = False  # transfers do not get on
    failures: list[str] = field(default_factory=list)  # hooks that fail, each once
    sends_aborted: bool = False
    events: list[str] = field(default_factory=list)
    store: dict[tuple, list] = field(default_factory=dict)  # by tokens of whole blocks: of each layer, their KV
    open: set[str] = field(default_factory=set)  # transfers, from when the scheduler decides until the bytes have moved
    pool: object = None

    def take(self) -> list[str]:
        """What happened since the last call."""
        events, self.events = self.events, []
        return events


LEDGER = Ledger()


@dataclass
class Transfer:
    request: str
    tokens: tuple  # of whole blocks
    blocks: list[int]
    skipped: int = 0  # blocks of `tokens` that the device had already
    left: int = 0


@dataclass
class Meta(KVConnectorMetadata):
    loads: list[Transfer]
    sends: list[Transfer]


class ScriptedConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config, role: KVConnectorRole, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_tokens = vllm_config.cache_config.block_size
        self._blocks = kv_cache_config.num_blocks
        self._new = Meta([], [])  # for the next step
        self._caches: list[torch.Tensor] = []
        self._registered = False
        self._loading: list[Transfer] = []
        self._sending: list[Transfer] = []
        self._content: dict[int, list] = {}  # of blocks in use, when it unregistered
        extra, rank = self._kv_transfer_config.kv_connector_extra_config, vllm_config.parallel_config.rank
        self._log = f"{extra['log']}/{rank}" if "log" in extra and role is KVConnectorRole.WORKER else None
        if self._log and rank == extra["failing_rank"]:
            LEDGER.failures = ["unregister"]

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config) -> bool:
        return kv_transfer_config.kv_connector_extra_config.get("sleeps", True)

    # --- the scheduler ---

    def bind_gpu_block_pool(self, pool) -> None:
        LEDGER.pool = pool

    def get_num_new_matched_tokens(self, request, num_computed_tokens: int) -> tuple[int, bool]:
        found = self._found(request)
        return (len(found) - num_computed_tokens, True) if len(found) > num_computed_tokens else (0, False)

    def _found(self, request) -> tuple:
        most = (request.num_prompt_tokens - 1) // self._block_tokens * self._block_tokens
        tokens = tuple(request.prompt_token_ids[:most])
        return max((kept for kept in LEDGER.store if tokens[: len(kept)] == kept), key=len, default=())

    def update_state_after_alloc(self, request, blocks, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            tokens = self._found(request)
            skipped = (len(tokens) - num_external_tokens) // self._block_tokens
            own = blocks.get_block_ids()[0][skipped : len(tokens) // self._block_tokens]
            self._new.loads.append(Transfer(request.request_id, tokens, own, skipped))
            LEDGER.open.add(f"load {request.request_id}")

    def reset_cache(self) -> bool:
        """As vLLM's own: it cannot forget what is under way."""
        if LEDGER.open:
            return False
        LEDGER.store.clear()
        return True

    def build_connector_meta(self, scheduler_output) -> Meta:
        meta, self._new = self._new, Meta([], [])
        return meta

    def request_finished(self, request, block_ids: list[int]) -> tuple[bool, dict | None]:
        whole = min(request.num_computed_tokens, request.num_prompt_tokens) // self._block_tokens
        if whole == 0 or (request.status.name == "FINISHED_ABORTED" and not LEDGER.sends_aborted):
            return False, None
        tokens = tuple(request.prompt_token_ids[: whole * self._block_tokens])
        self._new.sends.append(Transfer(request.request_id, tokens, block_ids[:whole]))
        LEDGER.open.add(f"send {request.request_id}")
        return True, None

    def request_finished_all_groups(self, request, block_ids) -> tuple[bool, dict | None]:
        return self.request_finished(request, block_ids[0])

    # --- workers ---

    def _note(self, event: str) -> None:
        LEDGER.events.append(event)
        if self._log:
            with open(self._log, "a") as log:
                log.write(f"{event}\n")

    def _may_fail(self, hook: str) -> None:
        if hook in LEDGER.failures:
            LEDGER.failures.remove(hook)
            self._note(f"{hook} fails")
            raise RuntimeError(f"scripted failure of {hook}")

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = list(kv_caches.values())
        self._registered = True

    def unregister_kv_caches(self) -> None:
        self._may_fail("unregister")
        assert not LEDGER.open, f"unregistered while {sorted(LEDGER.open)} are open"
        assert not self._loading and not self._sending, "unregistered while transfers are under way"
        if self._registered and LEDGER.pool is not None:
            used = [block.block_id for block in LEDGER.pool.blocks[1:] if block.ref_cnt > 0]
            self._content = {block: self._read(block) for block in used}
        self._registered = False
        self._note("unregister")

    def restore_kv_caches(self) -> None:
        self._may_fail("restore")
        for block, before in self._content.items():
            same = all(torch.equal(one, other) for one, other in zip(before, self._read(block), strict=True))
            assert same, f"restored while block {block} has other content"
        self._content, self._registered = {}, True
        self._note("restore")

    def start_load_kv(self, forward_context, **kwargs) -> None:
        meta = self._get_connector_metadata()
        for transfer in (*meta.loads, *meta.sends):
            assert self._registered, "a transfer begins while nothing is registered"
            transfer.left = LEDGER.steps
        self._loading += meta.loads
        self._sending += meta.sends

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        loaded, self._loading = self._moved(self._loading)
        sent, self._sending = self._moved(self._sending)
        for transfer in loaded:
            for cache, kept in zip(self._caches, LEDGER.store[transfer.tokens], strict=True):
                for block, content in zip(transfer.blocks, kept[transfer.skipped :], strict=True):
                    self._of(cache, block).copy_(content)
        for transfer in sent:
            kept = [[self._of(cache, block).clone() for block in transfer.blocks] for cache in self._caches]
            LEDGER.store[transfer.tokens] = kept
        return KVConnectorTransferResults(
            finished_sending=self._end("send", sent), finished_recving=self._end("load", loaded)
        )

    def _moved(self, transfers: list[Transfer]) -> tuple[list[Transfer], list[Transfer]]:
        assert self._registered or not transfers, "a transfer is under way while nothing is registered"
        if LEDGER.held:
            return [], transfers
        for transfer in transfers:
            transfer.left -= 1
        return [t for t in transfers if t.left <= 0], [t for t in transfers if t.left > 0]

    def _end(self, kind: str, transfers: list[Transfer]) -> set[str]:
        for transfer in transfers:
            LEDGER.open.discard(f"{kind} {transfer.request}")
            self._note(kind)
        return {transfer.request for transfer in transfers}

    def _read(self, block: int) -> list[torch.Tensor]:
        return [self._of(cache, block).clone() for cache in self._caches]

    def _of(self, cache: torch.Tensor, block: int) -> torch.Tensor:
        return cache.select(list(cache.shape).index(self._blocks), block)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer, attn_metadata, **kwargs) -> None:
        pass

    def wait_for_save(self) -> None:
        pass


class Derived(MultiConnector):
    pass


class Inherits(ScriptedConnector):
    """As one from before vLLM 0.33."""

    unregister_kv_caches = getattr(KVConnectorBase_V1, "unregister_kv_caches", None)
    restore_kv_caches = getattr(KVConnectorBase_V1, "restore_kv_caches", None)
