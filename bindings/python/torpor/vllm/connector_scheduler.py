# SPDX-License-Identifier: Apache-2.0
"""The connector in the scheduler's process: vLLM's hooks in the order in which they are called."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from torpor import _core
from torpor.vllm import connector_groups
from torpor.vllm.connector_adapters import AdapterKeys
from torpor.vllm.connector_failed import blocks_behind
from torpor.vllm.connector_messages import Orders, RankIsReady, Report
from torpor.vllm.connector_options import ConnectorOptions, keys_have_adapters
from torpor.vllm.connector_stats import Stats, with_bytes
from torpor.vllm.policy import Policy

logger = logging.getLogger("vllm.torpor")

_MEDIUM = {"device": "GPU", "host": "CPU", "disk": "STORAGE"}
_WAIT_SECONDS = 0.002  # of a step that computes nothing: a new request waits no longer for the next one
_WATERMARK_STEPS = 2  # lazy: blocks are looked at that many steps before vLLM evicts them
_MOST_EVENTS = 1 << 16
_STATS_SECONDS, _LAST_STATS_SECONDS = 1.0, 0.1
_RECOVERED_BYTES = 48  # of a block (bindings/connector_values.cpp)


def _size(bytes_: int) -> str:
    return f"{bytes_ / 2**30:.1f} GiB" if bytes_ >= 2**30 else f"{bytes_ / 2**20:.2f} MiB"


class SchedulerSide:
    """Until the ranks are ready it finds nothing and stores nothing."""

    def __init__(self, vllm_config, kv_cache_config, options: ConnectorOptions):
        self.options = options
        self._specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self.block_tokens = 0  # of a unit of prefixes: vLLM's hash covers so many
        self.ranks: int = vllm_config.parallel_config.world_size
        scheduling = vllm_config.scheduler_config
        in_a_step = sum(scheduling.max_num_batched_tokens // spec.block_size for spec in self._specs)
        self.watermark = _WATERMARK_STEPS * (in_a_step + scheduling.max_num_seqs * len(self._specs))
        events = vllm_config.kv_events_config
        self.events = _MOST_EVENTS if events is not None and events.enable_kv_cache_events else 0
        # vLLM hands over a step's tokens before its drafting model has written KV: what came of a step proves no more
        # than that the steps before it are over.
        self._steps_behind = 1 if vllm_config.speculative_config is not None else 0
        self.core: _core.ConnectorScheduler | None = None
        self.policy: Policy | None = None
        if options.policy is not None:
            self.policy = Policy(options.policy, options.policy_timeout_ms / 1000)
        self.adapters = AdapterKeys() if keys_have_adapters(vllm_config, options) else None
        self.kept = False  # whatever vLLM resets
        self.loads_within_step = False  # the scheduler takes back a request whose load within a step failed
        self.bad_blocks: set[int] = set()  # of the engine: without valid content, after such a load
        self.bad_since = 0  # the first step that computed on top of them
        self.draw_again: Callable[[int, list[str]], None] | None = None  # of the workers (connector_begin_again.py)
        # Steps in flight, from the first with such a load on: the blocks of each request that computes, by its id.
        self._computing: dict[int, dict[str, list]] = {}
        self._last_loading_step = 0  # that had such a load
        self.weights_maybe_written = False  # somebody may have written them unseen since the last namespace began
        self.slots = None  # who tells where requests stand (slots.py); None: nobody listens
        self.steps = 0
        self.recovered_blocks = 0
        self._hash_bytes = 0  # of vLLM's algorithm; as the first request has it
        self._adopted: bytes | None = None
        self._space: tuple[int, str, str] | None = None
        self._shared_word = ""  # of the remote store: every engine has the same until it is reset
        self._word = "" if options.disk_folder is None else _core.cache_epoch(options.disk_folder)
        self.block_bytes = 0  # of all ranks
        self._capacity: dict[str, int] = {}
        self._has_lower = False  # a tier below host memory
        self._counted: dict[str, int] = {}  # counters as they were told last
        self._published_at = 0.0

    def bind(self, manager) -> None:
        """Called once, with vLLM's KVCacheManager. It refuses a reset while blocks are held: nobody holds one then."""
        self._manager = manager
        self.block_tokens = manager.block_pool.hash_block_size
        stock_reset = manager.reset_prefix_cache

        def reset_prefix_cache(*args, **kwargs):
            if self.core is not None:
                self.core.release_all()
            return stock_reset(*args, **kwargs)

        manager.reset_prefix_cache = reset_prefix_cache

    def ranks_are_ready(self, ranks: list[RankIsReady]) -> None:
        """Stores are as large as the smallest rank's. Told again after a wake, they stay as they are."""
        if self.core is not None:
            return
        managers = self._manager.coordinator.single_type_managers
        smallest = {name: min(rank.sizes[name] for rank in ranks) for name in ranks[0].sizes}
        self.block_bytes = sum(rank.sizes["block_bytes"] for rank in ranks)
        largest_block = max(rank.sizes["block_bytes"] for rank in ranks)
        del smallest["block_bytes"]
        if smallest["host_slots"] == 0 and smallest["disk_segments"] == 0:
            logger.warning("nothing is offloaded: a rank has no room for blocks")
            return
        self.core = _core.ConnectorScheduler(
            self._manager.block_pool,
            [
                (manager.req_to_blocks, manager.num_cached_block, *connector_groups.reach(spec), spec.block_size)
                for manager, spec in zip(managers, self._specs, strict=True)
            ],
            smallest
            | self.options.queue()
            | self.options.of_sessions()
            | {
                "lazy": self.options.offload == "lazy",
                "ranks": self.ranks,
                "block_tokens": self.block_tokens,
                "stride_tokens": self._manager.coordinator.scheduler_block_size,
                "partial_hits": self._manager.coordinator.enable_partial_hash_hits,
                "min_uses": self.options.min_uses,
                "min_prefix_tokens": self.options.min_prefix_tokens,
                "watermark": self.watermark,
                "drop_last_block": connector_groups.drops_last_block(managers),
                "sync_load_blocks": self.options.sync_load_budget_bytes // largest_block if self._loads_within() else 0,
                "events": self.events,
                "kv_store_wait_ms": self.options.kv_store_wait_ms,
            },
        )
        if self.policy is not None:
            self.core.use_policy(self.policy.ask)
        if smallest["disk_segments"] > 0:
            self._adopted = self.core.adopt([rank.recovered for rank in ranks])
            self.recovered_blocks = len(self._adopted) // _RECOVERED_BYTES
        self._has_lower = smallest["disk_segments"] > 0 or self.options.kv_store is not None
        self._capacity = {
            "host_capacity_blocks": smallest["host_slots"],
            "disk_capacity_blocks": smallest["disk_segments"] * smallest["segment_slots"],
        }
        logger.info(
            "torpor's KV connector (%s): room for %s in host memory and %s on disk, where %d blocks were found again; "
            "a block has %s%s",
            self.options.offload,
            *(f"{blocks} blocks ({_size(blocks * self.block_bytes)})" for blocks in self._capacity.values()),
            self.recovered_blocks,
            _size(self.block_bytes),
            "; blocks are shared through a store" if self.options.kv_store else "",
        )

    def _loads_within(self) -> bool:
        """Return whether loads can end within a step: vLLM can be told of one that failed then."""
        sees_all = len(self._specs) == 1 and not any(connector_groups.reach(self._specs[0]))
        return self.loads_within_step and sees_all

    # --- requests ---

    def queued(self, request) -> None:
        """A request waits. If the next step does not reach it, its blocks come into host memory meanwhile."""
        if self.core is not None:
            self.core.know(request)  # also one whose blocks are never looked up: it fills blocks, and has a session
        if (keys := self._keys_with_adapter(request)) is None or keys.begin(request):
            self._look_ahead(request)

    def _look_ahead(self, request) -> None:
        if self.core is not None and self._has_lower and not request.skip_reading_prefix_cache:
            self.core.queued(request)

    def _keys_with_adapter(self, request) -> AdapterKeys | None:
        """Return who makes the request's keys, if they depend on a LoRA adapter."""
        return self.adapters if self.core is not None and request.lora_request is not None else None

    def _has_new_keys(self, request) -> None:
        """A request without blocks has other keys: what was found by the earlier ones is none of its."""
        if self.core is not None:
            self.core.finished(request.request_id, self.steps, False)
            self.core.know(request)
        self._look_ahead(request)

    def fits_in_step(self) -> bool:
        """Return whether the load that match() found last can end before the forward pass of the present step."""
        return self.core is not None and self.core.fits_in_step

    def match(self, request, computed: int) -> int | None:
        if self.core is None:
            return 0
        if (keys := self._keys_with_adapter(request)) is not None and (anew := keys.look(request)) is not False:
            if anew:
                self._has_new_keys(request)
            return None  # vLLM has looked into its own prefix cache by the earlier keys
        if request.skip_reading_prefix_cache:
            return 0
        if self._hash_bytes == 0 and request.block_hashes:
            self._hash_bytes = len(request.block_hashes[0])
            if self.policy is not None:
                self.policy.hash_bytes = self._hash_bytes
        if self.slots is not None:
            self.slots.know(request)  # before what is told of it
        found = self.core.match(request, computed)
        if self.slots is not None:
            self.slots.staged(request, (found or 0) // self.block_tokens)
        return found

    def allocated(self, request, external: int) -> None:
        if self.core is not None:
            local, other = None, 0
            if (counted := request.prefill_stats) is not None and request.num_preemptions <= 0:
                other = counted.num_external_cached_tokens - external
                # Tokens are computed already where it comes back from its load, without another look-up.
                if external > 0 or request.num_computed_tokens == 0:
                    local = counted.num_local_cached_tokens
            within_step = self.core.allocated(request.request_id, external, local, other)
            if external > 0 and self.slots is not None and not within_step:
                self.slots.loading(request.request_id, external // self.block_tokens)

    def tokens_of_load(self, request_id: str) -> list[int]:
        """Return the tokens of a request's last load that came from host memory, disk and the remote store."""
        return [0, 0, 0] if self.core is None else self.core.tokens_of_load(request_id)

    def know(self, request) -> None:
        """One that was begun in an earlier process."""
        if self.core is not None:
            if (keys := self._keys_with_adapter(request)) is not None:
                keys.restore(request)
            self.core.know(request)

    def finished(self, request) -> None:
        if self.core is not None:
            if self.adapters is not None:
                self.adapters.end(request.request_id)
            self.core.finished(request.request_id, self.steps, request.prefill_stats is None)

    # --- steps ---

    def step(self, scheduled: dict[str, int], handed: dict[str, list] | None = None) -> Orders:
        """`handed`: by request, the blocks of states that vLLM hands over in this step."""
        self.steps += 1
        if self.core is None:
            return self._orders(None)
        orders = self._orders(self.core.step(self.steps, scheduled, handed=handed or {}))
        orders.within_step = self.core.take_loads_within_step()
        if orders.within_step:
            self._last_loading_step = self.steps
        if orders.within_step or self._computing:
            tables = self._manager.coordinator.single_type_managers[0].req_to_blocks
            self._computing[self.steps] = {request_id: tables[request_id] for request_id in scheduled}
        if not scheduled and self.core.busy:
            orders.wait_seconds = _WAIT_SECONDS
        return orders

    def has_rest(self, everything: bool) -> bool:
        """Whether rest() has something to order, or something of that is under way."""
        return self.core is not None and (self.core.busy if everything else self.core.device_busy)

    def rest(self, everything: bool) -> Orders:
        """Order what is left to do when no step is taken any more: copies from and to the device, and what sessions
        wait for; `everything`: also those between host memory, disk and the remote store."""
        assert self.core is not None
        self.steps += 1
        orders = self._orders(self.core.plan(True, not everything))
        orders.wait_seconds = _WAIT_SECONDS
        return orders

    def _orders(self, plan: bytes | None) -> Orders:
        orders = Orders(self.steps, self._adopted, self._space, plan)
        if self._space is not None:
            orders.weights_maybe_written, self.weights_maybe_written = self.weights_maybe_written, False
        self._adopted = self._space = None
        if self.adapters is not None:
            orders.adapter = self.adapters.take_wanted()
        return orders

    def reported(self, report: Report) -> None:
        if self.core is None:
            return
        self.core.apply(report.transfers)
        if failed := self.core.take_failed_within_step():
            # Steps in flight have begun on top of these blocks. What they fill is not offered either:
            # take_back_failed() removes it from vLLM's prefix cache.
            in_flight = [tables for step, tables in self._computing.items() if step > report.step]
            self.bad_blocks |= blocks_behind(failed, self._computing[report.step], in_flight)
            self.bad_since = report.step
            self.core.fail_step(report.step)
        else:
            self.core.acknowledge(max(report.step - self._steps_behind, 0))
        self._computing.pop(report.step, None)
        if report.step >= self._last_loading_step:
            self._computing.clear()
        if report.new_weights:
            self.new_weights()
        if self.adapters is not None:
            for request in self.adapters.reported(report):
                self._has_new_keys(request)

    def invalidate_adapters(self) -> None:
        """Somebody may have changed the content of LoRA adapters since the last step."""
        if self.adapters is not None:
            self.adapters.invalidate(self.steps)
        else:
            self.weights_maybe_written = True  # keys name them, and nothing tells their contents apart

    def reset(self) -> bool:
        """What the tiers have is found by nobody any more, after a restart neither."""
        if self.core is not None and not self.kept:
            if (folder := self.options.disk_folder) is not None:
                self._word = _core.renew_cache_epoch(folder)
            self._shared_word = secrets.token_hex(16)
            self.new_weights()
            if self._space is not None:  # perhaps since before, with the old words
                self._space = (self._space[0], self._word, self._shared_word)
        return True

    def new_weights(self) -> None:
        """Begin a namespace: what others computed is found again with those weights only."""
        if self.core is not None and not self.begins_namespace():
            self._space = (self.core.reset(), self._word, self._shared_word)

    def begins_namespace(self) -> bool:
        """Whether the workers open one with the next orders, for the weights as they are then."""
        return self._space is not None

    def busy(self) -> bool:
        return self.core is not None and self.core.busy

    def held(self) -> int:
        return 0 if self.core is None else self.core.held

    # --- sleep ---

    def host_slots(self, blocks: list[int], keep: bool) -> list[int]:
        return [] if self.core is None else self.core.host_slots(blocks, keep)

    def release_host_slots(self) -> None:
        if self.core is not None:
            self.core.release_host_slots()

    # --- what others are told ---

    def stats(self) -> dict[str, int]:
        """Counters since the beginning, and what there is now."""
        if self.core is None:
            return {}
        counted = self.core.stats() | {"recovered_blocks": self.recovered_blocks} | self._capacity
        if self.policy is not None:
            counted |= {f"policy_{result}": count for result, count in self.policy.counts.items()}
        return with_bytes(counted, self.block_bytes)

    def take_stats(self) -> Stats | None:
        """Once a second while there is something to do, and soon after."""
        if self.core is None or (waited := time.monotonic() - self._published_at) < _LAST_STATS_SECONDS:
            return None
        if waited < _STATS_SECONDS and self.core.busy:
            return None
        self._published_at += waited
        stats = Stats.since(self._counted, self.stats(), self.core.take_times())
        return None if stats.is_empty() else stats

    def take_events(self) -> list:
        """vLLM's, by medium. The tokens of a block are known from when it was announced on the device."""
        taken = None if self.core is None or not self.events else self.core.take_events()
        if taken is None:
            return []
        events = [AllBlocksCleared()] if taken["cleared"] else []
        for stored, store, key, parent, group in taken["events"]:
            hashes = [self._external(key)]
            if stored:
                events.append(
                    BlockStored(
                        block_hashes=hashes,
                        parent_block_hash=self._external(parent) if any(parent) else None,
                        token_ids=[],
                        block_size=self._specs[group].block_size,
                        lora_id=None,
                        medium=_MEDIUM[store],
                        lora_name=None,
                        group_idx=group,
                    )
                )
            else:
                events.append(BlockRemoved(block_hashes=hashes, medium=_MEDIUM[store], group_idx=group))
        return events

    def _external(self, key: bytes):
        return maybe_convert_block_hash(key[: self._hash_bytes])
