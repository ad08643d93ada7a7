# SPDX-License-Identifier: Apache-2.0
"""The engine-core side: controller, hooks, and the mixin with the utility method `torpor_call`, by which front ends
reach them."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore, EngineCoreProc

from torpor import _core
from torpor.errors import Error, InvalidArgument, Unsupported, WrongState
from torpor.vllm import call_hooks, connector_sleep, freezing, idle_sessions, plugin, residency, slots, worker_answers
from torpor.vllm.asking import asks
from torpor.vllm.forks import Forks
from torpor.vllm.hooks import VllmHooks
from torpor.vllm.mixed_in import Stock, mix_in
from torpor.vllm.options import Options, holds_memory_of
from torpor.vllm.patching import Patches
from torpor.vllm.preemptions import Preemptions
from torpor.vllm.sessions import Sessions
from torpor.vllm.slots import begin_events
from torpor.vllm.support import compute_for_each_other, may_extend
from torpor.vllm.weight_updates import Updates, advance_weights_epoch, invalidate_adapters, note_weights_maybe_written
from torpor.vllm.worker_answers import note_timeout

# Methods that ranks which compute for each other run only while all of them are stopped.
_ALL_STOPPED = ("freeze", "sleep", "checkpoint", "wake_up")
# Methods of EngineSide that a front end may call.
_METHODS = frozenset({
    "drain", "end_drain", "freeze", "sent", "unfreeze", "sleep", "end_sleep", "wake_up", "end_hold", "checkpoint",
    "fingerprint", "plan_sleep", "ledger", "state", "begin_weight_update", "end_weight_update", "is_quiet",
    "stop_ranks", "restart_ranks", "begin_checkpoint", "continue_checkpoint", "take_checkpoint", "end_checkpoint",
    "cancel_checkpoint", "continue_wake", "check_directory", "checkpoint_to_wake", "hibernate", "resume_image",
    "images", "undo_hibernate", "store_image", "wake_portable", "end_portable", "fork", "end_fork", "keep_derived",
    "session_call", "session_answer", "session_views", "session_tenants",
})  # fmt: skip
# Those of _METHODS that change nothing, or end something: they are called also before a portable wake, or a fork, has
# ended.
_DURING_HOLD = frozenset({
    "end_portable", "end_fork", "unfreeze", "end_drain", "is_quiet", "restart_ranks", "fingerprint", "ledger", "state",
    "images", "cancel_checkpoint", "check_directory", "checkpoint_to_wake", "undo_hibernate", "store_image",
    "session_answer", "session_views", "session_tenants",
})  # fmt: skip
_EXECUTORS_TAGS = ("weights", "kv_cache")  # those that vLLM's executors know
_WATCH_SECONDS = 0.5  # between looks whether the front end still lives

# Options of how checkpoints are written, which C++ takes as they are, …
_CHECKPOINT_OPTIONS = (
    "retain_checkpoints",
    "retain_checkpoint_seconds",
    "retain_checkpoint_bytes",
    "key_file",
    "encrypt",
    "incremental",
    "compression",
    "compression_level",
)
# … and those of the controller.
_CONTROLLER_OPTIONS = ("kv_budget_bytes", *_CHECKPOINT_OPTIONS, "weights_check")


class EngineSide:
    """What `torpor_call` reaches: the controller and its hooks, one pair an engine core."""

    def __init__(self, core):
        options = Options.of(core.vllm_config)
        _end_with_front_end(core)
        begin_events(core.vllm_config, "core")
        self.hooks = VllmHooks(core)
        # Of the checkpoint that is written while the engine serves: seconds of its stops, and when it began.
        self._paused_for_checkpoint = self._checkpoint_began = 0.0
        self.controller = _core.SleepController(self.hooks, _given(options, _CONTROLLER_OPTIONS))
        self._held_sleep: dict | None = None  # options of the sleep that waits for end_sleep(); None: a checkpoint does
        self._held_report: dict = {}  # what end_sleep() reports of what was known before
        self._pause_stays = False  # a pause outlasts the wake from the sleep in force
        self.updates = Updates(self)
        images = _given(options, _CHECKPOINT_OPTIONS)  # whose paths are given to other processes
        images["directory"] = images["directory"] and os.path.abspath(images["directory"])
        self.sessions = self.hooks.sessions = Sessions(self.hooks, images)
        self.forks = self.hooks.forks = Forks(self.hooks, self.sessions)
        if options.offload_preempted:
            self.sessions.preemptions = self.hooks.scheduler.torpor_preemptions = Preemptions(self.hooks, self.sessions)

    def freeze(self, options: dict) -> dict:
        """Take no step from now on; the front end captures its part then.

        Return the state and level of the engine, and how many tokens each request has put out ("sent"). An engine that
        is not awake stays as it is. A negative `timeout` is none here: the controller refuses it.
        """
        timeout = options.get("timeout")
        if not self.controller.is_sleeping():
            with self._falling_asleep({"level": options.get("level", 0), "tags": options.get("tags")}):
                self.hooks.quiesce(None if timeout is None or timeout < 0 else timeout)
            self.hooks.ask_workers()
        state = self.controller.state()
        return {"engine": state["engine"], "level": state["level"], "sent": self.sent({})}

    def sent(self, options: dict) -> dict[str, int]:
        """How many tokens each request has put out. "of_asleep": of an engine that is asleep; else none."""
        if options.get("of_asleep") and self.controller.state()["engine"] != "asleep":
            return {}
        requests = self.hooks.scheduler.requests
        sent = self.sessions.held()
        return sent | {request_id: len(request._output_token_ids) for request_id, request in requests.items()}

    def unfreeze(self, _: dict) -> None:
        if self.held_by() is None and not self.controller.is_sleeping():
            self.hooks.resume()

    def stop_ranks(self, _: dict) -> Future | None:
        return None if self.hooks.ranks_stopped else self.hooks.stop_ranks()

    def is_quiet(self, _: dict) -> bool:
        return self.hooks.is_quiet

    def restart_ranks(self, _: dict) -> None:
        self.hooks.restart_ranks()

    def drain(self, options: dict) -> int:
        """Before a sleep with these options: how many requests have still to end. Called until none has."""
        if not self.hooks.is_draining and (problems := self.plan_sleep(options)["problems"]):
            raise InvalidArgument(problems[0])
        return self.hooks.drain()

    def end_drain(self, _: dict) -> None:
        """The sleep did not come about."""
        self.hooks.end_drain()

    def keep_derived(self, _: dict) -> None:
        """The next sleep keeps packed weights in host memory: the wake after it is faster."""
        self.hooks.keep_derived()

    @contextmanager
    def _executor_told(self) -> Iterator[None]:
        """Whatever comes of it, vLLM's executor says then what sleeps: trainers ask it whether to wake the engine."""
        try:
            yield
        finally:
            states = self.controller.state()["tags"]
            asleep = {tag for tag in _EXECUTORS_TAGS if states.get(tag, "attached") != "attached"}
            self.hooks.core.model_executor.sleeping_tags = asleep

    def sleep(self, options: dict) -> dict:
        with self._executor_told():
            return self._sleep(options)

    def _sleep(self, options: dict) -> dict:
        self.hooks.for_new_process = _makes_checkpoint(options)
        self.hooks.pause_travels = True
        try:
            with self._falling_asleep(options):
                if self.hooks.is_quiet:  # quiesce() is not called again
                    self.hooks.end_transfers(options.get("timeout"))  # it was only paused
                    if self.hooks.leaves_host_memory():
                        self.hooks.finish_stores(options.get("timeout"))
                report = self._with_bound(lambda: self.controller.sleep(options))
        finally:
            self.hooks.pause_travels = False
        if report.get("held"):
            self._hold(options, report)
        else:
            self._slept(options, report)
        return report

    def _hold(self, options: dict | None, report: dict) -> None:
        """The sleep with these options, or a checkpoint (None), waits for end_sleep()."""
        self._held_sleep = options
        self._held_report = {name: report[name] for name in ("bound_requests", "began")}

    def _slept(self, options: dict, report: dict) -> None:
        """Do what vLLM's own sleep does with a pause, and at level 0 with requests."""
        if not report["changed"]:
            return
        self._pause_stays = options["level"] == 0 or options["preserve_state"]
        if not self._pause_stays:
            self.hooks.end_pause()
        elif options["level"] == 0 and options["in_flight"] == "abort":
            self.hooks.abort_requests()

    @contextmanager
    def _falling_asleep(self, options: dict) -> Iterator[None]:
        self.hooks.falling_asleep = options
        try:
            yield
        finally:
            self.hooks.falling_asleep = None

    def release_kv_cache(self) -> None:
        """Put the KV cache to sleep. The engine computes its requests again after the wake."""
        options = {"level": 1, "in_flight": "recompute", "tags": ["kv_cache"]}
        with self._executor_told(), self._falling_asleep(options):
            self.controller.sleep(options)
        self._pause_stays = False
        self.hooks.end_pause()

    def checkpoint(self, options: dict) -> dict:
        self.hooks.for_new_process = True
        report = self._with_bound(
            lambda: self.controller.checkpoint(
                options["outputs"],
                options.get("data_parallel", (0, 1)),
                options.get("progress", ""),
                options.get("metadata", {}),
            )
        )
        if report.get("held"):
            self._hold(None, report)
            return report
        return report | {"pause_seconds": self.hooks.pause_seconds} | self._stay(options)

    def _stay(self, options: dict) -> dict:
        """With the option "stay" of a checkpoint take no step after it: none comes between two lines of a utility.

        Return since when the engine takes none.
        """
        if not options.get("stay"):
            return {}
        since = self.hooks.stopped_since
        self.freeze({})
        return {"stopped_since": since}

    def begin_checkpoint(self, options: dict) -> None:
        """One that is written while the engine serves (engine/sleep_controller.h)."""
        self.hooks.for_new_process, began = True, time.time()
        self.controller.begin_checkpoint(options.get("progress", ""), options.get("metadata", {}))
        self._paused_for_checkpoint, self._checkpoint_began = 0.0, began

    def continue_checkpoint(self, _: dict) -> str:
        self.hooks.pause_seconds = 0.0
        stage = self.controller.continue_checkpoint()
        self._paused_for_checkpoint += self.hooks.pause_seconds
        return stage

    def take_checkpoint(self, options: dict) -> dict:
        def take() -> dict:
            self.controller.take_checkpoint(options["outputs"])
            return {}

        self.hooks.for_new_process = True
        report = self._with_bound(take) | {"began": self._checkpoint_began}
        return report | {"pause_seconds": self._paused_for_checkpoint + self.hooks.pause_seconds} | self._stay(options)

    def end_checkpoint(self, _: dict) -> dict:
        return self.controller.end_checkpoint()

    def cancel_checkpoint(self, _: dict) -> None:
        self.controller.cancel_checkpoint()

    def _with_bound(self, operation) -> dict:
        self.hooks.bound, began = [], time.time()
        return operation() | {"bound_requests": self.hooks.bound, "began": began}

    def end_sleep(self, options: dict) -> dict:
        """Of one of several engines, which has kept all and waits: it sleeps, or it is as if nothing had been asked."""
        with self._executor_told():
            report = self.controller.end_sleep(options["keep"])
        if not options["keep"]:
            return report
        if self._held_sleep is None:
            return report | self._held_report | {"pause_seconds": self.hooks.pause_seconds}
        self._slept(self._held_sleep, report)
        return report | self._held_report

    def fingerprint(self, _: dict) -> dict[str, str]:
        return self.controller.fingerprint()

    def wake_up(self, options: dict) -> dict:
        self.updates.check_wake(options)
        if options.pop("early_where_possible", False):
            options["early"] = self._why_not_early() is None
        elif options.get("early") and (problem := self._why_not_early()) is not None:
            raise problem
        self.hooks.for_new_process = "from_checkpoint" in options or "answers" in options
        if "answers" in options:
            options["answers_may_extend"] = may_extend(self.hooks.core.vllm_config, self.hooks.scheduler)
        kv, began = options.get("kv"), time.time()
        if self.controller.is_sleeping():
            self.hooks.other_connector.compute_remote_prompts()
        elif kv is not None and not self.hooks.for_new_process and self.hooks.is_paused_with_requests():
            raise WrongState(
                f"the engine is paused, and does not sleep: kv={kv!r} would change nothing",
                "call sleep(level=0) before you load weights; now reset_prefix_cache(reset_running_requests=True)",
            )
        with self._executor_told():
            report = self.controller.wake_up(options) | {"began": began}
        if report["fully_awake"]:
            if not self._pause_stays and not self.hooks.for_new_process:
                self.hooks.end_pause()
            self._pause_stays = False
        declared = report["changed"] and kv in ("recompute", "abort")
        connector_sleep.notice_new_weights(self.hooks.core, declared=declared)
        if self.hooks.restored is not None:
            report["outputs"] = _with_tokens(report["outputs"], self.hooks.restored)
            report["restored"] = _restored_requests(self.hooks.restored) if "answers" in options else []
            report["paused"] = self.hooks.wanted_pause is not PauseState.UNPAUSED
        return report

    def checkpoint_to_wake(self, _: dict) -> str:
        return self.controller.checkpoint_to_wake()

    def _why_not_early(self) -> Error | None:
        try:
            plugin.require("early_wake")
        except Error as problem:
            return problem
        if self.hooks.scheduler.connector is not None:
            return Unsupported("a post-copy wake beside a KV connector", "wake it without early")
        if compute_for_each_other(self.hooks.core.vllm_config):
            return Unsupported("a post-copy wake of data parallel ranks", "wake them without early")
        return None

    def continue_wake(self, options: dict) -> dict:
        """Return what has become of the deferred blocks of the last wake; wait as told (engine/sleep_controller.h)."""
        self.controller.continue_wake(options.get("wait", "none"))
        return self._deferred()

    def _deferred(self) -> dict:
        deferred = self.hooks.deferred
        return (
            deferred.to_value()
            if deferred
            else {"arrived": 0, "unreadable": 0, "skipped": 0, "pending": 0, "recomputed": []}
        )

    def begin_weight_update(self, options: dict) -> None:
        self.updates.begin(options)

    def end_weight_update(self, options: dict) -> None:
        self.updates.end(options)

    def end_hold(self, options: dict) -> None:
        self.controller.end_hold(options["keep"])
        self.hooks.restored = None

    def plan_sleep(self, options: dict) -> dict:
        self.hooks.for_new_process = _makes_checkpoint(options)
        return self.controller.plan_sleep(options)

    def check_directory(self, _: dict) -> None:
        """Whether all ranks, perhaps on other hosts, see the directory of checkpoints."""
        self.controller.check_directory()

    def hibernate(self, options: dict) -> dict:
        self._check_awake()
        return self.sessions.hibernate(options["image"], options["requests"], options.get("timeout"), options["call"])

    def undo_hibernate(self, options: dict) -> None:
        """Resume the image if the call of this id made it: its caller has gone."""
        if self.sessions.was_made_by(options["image"], options["call"]):
            self.resume_image(options)

    def store_image(self, options: dict) -> dict:
        return self.sessions.store(options["image"], self.controller.fingerprint(), options["outputs"])

    def resume_image(self, options: dict) -> dict:
        """Resume an image by its id, or by its `path` one of another engine: then the answer has "outputs", and
        end_portable() follows."""
        self._check_awake()
        self.updates.check_none()
        if (image := self.sessions.image_of(options["image"], options.get("path"))) is not None:
            return self.sessions.resume(image)
        return self._with_outputs(self.sessions.take(options["path"], self.controller.fingerprint(), options["call"]))

    def wake_portable(self, options: dict) -> dict:
        self._check_awake()
        self.updates.check_none()
        key_file = Options.of(self.hooks.core.vllm_config).key_file
        return self._with_outputs(self.sessions.wake_portable(options, self.controller.fingerprint(), key_file))

    def _with_outputs(self, report: dict) -> dict:
        """Return the report of requests that came from elsewhere with what the front end must have of them."""
        try:
            report["outputs"] = _with_tokens(report["outputs"], report.pop("state"))
        except BaseException:
            self.sessions.end_portable(keep=False)
            raise
        return report

    def end_portable(self, options: dict) -> None:
        self.sessions.end_portable(options["keep"], options.get("lost", []), options.get("call"))

    def fork(self, options: dict) -> dict:
        self._check_awake()
        self.updates.check_none()
        return self.forks.fork(options)

    def end_fork(self, options: dict) -> None:
        self.forks.end(options["call"], options["keep"])

    def held_by(self) -> str | None:
        """Return what the engine stands still for until its front end has requests; None: it does not."""
        if self.sessions.holds_portable:
            return "a resume from disk" if self.sessions.takes_image else "a portable wake"
        return "a fork" if self.forks.holds else None

    def images(self, _: dict) -> list[dict]:
        """Return what the images of this engine have; "preempted": of a request that vLLM has preempted."""
        preemptions = self.sessions.preemptions
        preempted = set() if preemptions is None else preemptions.images()
        return [each | {"preempted": each["id"] in preempted} for each in self.sessions.summaries()]

    def session_call(self, options: dict) -> dict:
        self._check_awake()
        self.updates.check_none()  # no step is taken meanwhile, and the answer comes with steps
        return residency.call(self.hooks.scheduler, options)

    def session_answer(self, options: dict) -> dict:
        return residency.answer(self.hooks.scheduler, options)

    def session_views(self, options: dict) -> dict:
        return residency.views(self.hooks.scheduler, options)

    def session_tenants(self, options: dict) -> list[str]:
        return residency.tenants(self.hooks.scheduler, options)

    def _check_awake(self) -> None:
        if (state := self.controller.state())["engine"] != "awake":
            raise WrongState(f"the engine is {state['engine']}", "call wake_up() first")

    def ledger(self, _: dict) -> list:
        return self.controller.ledger()

    def state(self, _: dict) -> dict:
        scheduler = self.hooks.scheduler
        if not self.controller.state()["tags"]:  # an engine that never slept: nobody has asked the ranks yet
            with suppress(Error):
                self.controller.ledger()
        return self.controller.state() | {
            "tiers": plugin.tiers(),
            "recomputed_tokens": getattr(scheduler, "torpor_recomputed", 0),
            "console": scheduler.torpor_console,
            "deferred": self._deferred(),
            "preempted": {} if self.sessions.preemptions is None else self.sessions.preemptions.counts(),
        }


