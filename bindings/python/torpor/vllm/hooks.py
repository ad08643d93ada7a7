# SPDX-License-Identifier: Apache-2.0
"""EngineHooks (engine/engine_hooks.h) over vLLM: the C++ controller decides; a hook asks or tells vLLM one thing."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from concurrent.futures import Future

from vllm.sampling_params import SamplingType
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.request import RequestStatus

from torpor.errors import Incompatible, TimedOut
from torpor.vllm import block_versions, connector_adapters, connector_sleep, grammar, kept, pauses, plugin
from torpor.vllm import pool_values, weight_updates, worker_answers
from torpor.vllm import scheduler_values as values
from torpor.vllm.fingerprint import fingerprint
from torpor.vllm.forks import Forks
from torpor.vllm.inputs import Inputs
from torpor.vllm.deferred_blocks import DeferredBlocks
from torpor.vllm.other_connectors import OtherConnector, open_transfers
from torpor.vllm.scheduler import watch_recomputation
from torpor.vllm.sessions import Sessions
from torpor.vllm.support import lost_in_a_new_process, unsupported_engine, unsupported_scheduler

_KEPT_OVER_NEW_WEIGHTS = "\0kept"  # once for each time, after a request's own salt


class VllmHooks:
    """Of one EngineCore. Called between steps, in its thread."""

    def __init__(self, core):
        self.core = core
        self.scheduler: Scheduler = core.scheduler
        self.other_connector = OtherConnector(core)
        self.falling_asleep: dict | None = None  # options of the sleep under way; perhaps it is only being prepared
        self._pause_before_stop = PauseState.UNPAUSED  # what restart_ranks() puts back
        self._stopped_callback: Callable | None = None  # of the idle engine: all ranks have stopped
        self._quiet = False  # between quiesce() and resume()
        self.ranks_stopped = False  # with all other ranks, between stop_ranks() and restart_ranks()
        self._stopped_since = 0.0
        self.pause_seconds = 0.0  # the last time that it went on: from the end of its last step to then
        self._before_drain: PauseState | None = None  # while running requests end and no other is begun
        self._own_weight_version: str | None = None  # of this engine, before it was restored
        self._own_pause: dict | None = None  # the same
        self.pause_travels = False  # it falls asleep; an engine that is checkpointed goes on, and may be resumed
        self.sessions: Sessions | None = None  # set by the engine side that has these hooks, as is the next
        self.forks: Forks | None = None
        self.weights_epoch = 0  # how often KV from before was dropped or became that of other weights
        self.deferred: DeferredBlocks | None = None  # of the last post-copy wake
        self.for_new_process = False  # the next unsupported() is asked for a checkpoint, or for a wake from one
        self.bound: list[dict] = []  # requests of the last capture() that no checkpoint can hold: id, and why
        self._asked: Future | None = None  # the answers that the next unsupported() looks at, on their way
        self._checked: tuple[dict, dict] | None = None  # in tests: the last capture, and a copy of it
        self._workers: list[dict] = []  # what each is, which does not change; from the last unsupported() on
        self.restored: dict | None = (
            None  # the checkpoint that a new process was restored from, until its front end has it
        )

    def unsupported(self) -> list[str]:
        found = unsupported_engine(self.core.vllm_config)
        follows = self.other_connector.follows
        found += unsupported_scheduler(self.scheduler, self.for_new_process, transfers_end=follows and not self._quiet)
        if follows and self._quiet:
            found += [f"a KV connector with {each}" for each in open_transfers(self.scheduler)]
        if follows and self.for_new_process:
            found.append("a KV connector, whose own state a new process would lose; host memory keeps it")
        asked, self._asked = self._asked, None
        self._workers = workers = asked.result() if asked is not None else self._rpc("torpor_describe")
        if any(not w["v2"] and w["device_type"] != "cpu" for w in workers):
            found.append("model runner V1 on a GPU")
        if getattr(self.core, "eep_scaling_state", None) is not None:
            found.append("a change of the number of data parallel ranks under way")
        if any(not w["v2"] for w in workers) and self.core.vllm_config.scheduler_config.async_scheduling:
            found.append("async scheduling with model runner V1")
        if (blocks := self.scheduler.torpor_unproven) > 0:
            found.append(f"{blocks} KV blocks whose copies were never proven over")
        found += sorted({name for w in workers for name in w["unsupported"]})
        if self.for_new_process:
            if not self.scheduler.kv_cache_config.kv_cache_groups:
                found.append("a model without a KV cache, whose requests begin again; host memory keeps them")
            if images := self._images():
                count = sum(len(image["requests"]) for image in images)
                found.append(
                    f"hibernated requests ({count}); resume or abort them first; a sleep in host memory keeps them"
                )
            if self.forks is not None and (count := self.forks.unstarted()) > 0:
                found.append(f"forked requests that have not begun ({count}); let them take a step first")
            lost = lost_in_a_new_process(self.scheduler) + sorted({name for w in workers for name in w["lost"]})
            found += [f"{name}, whose own state a new process would lose; host memory keeps it" for name in lost]
            found += [f"{problem}; host memory keeps it" for problem in plugin.unknown_fields()]
        if elsewhere := sorted({name for w in workers for name in w.get("elsewhere", ())}):
            more = f" and {len(elsewhere) - 1} more" if len(elsewhere) > 1 else ""
            found.append(
                f"the parameter {elsewhere[0]}{more}, replaced by a tensor of its own: "
                "copy into it, or use load_weights()"
            )
        return found

    def _images(self) -> list[dict]:
        """Return the images of hibernated requests. Those that vLLM has preempted are computed again instead."""
        if self.sessions is None:
            return []
        preemptions = self.sessions.preemptions
        if preemptions is None:
            return self.sessions.summaries()
        if self._quiet:  # for the checkpoint itself, not for a plan
            preemptions.give_up()
        preempted = () if self._quiet else preemptions.images()
        return [each for each in self.sessions.summaries() if each["id"] not in preempted]

    def ask_workers(self) -> None:
        """Between quiesce() and unsupported(): what that looks at comes meanwhile."""
        self._asked = self._send("torpor_describe")

    def unfinished_requests(self) -> int:
        hibernated = {} if self.sessions is None else self.sessions.held()
        return len(self.scheduler.requests) + len(hibernated)

    def quiesce(self, timeout: float | None) -> None:
        # Utilities run between steps, so no step is running now.
        if self._quiet:
            return
        if not self.ranks_stopped:
            self._freeze()
        self._quiet = True
        try:
            began = time.monotonic()
            deadline = None if timeout is None else began + timeout
            self._finish_batches(deadline)
            self._stopped_since = time.monotonic()
            if self.sessions is not None:
                self.sessions.settle()
            self.end_transfers(timeout and timeout - (self._stopped_since - began))
            self._finish_transfers(deadline, everything=self.leaves_host_memory())
            self._rpc("torpor_settle", self._frees_memory())
        except BaseException:
            self.resume()
            raise

    def end_transfers(self, timeout: float | None) -> None:
        """End the transfers of a KV connector that is not torpor's, if the sleep under way frees memory.

        Raises TimedOut as OtherConnector.finish_transfers(); then no request has ended.
        """
        sleep = self.falling_asleep
        if sleep is None or not self._frees_memory():
            return
        if self.other_connector.follows:
            self.other_connector.finish_transfers(timeout)
            connector_sleep.let_those_with_blocks_go_first(self.scheduler)
        elif not sleep.get("preserve_state"):  # else it is refused
            self.other_connector.end_transfers(timeout)

    def _finish_transfers(self, deadline: float | None, everything: bool) -> None:
        side = connector_sleep.side_of(self.scheduler)
        if side is not None and connector_sleep.is_alone(self.scheduler):
            connector_sleep.finish_transfers(self.core, side, deadline, everything)

    def finish_stores(self, timeout: float | None) -> None:
        """Wait until all blocks of the KV connector are stored. The engine stands still, and is about to sleep to disk
        (leaves_host_memory())."""
        self._finish_transfers(None if timeout is None else time.monotonic() + timeout, everything=True)

    def leaves_host_memory(self) -> bool:
        """Whether a sleep is under way after which the process may end: what host memory alone has is lost then."""
        return self.falling_asleep is not None and self.falling_asleep.get("to") == "disk"

    def _frees_memory(self) -> bool:
        """Whether a sleep is under way that frees any. A checkpoint does not, and the engine soon goes on."""
        return self.falling_asleep is not None and self.falling_asleep.get("level", 1) > 0

    def frees_kv(self) -> bool:
        """Whether the sleep under way frees the KV cache. True if none is: what is unregistered is registered again."""
        sleep = self.falling_asleep or {}
        return sleep.get("level", 1) > 0 and "kv_cache" in (sleep.get("tags") or ("kv_cache",))

    def _freeze(self) -> None:
        """The engine takes no further step, not even the empty one that vLLM would take to hand over the ids of
        finished requests: it would move rows of the batch. vLLM's pauses go on meanwhile (freezing.py)."""
        self.end_drain()
        self.scheduler.torpor_frozen = True

    def stop_ranks(self) -> Future:
        """Stop with all ranks that compute for each other (data_parallel.py). The result is done when all have stopped.

        Until then each takes steps with empty batches. From then on no step is under way, and none begins before all
        ranks are in restart_ranks().
        """
        self.end_drain()
        self._pause_before_stop = self.scheduler.pause_state
        future = self.core.pause_scheduler("keep", False)
        self._stopped_callback = self.core._idle_state_callbacks[-1]
        self.scheduler.torpor_frozen = self.ranks_stopped = True
        return future

    def notify_stopped(self) -> None:
        """No rank takes a step any more: end stop_ranks(). Earlier pauses still wait for their requests."""
        callback, self._stopped_callback = self._stopped_callback, None
        if callback is not None and callback in self.core._idle_state_callbacks:
            self.core._idle_state_callbacks.remove(callback)
            callback(self.core)

    def restart_ranks(self) -> None:
        """Undo stop_ranks(). Waits until all other ranks do the same."""
        self.ranks_stopped = self.scheduler.torpor_frozen = False
        turned_away = pauses.turns_away(self.core)
        self.core.resume_scheduler()
        self.scheduler.set_pause_state(self._pause_before_stop)
        pauses.turn_away(self.core, turned_away)

    @property
    def wanted_pause(self) -> PauseState:
        """The pause state that vLLM's users have set."""
        if self.ranks_stopped:
            return self._pause_before_stop
        return self.scheduler.pause_state if self._before_drain is None else self._before_drain

    @wanted_pause.setter
    def wanted_pause(self, state: PauseState) -> None:
        """Stopped ranks stay stopped until restart_ranks()."""
        if self.ranks_stopped:
            self._pause_before_stop, state = state, PauseState.PAUSED_ALL
        self.scheduler.set_pause_state(state)

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
        if unfinished > 0:
            return unfinished
        # Blocks of torpor's connector that go on to a disk or store are not waited for.
        ending = self.scheduler.has_finished_requests() or self.other_connector.sends()
        return int(ending or bool(self.core.batch_queue))

    @property
    def is_draining(self) -> bool:
        return self._before_drain is not None

    def keep_draining(self) -> None:
        """vLLM's users have paused or resumed. While drain() lasts no queued request is begun all the same."""
        if self._before_drain is not None:
            self._before_drain = self.scheduler.pause_state
            if self._before_drain is PauseState.UNPAUSED:
                self.scheduler.set_pause_state(PauseState.PAUSED_NEW)

    def end_drain(self) -> None:
        if self._before_drain is not None:
            self.scheduler.set_pause_state(self._before_drain)
            self._before_drain = None

    def resume(self) -> None:
        if not self._quiet:  # called to undo a quiesce() that did not come so far
            return
        self._quiet = False
        self._asked = None
        self.pause_seconds = time.monotonic() - self._stopped_since
        if not self.ranks_stopped:
            self.scheduler.torpor_frozen = False

    @property
    def is_quiet(self) -> bool:
        return self._quiet

    @property
    def stopped_since(self) -> float:
        """Return when the engine last stopped, by the machine's monotonic clock; it may run again."""
        return self._stopped_since

    def end_pause(self) -> None:
        """Let a wake end the pause that vLLM's users have set, as vLLM's wake_up() does."""
        self.wanted_pause = PauseState.UNPAUSED
        self.keep_draining()
        pauses.turn_away(self.core, False)

    def capture(self) -> dict:
        if self.scheduler.torpor_frozen:  # else it is for a plan, and need not be exact
            values.assert_quiet(self.scheduler)
            self._put_pooling_back()
        state = self._state()
        if kept.CHECKED:
            self._check(state)
        bound = {item["id"]: item["engine"].get("bound") for item in state["scheduler"]["requests"]}
        self.bound = [{"id": request_id, "error": why} for request_id, why in bound.items() if why]
        watch_recomputation(self.scheduler)
        return state

    def _put_pooling_back(self) -> None:
        if values.put_pooling_back(self.scheduler):
            self._rpc("torpor_restart_pooling")

    def _state(self, anew: bool = False) -> dict:
        """Nothing of it is the engine's own, so that it can be read when that has gone on. `anew`: see worker.py."""
        sampling = {
            request_id: None if request.pooling_params is not None else kept.sampling(request)
            for request_id, request in self.scheduler.requests.items()
        }
        workers = self._send("torpor_capture", sampling, anew)  # they read theirs meanwhile
        blocks = block_versions.used_blocks(self.scheduler)
        state = {
            "scheduler": values.scheduler_to_value(self.scheduler),
            "kv": pool_values.pool_to_value(self.scheduler, blocks),
            "versions": block_versions.to_value(self.scheduler, blocks, self.core.vllm_config.speculative_config),
            "workers": workers.result(),
        }
        state["scheduler"]["engine"]["weight_version"] = self.core.get_weight_version()
        if self.sessions is not None:
            state["scheduler"]["engine"]["drawn_seeds"] = sorted(
                self.sessions.drawn_seeds & self.scheduler.requests.keys()
            )
        if self.pause_travels:
            state["scheduler"]["engine"]["pause"] = pauses.to_value(self.core, self.wanted_pause)
        return state

    def _check(self, state: dict) -> None:
        """In tests: it is as if nothing had been kept, and nobody has changed the one before."""
        with kept.made_anew():
            problem = kept.difference(state, self._state(anew=True))
        last, self._checked = self._checked, (state, copy.deepcopy(state))
        if problem is None and last is not None:
            problem = kept.difference(*last, "the state of the last capture")
        if problem is not None:
            raise AssertionError(problem)

    def kv_contents(self) -> dict:
        """What tells the contents of KV blocks apart, after restore()."""
        blocks = block_versions.used_blocks(self.scheduler)
        return {"blocks": [block.block_id for block in blocks]} | block_versions.to_value(
            self.scheduler, blocks, self.core.vllm_config.speculative_config
        )

    def host_slots(self, blocks: list[int], keep: bool) -> list[int]:
        """Of each block, the slot of the connector's host memory that has its bytes, or -1. `keep`: until
        release_host_slots()."""
        side = connector_sleep.side_of(self.scheduler)
        return [] if side is None else side.host_slots(blocks, keep)

    def release_host_slots(self) -> None:
        if (side := connector_sleep.side_of(self.scheduler)) is not None:
            side.release_host_slots()

    def fingerprint(self) -> dict[str, str]:
        return fingerprint(self.core.vllm_config, self.scheduler, self._workers or self._rpc("torpor_describe"))

    @property
    def kv_epoch(self) -> int:
        """Changes whenever KV that lies outside of the engine may have become that of other weights."""
        return self.weights_epoch + getattr(self.core, "torpor_weights_epochs", 0)

    def is_paused_with_requests(self) -> bool:
        return self.scheduler.pause_state is not PauseState.UNPAUSED and bool(self.scheduler.requests)

    def abort_requests(self) -> None:
        """End all requests; the prefix cache stays."""
        self.abort_hibernated()
        self._abort(None)

    def drop_requests(self, mode: str) -> None:
        """Drop the requests as `mode` says. A KV connector may send those that end, and then unregisters."""
        self.weights_epoch += 1
        watch_recomputation(self.scheduler)
        self.other_connector.restore(undoing=False)  # where the sleep could not keep the requests after all
        self.other_connector.end_transfers()  # of an engine that was only paused
        if mode != "abort":
            connector_sleep.take_back_loaded(self.scheduler)
            self._put_pooling_back()
        with connector_sleep.tiers_kept(self.scheduler):
            self._pause("abort" if mode == "abort" else "keep")
        if self.sessions is not None:
            self.sessions.send_drops()  # no step comes while it sleeps
        if self.falling_asleep is not None and self.frees_kv():
            self.other_connector.unregister()

    def abort_hibernated(self) -> None:
        """End the hibernated requests. By their ids: an abort of all requests leaves images on disk, because vLLM does
        the same when the process ends."""
        if self.sessions is not None:
            self._abort(list(self.sessions.held()))

    def _abort(self, requests: list[str] | None) -> None:
        aborted = self.scheduler.finish_requests(requests, RequestStatus.FINISHED_ABORTED)
        if (send := getattr(self.core, "_send_abort_outputs", None)) is not None:  # to another process
            send(aborted)

    def _pause(self, mode: str) -> None:
        """What vLLM's pause does with requests and caches, of an engine that stands still already."""
        if mode == "abort":
            self.abort_requests()
            self.other_connector.end_transfers()  # else blocks that are being sent would keep their hashes
        state = self.scheduler.pause_state
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL)  # else vLLM warns of requests in progress
        try:
            self.core._finish_pause(True)
        finally:
            self.scheduler.set_pause_state(state)

    def drop_prefix(self, block_ids: list[int]) -> None:
        pool = self.scheduler.kv_cache_manager.block_pool
        for block_id in block_ids:
            pool._maybe_evict_cached_block(pool.blocks[block_id])

    def retire_prefix(self) -> None:
        with connector_sleep.resets_ignored(self.scheduler):
            self.other_connector.forget_prefixes()
        self.weights_epoch += 1
        if (side := connector_sleep.side_of(self.scheduler)) is not None:
            side.new_weights()
        pool = self.scheduler.kv_cache_manager.block_pool
        for block in pool.blocks:
            pool._maybe_evict_cached_block(block)
        for request in self.scheduler.requests.values():
            if request.num_computed_tokens > 0:  # what it computes on top of old KV is found by nobody else either
                request.cache_salt = f"{request.cache_salt or ''}{_KEPT_OVER_NEW_WEIGHTS}"
                request.block_hashes.clear()
                request.update_block_hashes()
        if self.core.vllm_config.model_config.is_multimodal_model:  # outputs of the old encoder
            self.scheduler.reset_encoder_cache()
            self.core.model_executor.reset_encoder_cache()

    def keep_derived(self) -> None:
        """The workers keep over the next sleep what they could make anew, if it lies in host memory."""
        self._rpc("torpor_keep_derived")

    def release_derived(self) -> None:
        """Release what workers can make anew. If a sleep keeps no requests, drop_requests() unregisters later."""
        if self.frees_kv() and (self.falling_asleep is None or self.falling_asleep.get("preserve_state")):
            self.other_connector.unregister()
        self._rpc("torpor_release_derived")

    def rebuild_derived(self) -> None:
        self._rpc("torpor_rebuild_derived")
        self.other_connector.restore(undoing=self.falling_asleep is not None)

    def reconnect(self, workers: list[dict]) -> None:
        shared = None if isinstance(self.core, EngineCoreProc) else os.getpid()
        unseeded_waits = any(
            request.status is not RequestStatus.RUNNING
            and (params := request.sampling_params) is not None
            and params.sampling_type == SamplingType.RANDOM
            for request in self.scheduler.requests.values()
        )
        self._rpc("torpor_reconnect", workers, shared, unseeded_waits)

    def restore(self, checkpoint: dict) -> list[dict]:
        self._own_weight_version = self.core.get_weight_version()
        self._own_pause = pauses.to_value(self.core, self.wanted_pause)
        scheduler = checkpoint["scheduler"]
        scheduler["engine"] = scheduler["engine"] or {}  # a sleep without preserve_state has written no requests
        values.drop_from_workers(checkpoint)
        given = values.given_since(checkpoint)
        requests, failed = self._make_requests(checkpoint, {item["id"] for item in given})
        lost = {item["id"] for item in failed}
        values.empty_scheduler(self.scheduler)
        values.scheduler_from_value(self.scheduler, checkpoint["scheduler"], requests)
        pool_values.pool_from_value(self.scheduler, checkpoint["kv"], lost)
        pool_values.announce_blocks(self.scheduler)
        connector_sleep.announce_requests(self.scheduler)
        connector_adapters.restored(self.scheduler, checkpoint["scheduler"]["engine"].get("adapters_in_keys", False))
        self.scheduler.finished_req_ids |= lost  # so that the workers drop their rows at the next step
        inputs = {i: found.to_value() for i, request in requests.items() if (found := Inputs.of(request))}
        pool_values.renumber_tables(checkpoint)
        self._rpc("torpor_restore", checkpoint["workers"], given, inputs)
        if (version := checkpoint["scheduler"]["engine"].get("weight_version")) is not None:  # older ones have none
            self.core.set_weight_version(version)
        if (pause := checkpoint["scheduler"]["engine"].get("pause")) is not None:
            self.wanted_pause = pauses.from_value(self.core, pause)
        if self.sessions is not None:
            self.sessions.drawn_seeds |= set(checkpoint["scheduler"]["engine"].get("drawn_seeds", ()))
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
                if (why := values.not_taken(request, self.core.vllm_config)) is not None:
                    raise Incompatible(f"request {request.request_id}: {why}")
                if request.request_id in given:
                    request.spec_token_ids = []
                grammar.remember_beginning(request)
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

    def forget_restored(self) -> None:
        if self._own_weight_version is not None:
            self.core.set_weight_version(self._own_weight_version)
            self._own_weight_version = None
        if self._own_pause is not None:
            self.wanted_pause, self._own_pause = pauses.from_value(self.core, self._own_pause), None
        connector_sleep.forget_requests(self.scheduler)
        came_since = []
        if self.restored is not None:
            own = {item["id"] for item in self.restored["scheduler"]["requests"]}
            came_since = [request for i, request in self.scheduler.requests.items() if i not in own]
        values.empty_scheduler(self.scheduler)
        pool_values.empty_pool(self.scheduler)
        self._rpc("torpor_forget")
        self.restored = None
        for request in came_since:  # they have not begun
            self.scheduler.add_request(request)

    def holds_back(self) -> bool:
        """Whether cached blocks may come behind the engine: a KV connector would read and write them."""
        return self.scheduler.connector is None

    def hold_blocks(self, blocks: list[int]) -> None:
        self.deferred = DeferredBlocks(self.scheduler, blocks, self.core.torpor_side.controller.continue_wake)

    def release_blocks(self, arrived: list[int], lost: list[int], skipped: list[int], unproven: list[int]) -> list[str]:
        """No request has one of them: who wants a lost one is noticed then."""
        if self.deferred is not None:
            self.deferred.release(arrived, lost, skipped, unproven)
        return []

    def call_ranks(self, order: bytes) -> list[bytes]:
        maybe_written = weight_updates.take_weights_maybe_written(self.core)
        try:
            return self._rpc("torpor_rank", order, maybe_written)
        except BaseException:
            self.core.torpor_weights_maybe_written |= maybe_written
            raise

    def states_of_runners(self, requests: list[str]) -> list[list[dict]]:
        """Return, by rank, the state of each of these requests that its tokens do not tell (runner_v1, runner_v2)."""
        return self._rpc("torpor_request_states", requests)

    def _rpc(self, method: str, *arguments) -> list:
        worker_answers.check_answered(self.core)
        return self.core.collective_rpc(method, args=arguments)

    def _send(self, method: str, *arguments) -> Future:
        """The same for later; workers in this process have done it before this returns."""
        worker_answers.check_answered(self.core)
        return self.core.model_executor.collective_rpc(method, args=arguments, non_block=True)
