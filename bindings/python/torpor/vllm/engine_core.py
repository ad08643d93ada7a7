"""The engine-core side: hooks for the C++ controller, and the one utility method `torpor_call` by which front ends reach it.

The controller decides; a hook asks or tells vLLM one thing.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from torpor import _core
from torpor.errors import Error, Incompatible, InvalidArgument, TimedOut, Unsupported
from torpor.vllm import block_stamps, connector_sleep, grammar, multimodal
from torpor.vllm import scheduler_values as values
from torpor.vllm.fingerprint import fingerprint
from torpor.vllm.options import Options, holds_memory_of
from torpor.vllm.slots import begin_events
from torpor.vllm.support import cannot_stand_still, unsupported_engine, unsupported_scheduler

_KEPT_OVER_NEW_WEIGHTS = "\0kept"  # once for each time, after a request's own salt
_ONLY_LOOK = ("fingerprint", "plan_sleep", "ledger", "state")
_WATCH_SECONDS = 0.5  # between looks whether the front end still lives

# Options that the controller takes as they are.
_CONTROLLER_OPTIONS = (
    "kv_budget_bytes",
    "keep_checkpoints",
    "max_age_seconds",
    "max_total_bytes",
    "key_file",
    "encrypt",
    "incremental",
    "compression_level",
    "weights_check",
)

# Methods of vLLM's workers that write no weights, or say so themselves. Of any other it is not known.
_WRITE_NO_WEIGHTS = frozenset({
    "check_health", "compute_weight_checksums", "get_model_inspection", "get_supported_tasks", "list_loras", "profile",
    "release_late_interaction_query_cache", "reload_weights", "synchronize_device", "update_max_model_len",
})  # fmt: skip


class VllmHooks:
    """EngineHooks (engine/engine_hooks.h) over one EngineCore. Called between steps, in the engine core's thread."""

    def __init__(self, core):
        self.core = core
        self.scheduler: Scheduler = core.scheduler
        self._was_paused = PauseState.UNPAUSED
        self._before_drain: PauseState | None = None  # while running requests end and no other is begun
        self._own_weight_version: str | None = None  # of this engine, before it was restored
        self.restored: dict | None = (
            None  # the checkpoint that a new process was restored from, until its front end has it
        )

    def unsupported(self) -> list[str]:
        found = unsupported_engine(self.core.vllm_config) + unsupported_scheduler(self.scheduler)
        workers = self._rpc("torpor_describe")
        if any(not w["v2"] and w["device_type"] != "cpu" for w in workers):
            found.append("model runner V1 on a GPU")
        if any(not w["v2"] for w in workers) and self.core.vllm_config.scheduler_config.async_scheduling:
            found.append("async scheduling with model runner V1")
        found += sorted({name for w in workers for name in w["unsupported"]})
        if elsewhere := sorted({name for w in workers for name in w.get("elsewhere", ())}):
            more = f" and {len(elsewhere) - 1} more" if len(elsewhere) > 1 else ""
            found.append(
                f"the parameter {elsewhere[0]}{more}, replaced by a tensor of its own: copy into it, or use load_weights()"
            )
        return found

    def unfinished_requests(self) -> int:
        return len(self.scheduler.requests)

    def quiesce(self, timeout: float | None) -> None:
        # Utilities run between steps, so no step is running now. The flag keeps the engine from taking another one, even
        # the empty one that vLLM would take to hand over the ids of finished requests: it would move rows of the batch.
        if self.scheduler.torpor_frozen:
            return
        self._was_paused = self.scheduler.pause_state if self._before_drain is None else self._before_drain
        self._before_drain = None
        self.scheduler.torpor_frozen = True
        try:
            self._finish_batches(None if timeout is None else time.monotonic() + timeout)
            self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
            if (side := connector_sleep.side_of(self.scheduler)) is not None:
                connector_sleep.finish_transfers(self.core, side)
            self._rpc("torpor_settle")
        except BaseException:
            self.resume()
            raise

    def _finish_batches(self, deadline: float | None) -> None:
        """With async scheduling batches are in flight between steps: their tokens are given to their readers."""
        while self.core.batch_queue:
            if deadline is not None and time.monotonic() >= deadline:
                raise TimedOut(f"{len(self.core.batch_queue)} batches are still in flight", "give it more time")
            outputs, executed = self.core.step_fn()  # it schedules nothing: the scheduler says that it has no requests
            connector_sleep.deliver(self.core, outputs)
            self.core.post_step(executed)

    def drain(self) -> int:
        """No queued request is begun from now on. Returns how many that were begun have not ended."""
        if self._before_drain is None:
            self._before_drain = self.scheduler.pause_state
            self.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        unfinished = self.scheduler.get_num_unfinished_requests()
        return unfinished or int(self.scheduler.has_requests() or bool(self.core.batch_queue))

    def end_drain(self) -> None:
        if self._before_drain is not None:
            self.scheduler.set_pause_state(self._before_drain)
            self._before_drain = None

    def resume(self) -> None:
        if not self.scheduler.torpor_frozen:  # called to undo a quiesce() that did not come so far
            return
        self.scheduler.torpor_frozen = False
        self.scheduler.set_pause_state(self._was_paused)

    def resume_paused(self) -> None:
        """The next resume() ends a pause from before too, as vLLM's wake_up() does."""
        self._was_paused = PauseState.UNPAUSED

    def capture(self) -> dict:
        if self.scheduler.torpor_frozen:  # else it is for a plan, and need not be exact
            values.assert_quiet(self.scheduler)
            values.put_pooling_back(self.scheduler)
        scheduler = values.scheduler_to_value(self.scheduler)
        sampling = {
            item["id"]: None if item["engine"].get("pooling") else item["sampling"] for item in scheduler["requests"]
        }
        state = {
            "scheduler": scheduler,
            "kv": values.pool_to_value(self.scheduler),
            "workers": self._rpc("torpor_capture", sampling),
            "stamps": block_stamps.to_value(self.scheduler, self.core.vllm_config.speculative_config),
        }
        state["scheduler"]["engine"]["weight_version"] = self.core.get_weight_version()
        watch_recomputation(self.scheduler)
        return state

    def kv_contents(self) -> dict:
        """What tells the contents of KV blocks apart, after restore()."""
        blocks = [block.block_id for block in block_stamps.used_blocks(self.scheduler)]
        return {"blocks": blocks} | block_stamps.to_value(self.scheduler, self.core.vllm_config.speculative_config)

    def fingerprint(self) -> dict[str, str]:
        return fingerprint(self.core.vllm_config, self.scheduler, self._rpc("torpor_describe"))

    def drop_requests(self, mode: str) -> None:
        watch_recomputation(self.scheduler)
        with connector_sleep.tiers_kept(self.scheduler):
            self.core.pause_scheduler("abort" if mode == "abort" else "keep", True)

    def drop_prefix(self, block_ids: list[int]) -> None:
        pool = self.scheduler.kv_cache_manager.block_pool
        for block_id in block_ids:
            pool._maybe_evict_cached_block(pool.blocks[block_id])

    def retire_prefix(self) -> None:
        if (side := connector_sleep.side_of(self.scheduler)) is not None:
            side.reset()
        pool = self.scheduler.kv_cache_manager.block_pool
        for block in pool.blocks:
            pool._maybe_evict_cached_block(block)
        for request in self.scheduler.requests.values():
            if request.num_computed_tokens > 0:  # what it computes on top of old KV is found by nobody else either
                request.cache_salt = f"{request.cache_salt or ''}{_KEPT_OVER_NEW_WEIGHTS}"
                request.block_hashes.clear()
                request.update_block_hashes()

    def release_derived(self) -> None:
        self._rpc("torpor_release_derived")

    def rebuild_derived(self) -> None:
        self._rpc("torpor_rebuild_derived")

    def reconnect(self, workers: list[dict]) -> None:
        self._rpc("torpor_reconnect", workers)

    def restore(self, checkpoint: dict) -> list[dict]:
        given = values.given_since(checkpoint)
        requests, failed = self._make_requests(checkpoint, {item["id"] for item in given})
        lost = {item["id"] for item in failed}
        values.empty_scheduler(self.scheduler)
        values.scheduler_from_value(self.scheduler, checkpoint["scheduler"], requests)
        values.pool_from_value(self.scheduler, checkpoint["kv"], lost)
        values.announce_blocks(self.scheduler)
        connector_sleep.tell_of_requests(self.scheduler)
        self.scheduler.finished_req_ids |= lost  # so that the workers drop their rows at the next step
        features = {i: multimodal.to_value(request.mm_features) for i, request in requests.items() if request.mm_features}
        self._rpc("torpor_restore", checkpoint["workers"], given, features)
        self._take_weight_version(checkpoint["scheduler"]["engine"].get("weight_version"))
        self.restored = checkpoint
        watch_recomputation(self.scheduler)
        return failed

    def _make_requests(self, checkpoint: dict, given: set[str]) -> tuple[dict, list[dict]]:
        """Requests by id; and those that cannot be made, each with why. They alone are lost.

        `given`: those that have more tokens than the workers know. What was drafted for them is of no use.
        """
        requests, failed = {}, []
        grammars = self.core.structured_output_manager
        unusable = self._load_adapters(checkpoint)
        for item in checkpoint["scheduler"]["requests"]:
            try:
                request = values.request_from_value(item, self.core.request_block_hasher)
                if request.lora_request is not None and (why := unusable.get(request.lora_request.lora_int_id)):
                    raise Incompatible(why, "give it the adapter that it began with")
                if request.request_id in given:
                    request.spec_token_ids = []
                grammars.grammar_init(request)
                requests[request.request_id] = request
            except Exception as problem:
                failed.append({"id": item["id"], "error": str(problem)})
        for request in [r for r in requests.values() if r.use_structured_output]:  # all compile meanwhile
            try:
                if request.status is not RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
                    grammar.replay(grammars, request)
            except Exception as problem:
                failed.append({"id": request.request_id, "error": str(problem)})
                del requests[request.request_id]
        return requests, failed

    def _load_adapters(self, checkpoint: dict) -> dict[int, str]:
        """LoRA adapters of the requests, the most recently used last. Returns which cannot be used, and why."""
        known = {each["id"]: each["digest"] for each in checkpoint["workers"][0]["engine"].get("adapters", ())}
        recency = list(known)
        named, begun = {}, set()
        for item in checkpoint["scheduler"]["requests"]:
            if (adapter := item["engine"].get("adapter")) is not None:
                number = adapter["lora_int_id"]
                named[number] = adapter
                if len(item["output_token_ids"]) > 0:
                    begun.add(number)
        unusable = {}
        for number in sorted(named, key=lambda n: recency.index(n) if n in known else len(recency)):
            if number in begun and number not in known:  # nothing says which weights its tokens come from
                unusable[number] = f"its LoRA adapter {named[number]['lora_name']} is in no checkpoint"
                continue
            problems = self._rpc("torpor_load_adapter", named[number], known.get(number))
            if why := next(filter(None, problems), None):
                unusable[number] = why
        return unusable

    def _take_weight_version(self, version: str | None) -> None:
        """vLLM's label of the weights; checkpoints from before it was saved have none."""
        self._own_weight_version = self.core.get_weight_version()
        if version is not None:
            self.core.set_weight_version(version)

    def forget_restored(self) -> None:
        if self._own_weight_version is not None:
            self.core.set_weight_version(self._own_weight_version)
            self._own_weight_version = None
        connector_sleep.forget_requests(self.scheduler)
        values.empty_scheduler(self.scheduler)
        values.empty_pool(self.scheduler)
        self._rpc("torpor_forget")
        self.restored = None

    def call_ranks(self, order: bytes) -> list[bytes]:
        return self._rpc("torpor_rank", order)

    def _rpc(self, method: str, *arguments) -> list:
        return self.core.collective_rpc(method, args=arguments)


