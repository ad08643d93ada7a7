# SPDX-License-Identifier: Apache-2.0
"""torpor's part of a worker: a mixin in front of the class that vLLM would take, which choose() names in
`parallel_config.worker_cls`. Its methods are reached by `collective_rpc`; their names begin with `torpor_`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from vllm.platforms import current_platform

from torpor import _core
from torpor.vllm import (
    adapters,
    call_hooks,
    connector_options,
    device,
    kept,
    kv_layout,
    other_connectors,
    plugin,
    pooling,
)
from torpor.vllm.inputs import Inputs
from torpor.vllm.memory import CpuWorkerMemory
from torpor.vllm.mixed_in import Stock
from torpor.vllm.named_mixins import NamedMixins
from torpor.vllm.options import Options, holds_memory_of
from torpor.vllm.slots import begin_events
from torpor.vllm.support import rank_of
from torpor.vllm.worker_memory import WorkerMemory, check_weights_awake

_of_this_process = None


def of_this_process():
    """The worker that has its KV cache in torpor's memory; the newest, if there were several."""
    return _of_this_process and _of_this_process()


def _in_regions(worker, tag: str) -> AbstractContextManager:
    """Where vLLM is about to allocate weights, KV or else: in regions."""
    global _of_this_process
    if tag == "kv_cache":
        _of_this_process = weakref.ref(worker)
    memory = _memory(worker)
    if tag == "weights":
        return _loading(worker.model_runner, memory.allocating(tag, worker.model_runner))
    return memory.allocating(tag, worker.model_runner)


@contextmanager
def _loading(runner, memory: AbstractContextManager):
    if current_platform.is_cpu():
        from torpor.vllm import cpu_generators

        cpu_generators.adopt(runner)
    with memory:
        yield
    adapters.remember_digests(runner)


def _memory(self) -> WorkerMemory:
    """This worker's memory; made when it is first asked for."""
    if not hasattr(self, "torpor_memory"):
        self.torpor_threads = torch.get_num_threads()  # drafting by n-grams changes it
        options = Options.of(self.vllm_config)
        alone = self.vllm_config.parallel_config.world_size == 1  # perhaps in the process of the scheduler
        begin_events(self.vllm_config, "core" if alone else "rank", rank_of(self))
        call_hooks.register_named(self.vllm_config)
        names = (
            "arena_budget_bytes", "arena_prefault_bytes", "copy_threads", "retain_kv_bytes", "host_compression",
            "spill_dir", "key_file", "encrypt",
        )  # fmt: skip
        of_rank = {"rank": rank_of(self)} | {name: getattr(options, name) for name in names}
        if current_platform.is_cpu():
            self.torpor_memory = CpuWorkerMemory(_core.RankMemory(of_rank), rank_of(self), options.cpu_linear)
        else:
            from torpor.vllm.gpu_memory import GpuWorkerMemory

            preserved = self.vllm_config.model_config.sleep_preserve_parameter_names
            self.torpor_memory = GpuWorkerMemory(self.device, of_rank, preserved)
    return self.torpor_memory