def _given(options: Options, names: tuple[str, ...]) -> dict:
    """Return the directory of checkpoints, and the options of these names that are set."""
    return {"directory": options.checkpoint_dir} | {
        name: value for name in names if (value := getattr(options, name)) is not None
    }


def _makes_checkpoint(options: dict) -> bool:
    return options.get("to") == "disk"


class EngineCoreMixin(Stock):
    """Mixin of the engine core of an engine that asks, in whatever process it runs."""

    def torpor_call(self, method: str, options: dict) -> dict | Future:
        """Answer a front end, as a utility method. {"result": …} or {"error": fields of an Error}: plain data."""
        if method not in _METHODS:
            return {"error": InvalidArgument(f"torpor has no method {method!r}").to_dict()}
        try:
            if method in _ALL_STOPPED and compute_for_each_other(self.vllm_config):
                _check_that_all_stopped(self)
            side = _side(self)
            if method not in _DURING_HOLD and (what := side.held_by()) is not None:
                raise WrongState(f"{what} is under way", "call this again when it has ended")
            if method in call_hooks.POINTS:
                result = call_hooks.around(method, None, getattr(side, method), options)
            else:
                result = getattr(side, method)(options)
        except Error as error:
            return {"error": error.to_dict()}
        return _later(result) if isinstance(result, Future) else {"result": result}

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        try:
            return super().collective_rpc(method, timeout, args, kwargs)
        except TimeoutError as problem:
            if not isinstance(problem, Error):  # a worker has answered with it
                note_timeout(self, method)
            raise
        finally:
            note_weights_maybe_written(self, method)

    def add_lora(self, lora_request) -> bool:
        try:
            return super().add_lora(lora_request)
        finally:
            invalidate_adapters(self)

    def remove_lora(self, lora_id: int) -> bool:
        try:
            return super().remove_lora(lora_id)
        finally:
            invalidate_adapters(self)

    def reset_prefix_cache(self, reset_running_requests: bool = False, *args, **kwargs) -> bool:
        """Reset the prefix cache. Hibernated requests do not use their KV again either.

        `reset_running_requests`: those that do not run and have KV, such as children of a fork, lose it too.
        """
        advance_weights_epoch(self)
        _finish_loads(self, of_requests=reset_running_requests)
        if reset_running_requests and connector_sleep.brings_kv(self.scheduler):
            connector_sleep.take_back_waiting(self.scheduler)
        try:
            return super().reset_prefix_cache(reset_running_requests, *args, **kwargs)
        finally:
            connector_sleep.notice_new_weights(self, by_content=True)

    def pause_scheduler(self, mode="abort", *args, **kwargs) -> Future | None:
        try:
            if mode == "abort" and (side := getattr(self, "torpor_side", None)) is not None:
                side.hooks.abort_hibernated()
            return super().pause_scheduler(mode, *args, **kwargs)
        finally:
            _keep_draining(self)

    def resume_scheduler(self) -> None:
        side = getattr(self, "torpor_side", None)
        if side is not None and side.hooks.ranks_stopped:  # all restart together: VllmHooks.restart_ranks()
            side.hooks.end_pause()
            return
        super().resume_scheduler()
        _keep_draining(self)

    def shutdown(self) -> None:
        """Let go of the controller: it holds its hooks, which hold this engine core and all that the workers have."""
        super().shutdown()
        if (side := self.__dict__.pop("torpor_side", None)) is not None:
            side.sessions.close()

    def is_scheduler_paused(self) -> bool:
        return freezing.is_scheduler_paused(self, super().is_scheduler_paused)

    def release_kv_cache_memory(self) -> None:
        """Release the KV cache of a paused engine. The engine computes its requests again after the wake."""
        if not holds_memory_of(self.vllm_config):
            return super().release_kv_cache_memory()
        if not self.is_scheduler_paused() or self.scheduler.has_requests() or self.batch_queue:
            raise RuntimeError("release_kv_cache_memory() requires a completed pause first")
        side = _side(self)
        if set(side.controller.state()["tags"].values()) - {"attached"}:
            raise RuntimeError("release_kv_cache_memory() requires all executor memory to be resident")
        side.release_kv_cache()