class EngineSide:
    """What `torpor_call` reaches: the controller and its hooks, one pair an engine core."""

    def __init__(self, core):
        options = Options.of(core.vllm_config)
        _end_with_front_end()
        begin_events(core.vllm_config, "core")
        self.hooks = VllmHooks(core)
        self.controller = _core.SleepController(
            self.hooks,
            {"directory": options.dir}
            | {name: value for name in _CONTROLLER_OPTIONS if (value := getattr(options, name)) is not None},
        )

    def freeze(self, options: dict) -> dict:
        """Before the front end captures its part: no step from now on. Returns how many tokens each request has put out.

        A negative `timeout` is none here: the controller refuses it.
        """
        timeout = options.get("timeout")
        if not self.controller.is_sleeping():
            self.hooks.quiesce(None if timeout is None or timeout < 0 else timeout)
        return {
            request_id: len(request._output_token_ids) for request_id, request in self.hooks.scheduler.requests.items()
        }

    def unfreeze(self, _: dict) -> None:
        if not self.controller.is_sleeping():
            self.hooks.resume()

    def drain(self, options: dict) -> int:
        """Before a sleep with these options: how many requests have still to end. Called until none has."""
        if self.hooks._before_drain is None and (problems := self.controller.plan_sleep(options)["problems"]):
            raise InvalidArgument(problems[0])
        return self.hooks.drain()

    def end_drain(self, _: dict) -> None:
        """The sleep did not come about."""
        self.hooks.end_drain()

    def sleep(self, options: dict) -> dict:
        return self.controller.sleep(options)

    def checkpoint(self, options: dict) -> dict:
        return self.controller.checkpoint(options["outputs"], options.get("data_parallel", (0, 1)))

    def end_sleep(self, options: dict) -> dict:
        """Of one of several engines, which has kept all and waits: it sleeps, or it is as if nothing had been asked."""
        return self.controller.end_sleep(options["keep"])

    def fingerprint(self, _: dict) -> dict[str, str]:
        return self.controller.fingerprint()

    def wake_up(self, options: dict) -> dict:
        report = self.controller.wake_up(options)
        if self.hooks.restored is not None:
            report["outputs"] = _with_tokens(report["outputs"], self.hooks.restored)
            report["restored"] = _restored_requests(self.hooks.restored) if "answers" in options else []
        return report

    def end_hold(self, options: dict) -> None:
        self.controller.end_hold(options["keep"])
        self.hooks.restored = None

    def plan_sleep(self, options: dict) -> dict:
        return self.controller.plan_sleep(options)

    def ledger(self, _: dict) -> list:
        return self.controller.ledger()

    def state(self, _: dict) -> dict:
        return self.controller.state() | {"recomputed_tokens": getattr(self.hooks.scheduler, "torpor_recomputed", 0)}


