# SPDX-License-Identifier: Apache-2.0
"""What cannot be preserved yet, by name. Asked before anything is touched; the engine serves on."""

from __future__ import annotations

import functools

import vllm
from vllm.v1.core.sched.scheduler import Scheduler

from torpor.vllm import compat, connector_groups, connector_sleep, kv_groups, other_connectors
from torpor.vllm.connector_options import ConnectorOptions
from torpor.vllm.kv_layout import scattered_blocks
from torpor.vllm.options import holds_memory_of
from torpor.vllm.scheduler_values import unknown_fields, unsupported_status


def unsupported_engine(vllm_config) -> list[str]:
    """Features of the configuration."""
    parallel = vllm_config.parallel_config
    staged = parallel.pipeline_parallel_size > 1
    checks = {
        "speculative decoding in a pipeline": staged and vllm_config.speculative_config is not None,
        "LoRA in a pipeline": staged and vllm_config.lora_config is not None,
        "multimodal models in a pipeline": staged and vllm_config.model_config.is_multimodal_model,
        "context parallelism": parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
        "an external launcher of several ranks": parallel.distributed_executor_backend == "external_launcher"
        and parallel.world_size > 1,
        "an encoder cache connector": vllm_config.ec_transfer_config is not None,
        "encoder-decoder models": vllm_config.model_config.is_encoder_decoder,
        "ReplaySSM": vllm_config.cache_config.use_replayssm,
    }
    return [name for name, found in checks.items() if found] + other_connectors.refusals(vllm_config)


def unsupported_by_connector(vllm_config, kv_cache_config, options: ConnectorOptions) -> list[str]:
    """Of the configuration, why torpor's KV connector cannot work with it."""
    parallel = vllm_config.parallel_config
    staged = parallel.pipeline_parallel_size > 1
    checks = {
        "prefix caching is off": not vllm_config.cache_config.enable_prefix_caching,
        "torpor does not hold the engine's memory": not holds_memory_of(vllm_config),
        "the role is not kv_both": vllm_config.kv_transfer_config.kv_role != "kv_both",
        "speculation in a pipeline": staged and vllm_config.speculative_config is not None,
        "LoRA in a pipeline": staged and vllm_config.lora_config is not None,
        "KV cache groups with windows in a pipeline": staged and connector_groups.need_whole_hits(kv_cache_config),
        "context parallelism": parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
    }
    found = [name for name, is_so in checks.items() if is_so] + connector_groups.unsupported(
        kv_cache_config, options.untried_states
    )
    found += connector_groups.unsupported_speculation(vllm_config.speculative_config, kv_cache_config)
    if layout := scattered_blocks(kv_cache_config):
        found.append(f"the KV cache layout {layout}")
    return found


def compute_for_each_other(vllm_config) -> bool:
    """Data parallel ranks with experts; engine cores without are independent, and say that they are one."""
    return vllm_config.parallel_config.data_parallel_size > 1


def rank_of(worker) -> int:
    """Return its number among the engine's workers. An external launcher numbers the processes of all engines."""
    return 0 if worker.vllm_config.parallel_config.world_size == 1 else worker.rank


def may_extend(vllm_config, scheduler) -> bool:
    """Whether a running request can be given tokens, which are computed as a prompt's on top of what it has.

    With speculation the newest of a request's several states is the one after the drafts that were accepted. vLLM takes
    the first for what it computes as a prompt's.
    """
    return vllm_config.speculative_config is None or not scheduler.has_mamba_layers


def base_of(scheduler: Scheduler) -> type:
    """The class of a scheduler without torpor's part (scheduler.py)."""
    return getattr(type(scheduler), "torpor_base", type(scheduler))


def lost_in_a_new_process(scheduler: Scheduler) -> list[str]:
    """The scheduler, if it has fields that vLLM's has not, by its class and them: nobody knows how to save those."""
    named = set(vars(scheduler))
    for cls in base_of(scheduler).__mro__:
        slots = vars(cls).get("__slots__", ())
        named.update([slots] if isinstance(slots, str) else slots)
    own = sorted(name for name in named - _scheduler_fields() if not name.startswith(("torpor_", "__")))
    return [f"the scheduler {base_of(scheduler).__name__} with {', '.join(own)}"] if own else []


@functools.cache
def _scheduler_fields() -> frozenset[str]:
    modules = compat.manifest(vllm.__version__).PARTS["engine"]
    classes = [cls for module in modules for cls in module.classes if cls.name in ("Scheduler", "AsyncScheduler")]
    return frozenset(name for cls in classes for name in cls.fields.split())


def unsupported_scheduler(scheduler: Scheduler, for_new_process: bool, transfers_end: bool = False) -> list[str]:
    """Features in use by the requests and the KV cache at this moment.

    `transfers_end`: the sleep waits until the transfers of a KV connector that is not torpor's have ended.
    """
    found = kv_groups.unsupported(scheduler.kv_cache_manager.coordinator.single_type_managers)
    if layout := scattered_blocks(scheduler.kv_cache_config):
        found.append(f"the KV cache layout {layout}")
    # what its connector has begun ends before the sleep
    moving = transfers_end or connector_sleep.side_of(scheduler) is not None
    if scheduler.deferred_frees and not moving:
        found.append("blocks that are freed when a step has ended")
    if getattr(scheduler, "deferred_loads", None) and not transfers_end:  # of a KV connector, since vLLM 0.33
        found.append("deferred loads")
    if getattr(scheduler, "_pending_encoder_input_ids", None):  # since vLLM 0.33
        found.append("images, sounds or videos whose content the workers have")
    if (scheduler.finished_recving_kv_req_ids or scheduler.failed_recving_kv_req_ids) and not moving:
        found.append("KV transfers in flight")
    for request in scheduler.requests.values():
        if transfers_end and request.is_finished():  # its KV is still being sent
            continue
        found += unsupported_status(request, may_load=moving)
        if for_new_process:
            found += unknown_fields(request)
    return sorted(set(found))