class WorkerMixin(Stock):
    """A worker whose memory is torpor's."""

    torpor_base: type  # the worker without torpor

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager:
        if holds_memory_of(self.vllm_config):
            if current_platform.is_cpu() and tag not in ("weights", "kv_cache"):
                return super()._maybe_get_memory_pool_context(tag)
            return _in_regions(self, tag)
        return super()._maybe_get_memory_pool_context(tag)

    def reload_weights(self, *args, **kwargs) -> None:
        with self.torpor_memory.reloading_weights() if hasattr(self, "torpor_memory") else nullcontext():
            super().reload_weights(*args, **kwargs)

    def add_lora(self, lora_request) -> bool:
        self._torpor_check_adapters("add_lora()")
        return super().add_lora(lora_request)

    def pin_lora(self, lora_id: int) -> bool:
        self._torpor_check_adapters("pin_lora()")
        return super().pin_lora(lora_id)

    def _torpor_check_adapters(self, call: str) -> None:
        """vLLM may copy the adapter to the device at once."""
        if hasattr(self, "torpor_memory"):
            check_weights_awake(self.torpor_memory.rank_memory, call, "runtime")

    def start_weight_update(self) -> None:
        self._torpor_check_update("start_weight_update()", of_draft=False)
        super().start_weight_update()

    def start_draft_weight_update(self) -> None:
        self._torpor_check_update("start_draft_weight_update()", of_draft=True)
        super().start_draft_weight_update()

    def update_weights(self, update_info) -> None:
        with self._torpor_updating("update_weights()"):
            super().update_weights(update_info)

    def finish_weight_update(self) -> None:
        with self._torpor_updating("finish_weight_update()"):
            super().finish_weight_update()

    def _torpor_check_update(self, call: str, of_draft: bool) -> None:
        """vLLM replaces the parameters before it has anything to write: refuse the call before that."""
        if hasattr(self, "torpor_memory"):
            check_weights_awake(self.torpor_memory.rank_memory, call, "runtime" if of_draft else "weights")

    @contextmanager
    def _torpor_updating(self, call: str) -> Iterator[None]:
        """Not every backend of vLLM's weight transfer calls the model's load_weights()."""
        of_draft = self._weight_update_is_draft
        self._torpor_check_update(call, of_draft)
        try:
            yield
        finally:
            if hasattr(self, "torpor_memory") and not of_draft:
                self.torpor_memory.note_new_weights()

    def compile_or_warm_up_model(self):
        """Begin to prefault host memory in the background when CUDA graphs are captured, not before.

        While one is captured the driver may refuse to pin memory, and the capture then fails as well.

        On a CPU, ask Linux for AMX first. vLLM's kernels ask in large steps only, and in small ones use it unasked: the
        first step after a wake may be small, and the process would end with SIGILL.
        """
        ask_for_amx = getattr(torch.cpu, "_init_amx", None)  # not public
        if current_platform.is_cpu() and ask_for_amx is not None:
            ask_for_amx()
        result = super().compile_or_warm_up_model()
        if hasattr(self, "torpor_memory"):
            self.torpor_memory.start_prefault()
        return result

    def shutdown(self) -> None:
        """Give back what vLLM's pools hold, so that another engine of this process can have it."""
        super().shutdown()
        if hasattr(self, "torpor_memory"):
            self.torpor_memory.close()

    def torpor_rank(self, order: bytes, weights_maybe_written: bool = False) -> bytes:
        """Passes an order of the controller to this rank's memory. A failure is in the reply.

        weights_maybe_written: somebody may have written them since the order before.
        """
        memory = self.torpor_memory
        if weights_maybe_written:
            memory.rank_memory.invalidate_digest("weights")
        if getattr(self.model_runner, "kv_caches", None) and not getattr(self, "_torpor_kv_described", False):
            memory.describe_kv(self.model_runner)
            self._torpor_kv_described = True
        if _core.order_name(order) == "restore":
            memory.make_room()
        reply = memory.rank_memory.call(order)
        memory.note_order()
        return reply

    def torpor_transfer(self, orders):
        """The connector's orders outside of a step, and what has ended: vLLM's KVConnectorOutput of it."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group
        from vllm.v1.outputs import KVConnectorOutput

        side = get_kv_transfer_group().worker
        side.begin(orders)
        side.look()
        return KVConnectorOutput(
            finished_recving=side.take_finished() or None,
            failed_recving=side.take_failed(),
            invalid_block_ids=side.take_bad_blocks(),
            kv_connector_worker_meta=side.take_report(),
        )

    def torpor_sync_blocks(self) -> None:
        """Wait until torpor's connector has stored its blocks, as durably as its options say."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        get_kv_transfer_group().worker.wait()

    def torpor_draw_again(self, step: int, requests: list[str]) -> None:
        """Let these requests draw again what they drew in a step of torpor's connector, and in later ones."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        for each in connector_options.members(get_kv_transfer_group()):
            if type(each).__name__ == connector_options.CLASS:
                each.worker.draw_again(step, requests)

    def torpor_weights_changed(self, by_content: bool) -> bool:
        """Return whether torpor's connector has KV of other weights than these (WorkerSide.weights_changed())."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        members = connector_options.members(get_kv_transfer_group())
        ours = [each for each in members if type(each).__name__ == connector_options.CLASS]
        return any([each.worker.weights_changed(by_content) for each in ours])

    def torpor_call_connector(self, hook: str) -> str | None:
        """Call a hook of a KV connector that is not torpor's alone. Returns why it failed."""
        return other_connectors.call_in_worker(rank_of(self), hook)

    def torpor_keep_derived(self) -> None:
        self.torpor_memory.keep_derived()

    def torpor_release_derived(self) -> None:
        self.torpor_memory.release_derived()

    def torpor_rebuild_derived(self) -> None:
        self.torpor_memory.rebuild_derived()

    def torpor_settle(self, falls_asleep: bool = False) -> None:
        """After the last batch in flight: what this worker still sends or waits for is done."""
        for handle in self._pp_send_work:  # to the next stage of a pipeline
            handle.wait()
        self._pp_send_work: list = []
        _runner(self).settle(self.model_runner)
        self.synchronize_device()
        if falls_asleep:
            self.torpor_memory.release_unused()

    def torpor_describe(self) -> dict:
        """What of this process can change tokens, and what torpor must know of its runner."""
        runner = self.model_runner
        return {
            "threads": self.torpor_threads,
            "device": device.describe(self.device),
            "device_type": self.device.type,
            "runner": type(runner).__name__,
            "v2": _is_v2(self),
            "attention": _runner(self).attention(runner) | kv_layout.packing(self.vllm_config),
            "unsupported": _runner(self).unsupported(runner),
            "lost": _runner(self).lost_in_a_new_process(runner),
            "elsewhere": self.torpor_memory.elsewhere(runner.model),
            "kv_layout": kv_layout.description(runner.kv_cache_config),
            "layers": kv_layout.layers(runner.kv_cache_config),
        }

    def torpor_capture(self, sampling: dict[str, dict], anew: bool = False) -> dict:
        """The batch, generators and requests of this worker, as values.

        `sampling`: the parameters of each unfinished request, by id, as values; None for one that begins again.
        `anew`: without what was kept of requests.
        """
        with kept.made_anew(anew):
            state = {"rank": rank_of(self)} | _runner(self).capture(self.model_runner, sampling)
        if (layout := self.torpor_memory.weights_layout) is not None:
            state["engine"]["weights"] = layout
        state["engine"]["adapters"] = adapters.loaded(self.model_runner)
        state["engine"]["adapter_slots"] = adapters.slots(self.model_runner)
        state["engine"]["queries"] = pooling.queries_to_value(_runner(self).queries(self.model_runner))
        return state

    def torpor_restart_pooling(self) -> None:
        """Forget what pooling requests have computed: all wait, and begin again."""
        _runner(self).restart_pooling(self.model_runner)

    def torpor_request_states(self, requests: list[str]) -> list[dict]:
        """Return the state of each of these requests that its tokens do not tell (runner_v1, runner_v2)."""
        return [_runner(self).request_to_value(self.model_runner, request_id) for request_id in requests]

    def torpor_expect(self, request: dict) -> None:
        """Prepare the model runner for a request that comes from an image (portable.py)."""
        of_runner = request["of_runners"][rank_of(self)]
        _runner(self).expect(self.model_runner, request | {"of_runner": of_runner})

    def torpor_reconnect(self, workers: list[dict], shared: int | None, unseeded_waits: bool) -> None:
        """The same worker lives on: back to where it was, whatever ran in this process meanwhile.

        `shared`: the process of the engine core, if that is a program's of vLLM's user. It may train while the engine
        sleeps: what it draws from a generator of the process stays drawn, if no unfinished request draws from that one.
        `unseeded_waits`: whether a request without a seed has not begun.
        """
        drawn = _runner(self).drawn_from(self.model_runner, unseeded_waits) if os.getpid() == shared else device.ALL
        with device.generators_kept(self.device, but=drawn):
            _runner(self).reconnect(self.model_runner, workers[rank_of(self)])
        self.synchronize_device()

    def torpor_restore(self, workers: list[dict], given_since: list[dict], inputs: dict[str, dict]) -> None:
        """A new worker: the batch is rebuilt as it was.

        `given_since`: requests whose readers were given more tokens than this state has. They get them too.
        `inputs`: what prompts have besides tokens, by request, as values.
        """
        self.model_runner.reset_encoder_cache()  # the scheduler's knows of nothing
        of_requests = {request_id: Inputs.from_value(value) for request_id, value in inputs.items()}
        own = workers[rank_of(self)]
        _runner(self).restore(self.model_runner, own, given_since, of_requests)
        queries = own["engine"].get("queries")  # absent in older checkpoints
        pooling.restore_queries(_runner(self).queries(self.model_runner), queries, self.device)
        adapters.place(self.model_runner, own["engine"].get("adapter_slots", []))
        self.synchronize_device()

    def torpor_load_adapter(self, adapter: dict, digest: str | None) -> str | None:
        """Loads a LoRA adapter. Returns why it is not the one with this digest, or cannot be loaded; None if it is."""
        return adapters.load(self.model_runner, adapter, digest)

    def torpor_forget(self) -> None:
        """Empties the batch."""
        _runner(self).forget(self.model_runner)
        pooling.restore_queries(_runner(self).queries(self.model_runner), None)

    def torpor_mark_dirty(self, tag: str) -> None:
        if tag == "weights":
            self.torpor_memory.note_new_weights()
        else:
            self.torpor_memory.rank_memory.mark_dirty(tag)


_MADE = NamedMixins(__name__, WorkerMixin)


def __getattr__(name: str) -> type:
    made = _MADE.find(name)
    plugin.require()
    return made


def choose(vllm_config) -> None:
    """Puts the mixin in front of this engine's workers. Doing it again changes nothing."""
    parallel = vllm_config.parallel_config
    if not _MADE.has(parallel.worker_cls):
        parallel.worker_cls = _MADE.named_by(parallel.worker_cls)


def _is_v2(worker) -> bool:
    return bool(getattr(worker, "use_v2_model_runner", False))


def _runner(worker) -> Any:
    """The module that knows this worker's model runner."""
    if _is_v2(worker):
        from torpor.vllm import runner_v2

        return runner_v2
    from torpor.vllm import runner_v1

    return runner_v1