class EngineCoreProcMixin(EngineCoreMixin):
    """Mixin of an engine core with a process of its own."""

    def has_work(self) -> bool:
        return slots.has_work(self, super().has_work)

    def _notify_idle_state_callbacks(self) -> None:
        freezing.notify_idle_state_callbacks(self, super()._notify_idle_state_callbacks)

    def _pause_complete(self) -> bool:
        return freezing.pause_complete(self, super()._pause_complete)


def install(patches: Patches) -> None:
    """An engine core in a process of its own asks has_work() before all else. One in this process: front_ends.py."""
    stock = EngineCoreProc.has_work

    def has_work(self) -> bool:
        config = getattr(self, "vllm_config", None)  # cores that were not initialized have none
        if isinstance(self, EngineCoreProcMixin) or config is None or not asks(config):
            return stock(self)
        adopt(self)
        return self.has_work()

    patches.set(EngineCoreProc, "has_work", has_work)


def adopt(core: EngineCore) -> None:
    """Give the engine core of an engine that asks its mixin."""
    mix_in(core, EngineCoreProcMixin if isinstance(core, EngineCoreProc) else EngineCoreMixin)
    worker_answers.adopt(core.model_executor)
    idle_sessions.watch(core)
    if (connector := connector_sleep.side_of(core.scheduler)) is not None:
        connector.draw_again = lambda *step: core.collective_rpc("torpor_draw_again", args=step)
    if Options.of(core.vllm_config).offload_preempted:
        _side(core)  # the scheduler needs it before anybody calls torpor