def doubt_weights_after(core, method, rpc) -> None:
    """`rpc` is EngineCore's own, which has just called `method` of the workers."""
    if isinstance(method, str) and (method.startswith("torpor_") or method in _WRITE_NO_WEIGHTS):
        return
    if holds_memory_of(core.vllm_config):
        rpc(core, "torpor_doubt_weights")


def release_kv_cache_memory(core) -> None:
    """EngineCore.release_kv_cache_memory(): of a paused engine. Its requests are computed again after the wake."""
    if not core.is_scheduler_paused() or core.scheduler.has_requests() or core.batch_queue:
        raise RuntimeError("release_kv_cache_memory() requires a completed pause first")
    side = _side(core)
    if set(side.controller.state()["tags"].values()) - {"attached"}:
        raise RuntimeError("release_kv_cache_memory() requires all executor memory to be resident")
    side.controller.sleep({"level": 1, "in_flight": "recompute", "tags": ["kv_cache"]})
    side.hooks.resume_paused()


def _side(core) -> EngineSide:
    if not hasattr(core, "torpor_side"):
        core.torpor_side = EngineSide(core)
    return core.torpor_side


def torpor_call(core, method: str, options: dict) -> dict:
    """EngineCore's utility method. Returns {"result": …} or {"error": fields of an Error}: plain data."""
    known = (
        "drain", "end_drain", "freeze", "unfreeze", "sleep", "end_sleep", "wake_up", "end_hold", "checkpoint",
        "fingerprint", "plan_sleep", "ledger", "state",
    )  # fmt: skip
    if method not in known:
        return {"error": InvalidArgument(f"torpor has no method {method!r}").to_dict()}
    if method not in _ONLY_LOOK and (why := cannot_stand_still(core.vllm_config)) is not None:
        return {"error": Unsupported(why, "use one engine, or data parallelism without experts").to_dict()}
    try:
        return {"result": getattr(_side(core), method)(options)}
    except Error as error:
        return {"error": error.to_dict()}