def _side(core) -> EngineSide:
    if not hasattr(core, "torpor_side"):
        core.torpor_side = EngineSide(core)
    return core.torpor_side


def _keep_draining(core) -> None:
    if (side := getattr(core, "torpor_side", None)) is not None:
        side.hooks.keep_draining()


def _finish_loads(core, of_requests: bool) -> None:
    """End the loads of sessions' blocks to the device: vLLM resets its prefix cache only where no block is in use.

    of_requests: end those of requests too. While a step is in flight nothing is ended: it has the workers' connectors.
    While the engine sleeps none is under way, and a step would use memory that is not there.
    """
    side = connector_sleep.side_of(core.scheduler)
    if side is None or side.core is None or core.batch_queue or core.model_executor.is_sleeping:
        return
    if not of_requests and not side.core.sessions_are_loading:
        return
    if connector_sleep.is_alone(core.scheduler):
        connector_sleep.finish_transfers(core, side)
    else:
        _side(core).hooks.other_connector.end_transfers()


def _check_that_all_stopped(core) -> None:
    if not hasattr(core, "torpor_side") or not core.torpor_side.hooks.ranks_stopped:
        raise Unsupported(
            "data parallelism with experts: an engine that stands still keeps computing empty batches for the others",
            "use AsyncLLM with all ranks behind it, which stops them together",
        )


def _later(result: Future) -> Future:
    """The reply, which vLLM sends when it is there."""
    reply: Future = Future()

    def done(_) -> None:
        error = result.exception()
        reply.set_exception(error) if error is not None else reply.set_result({"result": result.result()})

    result.add_done_callback(done)
    return reply


def _end_with_front_end(core) -> None:
    """An engine core whose front end was killed can be reached by nobody, and would hold its memory for ever.

    One that shares its process with its front end ends with that: the process is somebody's program.
    """
    if not isinstance(core, EngineCoreProc) or multiprocessing.parent_process() is None:
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
    if outputs is None and not requests:  # of a sleep without preserve_state
        return {"requests": [], "parents": []}
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
                "status": item["status"],
            }
            if item["engine"].get("bound"):  # it ends; pieces of its prompt may lie between its tokens
                entry["text"] = None
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
            "status": item["status"],
        }
        for item in checkpoint["scheduler"]["requests"]
    ]