def _end_with_front_end() -> None:
    """An engine core whose front end was killed can be reached by nobody, and would hold its memory for ever."""
    if multiprocessing.parent_process() is None:
        return
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="torpor-watch", daemon=True).start()


def _with_tokens(outputs, checkpoint: dict):
    """Adds to the front end's entries what the engine core has anyway: tokens and sampling parameters."""
    requests = {item["id"]: item for item in checkpoint["scheduler"]["requests"]}
    if not isinstance(outputs, dict):
        return outputs
    for entry in outputs["requests"]:
        if (item := requests.get(entry["id"])) is not None:
            entry |= {
                "prompt_token_ids": list(item["prompt_token_ids"]),
                "token_ids": list(item["output_token_ids"]),
                "sampling": item["sampling"],
                "arrival_time": item["arrival_time"],
                "pooling": item["engine"].get("pooling"),
            }
    return outputs


def _restored_requests(checkpoint: dict) -> list[dict]:
    """For a front end that keeps its own record of what was given: each request as it goes on."""
    return [
        {
            "id": item["id"],
            "prompt_token_ids": list(item["prompt_token_ids"]),
            "token_ids": list(item["output_token_ids"]),
            "sampling": item["sampling"],
            "arrival_time": item["arrival_time"],
        }
        for item in checkpoint["scheduler"]["requests"]
    ]


def watch_recomputation(scheduler: Scheduler) -> None:
    """From now on counts every token position that is scheduled although its KV exists at this moment."""
    scheduler.torpor_computed = {
        request_id: request.num_computed_tokens for request_id, request in scheduler.requests.items()
    }
    scheduler.torpor_recomputed = 0


def count_recomputed(scheduler: Scheduler, scheduled: dict[str, int]) -> None:
    """Called after each Scheduler.schedule() with its num_scheduled_tokens."""
    computed = getattr(scheduler, "torpor_computed", None)
    if not computed:
        return
    for request_id, count in scheduled.items():
        if (reached := computed.get(request_id)) is not None:
            start = scheduler.requests[request_id].num_computed_tokens - count
            scheduler.torpor_recomputed += max(0, min(count, reached - start))
