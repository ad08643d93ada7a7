# SPDX-License-Identifier: Apache-2.0
"""The life of a server: it wakes at its start, sleeps and wakes, checkpoints while serving, and ends without loss."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import sys
import time
from contextvars import ContextVar
from http import HTTPStatus

from starlette.datastructures import Headers
from vllm.exceptions import GracefulHTTPError
from vllm.logger import init_logger
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from torpor import _core
from torpor.errors import Busy, Error, NotEnoughRoom, Unsupported, WrongState
from torpor.vllm.frontend import Report
from torpor.vllm.options import Options
from torpor.vllm.plugin import holds_memory_of
from torpor.vllm.progress import Watcher
from torpor.vllm.server import access, ending, hosts, listening, moves, owning, standby, start, unlogged
from torpor.vllm.server.automatic import Automatic
from torpor.vllm.server.metrics import Metrics
from torpor.vllm.server.recorder import Nobody, Recorder, refusals_of_call
from torpor.vllm.server.remote import Remote
from torpor.vllm.server.sessions import Sessions, name_tenant
from torpor.vllm.server.settings import Settings
from torpor.vllm.server.tasks import Tasks

logger = init_logger("vllm.torpor")  # vLLM sets up only what is below its own name

let_in: ContextVar[bool] = ContextVar("torpor_let_in", default=False)  # set by the Gate for a call that it let in
_adds: ContextVar[bool] = ContextVar("torpor_adds", default=False)  # within add_request() of the engine
HANDED_OVER = "the server has handed over its requests to the next one"
ABORTS_NOTHING = "the server ends, and the next one goes on with its requests"
_WAIT_SECONDS = 0.01  # between looks whether requests have ended
_LATE_SECONDS = 0.5  # between looks whether a post-copy wake is over

# A new process would meet the same: the checkpoint, the directory, the key or the configuration is what has to change.
_RESTART_CANNOT_HELP = (
    "incompatible", "corruption", "unauthenticated", "unsupported", "invalid_argument", "not_found",
    "failed_precondition",
)  # fmt: skip
# The same, of a system call: the path, its owner or its mode has to change.
_OF_THE_PATH = (
    errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG,
)  # fmt: skip


class Server:
    """One AsyncLLM and its clients. Its methods run in the server's event loop, one operation at a time."""

    def __init__(self, engine: AsyncLLM, app_state, settings: Settings, model: str):
        self.engine, self.settings, self.model = engine, settings, model
        self.options = Options.of(engine.vllm_config)
        self.metrics = Metrics(model)
        self.recorder: Recorder | None = None  # none before the start, after a failed one, and without a response log
        self.has_log = settings.response_log == "on"
        self.begun = 0  # requests that were given to the engine
        self._directory: unlogged.Directory | None = None  # held without a response log
        self.problem: Error | None = None  # why the server failed
        self._unrecoverable = False  # the engine; a new process has a new one
        self.last_checkpoint: dict | None = None
        self.left_checkpoint: dict | None = None  # that the start passed over: it fits no more, and had no requests
        self.remote: Remote | None = None
        self.push_failed = False  # the last one
        self.pushed_at_end = False  # all that it leaves is in the object store
        self.standby: standby.Standby | None = None  # none unless it was started as one
        self.handed_over = False  # another server goes on with all requests, and this one records nothing more
        self.leaving = False  # vLLM's own way out has begun
        self.record = None  # of this server as owner or standby (owning.py); none: it gives no heartbeat
        self.beat_refused_at: float | None = None  # when its directory last refused one
        self.queued = 0
        self._console: str | None = None
        self._tenant_secret = access.tenant_secret(None)  # until the answers' own is known
        self.app_state = app_state
        self.operation = asyncio.Lock()
        self._moved = asyncio.Event()  # set, and replaced, at each change of the state
        self._adding = 0  # requests on their way into the engine
        self._slept_to = "host"  # the tier that it sleeps in, or that its last sleep wrote to
        self.listener: asyncio.Server | None = None  # on the socket of --torpor-listen-fd
        self.tasks = Tasks(self.metrics.task_failed)
        self._deferred: asyncio.Task | None = None  # looks for deferred blocks of the last wake
        self._automatic = Automatic(self)
        self.sessions = Sessions(self)
        self.metrics.hibernated.set_function(lambda: len(self.sessions.away()))
        self.state = "starting"
        self.enter("starting")

    @property
    def log(self) -> Recorder:
        """The recorder, for those who come only where there is one."""
        if self.recorder is None:
            raise WrongState(f"the server is {self.state} and has no response log", "ask again when it is ready")
        return self.recorder

    def enter(self, state: str) -> None:
        if self.state == "ending":  # what was in progress comes to its end, the server does too
            return
        self.state = state
        self.metrics.enter(state)
        listening.publish(self.settings.state_fd, state)
        self.notify()
        self._automatic.entered(state)

    def notify(self) -> None:
        """Have changed() return: the state has changed, or the set of hibernated requests."""
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def changed(self) -> None:
        """Return at the next change of the state, or of the set of hibernated requests."""
        await self._moved.wait()

    # --- the start ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Wakes what an earlier server left. A failure is said on /torpor/ready; nothing is served or removed then."""
        _core.SharedFolder.remove_left()
        try:
            await self._begin()
        except Error as problem:
            await self.failed_to_go_on(problem)
        self.tasks.keep(lambda: ending.take_signals(self), "taking signals")
        if self.settings.listen_fd > 0:
            self.tasks.keep(lambda: listening.when_awake(self), "listening for clients")

    async def failed_to_go_on(self, problem: Error) -> None:
        """Fail, because this server cannot go on with what an earlier one left."""
        self.fail(problem, isinstance(problem, WrongState) and await self._is_unrecoverable())
        self.metrics.failed("wake", "disk")
        logger.error("torpor: the server cannot go on with what it finds: %s", problem)
        if self.remote is not None:
            await self.remote.release()

    def fail(self, problem: Error, unrecoverable: bool = False) -> None:
        self.problem, self._unrecoverable = problem, unrecoverable
        self.enter("failed")
        ending.notify_of_failure(self)

    def holds_directory(self) -> bool:
        """Return whether this server has the lock of its directory's answers."""
        return self.recorder is not None or self._directory is not None

    def restart_may_help(self) -> bool:
        if self.problem is None:
            return False
        if self._unrecoverable:
            return True
        if self.problem.code == "io":
            return self.problem.native not in _OF_THE_PATH
        return self.problem.code not in _RESTART_CANNOT_HELP

    async def _is_unrecoverable(self) -> bool:
        try:
            return (await self.engine.torpor.call("state"))["engine"] == "unrecoverable"
        except EngineDeadError:
            return False  # /health says so

    async def _begin(self) -> None:
        if not holds_memory_of(self.engine.vllm_config):
            raise Unsupported(
                "torpor does not hold this engine's memory",
                "serve on the CPU with the option enabled, on a GPU with gpu_preserve_state, "
                "or without torpor's server",
            )
        if self.engine.vllm_config.parallel_config.data_parallel_size != 1 or self.engine._client_count != 1:
            raise Unsupported("several API servers or data parallel engines", "use one API server and one engine")
        self._automatic.check()
        fingerprint = await self.engine.torpor.call("fingerprint")
        self._stock_add, self._stock_abort = self.engine.add_request, self.engine.abort
        if self.settings.standby_of:
            self.standby = standby.Standby(self, fingerprint)
            await self.standby.begin()
            self._take_requests()
            self.enter("standby")
            self.tasks.keep(self.standby.follow, "following the owner")
            return
        self._take_requests()
        await hosts.check_directory(self)
        await self.own(fingerprint, standby.Parts())

    def _take_requests(self) -> None:
        self.engine.add_request, self.engine.abort = self._add_request, self._abort
        self._stock_register = self.engine._add_request
        self.engine._add_request = self._register
        self._stock_release = self.engine.release_kv_cache_memory
        self.engine.release_kv_cache_memory = self._release_kv_cache

    async def own(self, fingerprint: dict, parts: standby.Parts, wake=None) -> None:
        """Own the directory, go on with what an earlier server left there, and serve.

        parts: measures each part. wake: wakes an engine that sleeps, once the directory is this server's. Raises Busy
        if another server owns the directory. Then nothing has changed.
        """
        pulled = ""
        if self.settings.object_store:
            self.remote = Remote(self.settings, self.options)
            pulled = await self.remote.arrive(fingerprint)
            self.tasks.run(ending.end_when_disowned(self), "keeping ownership")
        directory = os.path.join(self.options.checkpoint_dir, "answers") if self.options.checkpoint_dir else None
        if self.has_log:
            self._begin_log(fingerprint, directory)
        elif directory is not None:
            self._directory = await asyncio.to_thread(unlogged.Directory, directory, fingerprint, self.options.key_file)
        if directory is not None:
            await owning.begin(self)
        if self.settings.listen_fd > 0 or self.standby is not None:
            self.metrics.standby_wanted.set(1)
        parts.end("log_read")
        woken = None if wake is None else await wake()
        if woken is None:  # else its ledgers were counted
            self.metrics.ledger(await self.engine.torpor.call("ledger"))
        parts.end("memory_woken", woken)
        if self.has_log:
            self._end_unrestorable()
            await moves.settle(self)
        restored = None
        if directory is not None:
            named = self.settings.wake_from or pulled
            watcher = None if parts.advance is None else parts.advance.watch
            restored = await (start.wake(self, named, watcher) if self.has_log else unlogged.wake(self, named))
            self._reserve_adapter_numbers()
        parts.end("requests_restored", restored)
        parts.kv = "recomputed" if restored is not None and not restored.checkpoint else "restored"
        # From the wake on the engine takes steps and answers only between two. So it is asked nothing before this.
        self.metrics.start_time.set(time.time())
        self.enter("awake")
        if self.has_log and self.settings.response_log_sync == "second" and directory is not None:
            self.tasks.keep(self._sync_each_second, "syncing the log")
        if self.settings.checkpoint_interval_seconds > 0:
            self.metrics.checkpoint_interval.set(self.settings.checkpoint_interval_seconds)
            self.tasks.keep(self._automatic.checkpoints, "periodic checkpoints")
        if self.settings.sleep_after_seconds > 0:
            self.tasks.keep(self._automatic.watch, "watching for idleness")

    def _begin_log(self, fingerprint: dict, directory: str | None) -> None:
        answers = _core.DeliveryLog({
            "directory": directory, "engine": fingerprint, "keep_seconds": self.settings.response_log_seconds,
            "keep_bytes": self.settings.response_log_bytes,
            "key_file": self.options.key_file, "encrypt": self.options.encrypt,
            "other_engine": start.OF_ANOTHER_ENGINE[self.settings.on_wake_error],
        })  # fmt: skip
        self._tenant_secret = access.tenant_secret(directory)
        always = self.settings.response_log_sync == "always"
        counters = self.metrics.log_failures.inc, self.metrics.answers_dropped.inc
        self.recorder = Recorder(self.engine.output_processor, answers, always, *counters)
        self.metrics.log_bytes.set_function(lambda: answers.counts()["log_bytes"])
        self.metrics.log_failing.set_function(lambda: bool(answers.counts()["problem"]))

    def _end_unrestorable(self) -> None:
        for answer in self.log.answers.all():
            if answer["state"] == "running" and answer["front"]["state"] is None:
                why = f"a new process cannot go on with it: {answer['front']['lost']}"
                self.end_failed(answer["request"]["id"], why)

    def _reserve_adapter_numbers(self) -> None:
        """LoRA adapters that are loaded later get other numbers than those of the answers that go on."""
        if self.recorder is not None:
            running = [answer for answer in self.recorder.answers.all() if answer["state"] == "running"]
            named = filter(None, (answer["request"]["engine"].get("adapter") for answer in running))
            numbers = [adapter["lora_int_id"] for adapter in named]
        else:
            states = self.engine.output_processor.request_states.values()
            numbers = [state.lora_request.lora_int_id for state in states if state.lora_request is not None]
        counter = self.app_state.openai_serving_models.lora_id_counter
        highest = max(numbers, default=0)
        if highest > counter.value:
            counter.inc(highest - counter.value)

    def end_failed(self, request_id: str, why: str) -> None:
        self.log.end(request_id, "failed", "error", why)
        self.metrics.start_requests.labels("failed").inc()

    # --- what vLLM asks of the engine, with a look at the state -------------------------------------------------------

    async def _add_request(self, *args, **kwargs):
        if not let_in.get() and (why := await self.let_in()) is not None:  # it came by a way without the gate
            raise GracefulHTTPError(why, HTTPStatus.SERVICE_UNAVAILABLE)
        if not await self._until_awake():  # it was let in just before a sleep began
            raise GracefulHTTPError(self._refuse(f"the server is {self.state}"), HTTPStatus.SERVICE_UNAVAILABLE)
        if self.sessions.has_tiers:
            name_tenant(args, kwargs)
        self._adding += 1
        self.begun += 1
        outside = _adds.set(True)
        try:
            return await self._stock_add(*args, **kwargs)
        except BaseException as problem:
            if (refusals := refusals_of_call.get()) is not None:
                refusals.append(repr(problem))
            raise
        finally:
            _adds.reset(outside)
            self._adding -= 1

    async def _register(self, request, *args, **kwargs) -> None:
        """vLLM notes a request before it sends it to the engine core. One that cannot be sent (a number or a text that
        has no encoding) would be waited for by each sleep."""
        try:
            await self._stock_register(request, *args, **kwargs)
        except BaseException:
            if request.request_id in self.engine.output_processor.request_states:
                await self._stock_abort([request.request_id], internal=True)
            raise

    async def _release_kv_cache(self) -> None:
        """POST /release_kv_cache_memory of vLLM's: the engine sleeps then."""
        try:
            operation = self.only_one()
        except Error as problem:
            raise GracefulHTTPError(str(problem), HTTPStatus.CONFLICT) from None
        async with operation:
            await self._stock_release()
            self._slept_to = "host"
            self.enter("asleep")

    async def _abort(self, request_id, internal: bool = False) -> None:
        """`internal`: by vLLM's own ids, as generate() does when its client goes or it fails, and POST /abort_requests
        for all requests. generate() does it while it handles an exception."""
        problem = sys.exception()
        asked = not internal or problem is None
        handed_over = await self.has_handed_over()
        if not asked and (handed_over or self.state in ("failed", "ending")):  # the next server goes on
            return
        if handed_over:
            raise GracefulHTTPError(HANDED_OVER, HTTPStatus.CONFLICT)
        if asked and self.aborts_nothing:
            raise GracefulHTTPError(ABORTS_NOTHING, HTTPStatus.SERVICE_UNAVAILABLE)
        if internal and self.settings.on_disconnect == "continue" and self._client_went(problem):
            processor = self.engine.output_processor
            for each in [request_id] if isinstance(request_id, str) else list(request_id):
                parent = processor.parent_requests.get(each)
                for one in [each] if parent is None else list(parent.child_requests):
                    if (state := processor.request_states.get(one)) is not None:
                        state.queue = Nobody()
            return
        await self._stock_abort(request_id, internal)

    def _client_went(self, problem: BaseException | None) -> bool:
        """Whether vLLM aborts a request because its client went away. `problem`: what it handles meanwhile."""
        if not isinstance(problem, asyncio.CancelledError | GeneratorExit) or _adds.get():  # it may be sent in part
            return False
        if refusals_of_call.get():  # of another prompt of this call: vLLM refuses all of it
            return False
        # No client holds a background response: only POST /v1/responses/ID/cancel cancels its task.
        responses = getattr(self.app_state, "openai_serving_responses", None)
        return asyncio.current_task() not in getattr(responses, "background_tasks", {}).values()

    async def abort(self, request_ids: list[str]) -> None:
        """End the choices of one response, as a reader wishes. Raises WrongState if another server has them by now."""
        if await self.has_handed_over():  # also if asked only now, while this server ends: its log records nothing more
            raise WrongState(HANDED_OVER, "ask the next one")
        if not self.log.records_aborts:
            raise WrongState(ABORTS_NOTHING, "ask the next one")
        await self._stock_abort(request_ids, internal=True)

    @property
    def aborts_nothing(self) -> bool:
        """Whether the requests that are here go on in the next server."""
        return self.state == "failed" or (self.recorder is not None and not self.recorder.records_aborts)

    async def has_handed_over(self) -> bool:
        """Return whether another server has the requests, once a hand-over in progress has come to its end: what ended
        meanwhile would be in neither server's log."""
        while self.state == "handing over":
            await self._moved.wait()
        return self.handed_over

    async def let_in(self) -> str | None:
        """Returns when a new request may come in, or why it may not."""
        self._automatic.used()
        if self.state == "awake":
            return None
        if self.state in standby.STATES:
            return self._refuse(f"the server is {self.state}: another one serves; ask that one, or again later")
        if self.state in ("failed", "ending"):
            return self._refuse(f"the server is {self.state}")
        if self.settings.new_requests == "refuse" and not self.settings.wake_on_request:
            return self._refuse(f"the server is {self.state}")
        if self.queued >= self.settings.queue_limit:
            return self._refuse(f"the server is {self.state} and {self.queued} requests wait already")
        self.queued += 1
        self.metrics.queued.set(self.queued)
        began = time.monotonic()
        try:
            woken = await self._until_awake()
        finally:
            self.metrics.waited.observe(time.monotonic() - began)
            self.queued -= 1
            self.metrics.queued.set(self.queued)
        return None if woken else self._refuse(f"the server is {self.state}")

    async def _until_awake(self) -> bool:
        """A request waits for that, and wakes the engine where the operator wants it. False: it waits in vain."""
        with self._automatic.wanted():
            while self.state not in ("awake", "failed", "ending"):
                await self._moved.wait()
        return self.state == "awake"

    @property
    def adding(self) -> bool:
        """Whether a request is on its way into the engine."""
        return self._adding > 0

    def operating(self) -> bool:
        return self.operation.locked()

    def busy(self) -> bool:
        """A request runs, arrives or waits, or an operation is in progress."""
        waiting = self._adding > 0 or self.queued > 0 or self.operating()
        return waiting or bool(self.engine.output_processor.request_states)

    def _refuse(self, why: str) -> str:
        self.metrics.refused.inc()
        return why

    def tenant(self, headers: Headers) -> str:
        return access.tenant(headers, self.settings.tenant_header, self._tenant_secret)

    @property
    def tenants_id(self) -> str:
        return access.tenants_id(self._tenant_secret)

    async def has_weights(self) -> bool:
        """Whether they are in the engine: between two wakes by tags, too."""
        if self.state != "asleep":
            return self.state == "awake"
        return (await self.engine.torpor.call("state"))["tags"].get("weights") == "attached"

    async def console(self) -> str | None:
        """Path of the engine core's socket, if it has one. Asked for once: while it falls asleep nobody answers."""
        self._console = self._console or (await self.engine.torpor.call("state")).get("console")
        return self._console

    # --- sleep, wake, checkpoint --------------------------------------------------------------------------------------

    def only_one(self) -> asyncio.Lock:
        """Two operators do not mean the same; the server's own checkpoint is waited for."""
        if self.operation.locked() and not self._automatic.checkpointing:
            raise Busy(f"the server is {self.state}, another operation is in progress", "wait for that to end")
        if self.state in standby.STATES:
            raise WrongState(f"the server is {self.state}", "ask the server that serves; this one follows it")
        if self.state in ("failed", "ending"):
            raise WrongState(f"the server is {self.state}", str(self.problem) if self.problem else "start a new one")
        return self.operation

    async def sleep(
        self, level: int = 1, mode: str | None = None, preserve_state: bool = True, to: str = "host", **options
    ) -> Report:
        async with self.only_one():
            return await self.fall_asleep(level, mode, preserve_state, to, options)

    async def fall_asleep(self, level: int, mode: str | None, preserve_state: bool, to: str, options: dict) -> Report:
        before = self.state
        self.enter("falling asleep")
        try:
            if mode == "wait" and not preserve_state:
                await self._requests_ended(before)
                mode = None  # there is none left
            report = await self.sleep_now(level, mode, preserve_state, to, options)
        except BaseException as problem:
            self.metrics.failed("sleep", to)
            await self._after_failure(problem, before)
            raise
        self.enter("asleep" if report.changed else before)
        return report

    async def sleep_now(self, level: int, mode: str | None, preserve_state: bool, to: str, options: dict) -> Report:
        while self._adding > 0:
            await asyncio.sleep(0.001)
        if to == "disk":
            await self.sync_log()
        named = options if mode is None else options | {"mode": mode}
        report = await self.engine.sleep(level, preserve_state=preserve_state, to=to, **named)
        if report.changed:
            self._slept_to = "disk" if report.checkpoint else "host"
        self.metrics.record("sleep", self._slept_to, report)
        if report.checkpoint:
            self.remember(report, time.time())
            await self._push(report)
        return report

    async def _push(self, report: Report) -> None:
        if self.remote is not None:
            report["pushed"] = await self.remote.push(report.checkpoint)
            self.push_failed = not report["pushed"]
            self.metrics.pushed(not self.push_failed, time.time())

    async def sleep_deeper(self) -> Report:
        """From host memory to disk. It wakes on the way: where the device has no room for that it stays as it is."""
        async with self.only_one():
            before = self.state
            self.enter("falling asleep")
            try:
                await self.engine.wake_up()
                before = "awake"
                report = await self.sleep_now(1, "abort", True, "disk", {})
            except BaseException as problem:
                self.metrics.failed("sleep", "disk", before != "awake" and isinstance(problem, NotEnoughRoom))
                await self._after_failure(problem, before)
                raise
            self.enter("asleep")
            return report

    async def _requests_ended(self, state: str) -> None:
        """Those that run; new ones wait at the gate. A server that is to end saves them instead."""
        while self._adding > 0:
            await asyncio.sleep(_WAIT_SECONDS)
        if self.engine.output_processor.request_states and (state != "awake" or await self.engine.is_paused()):
            raise WrongState("the engine stands still, so its requests do not end", "wake or resume it first")
        while self.engine.output_processor.request_states and not self.engine.errored:
            if self.state == "ending":
                raise WrongState("the server ends", "its checkpoint has the requests")
            if away := self.sessions.away():  # no route resumes one meanwhile
                raise WrongState(f"{len(away)} requests are hibernated, so they do not end", "resume or abort them")
            await asyncio.sleep(_WAIT_SECONDS)

    async def wake_up(
        self,
        tags: list[str] | None = None,
        kv: str | None = None,
        progress: Watcher | None = None,
        early: bool = False,
        swap_in_from: str | None = None,
    ) -> Report:
        async with self.only_one():
            before = self.state
            self.enter("waking")
            try:
                report = await self.engine.wake_up(
                    tags, kv=kv, progress=progress, early=early, swap_in_from=swap_in_from
                )
            except BaseException as problem:
                self.metrics.failed("wake", self._slept_to, isinstance(problem, NotEnoughRoom))
                await self._after_failure(problem, before)
                raise
            self.enter("awake" if report.fully_awake else "asleep")
            self.metrics.record("wake", self._slept_to, report)
            self.see_to_deferred(report)
            return report

    def see_to_deferred(self, report: Report) -> None:
        """After a wake: steps look what has arrived, and an idle engine takes none."""
        if report.get("deferred_blocks", 0) > 0:
            self._deferred = self.tasks.keep(self._until_none_is_deferred, "looking for deferred blocks")

    def waits_for_deferred(self) -> bool:
        """Whether blocks still come back. A checkpoint would wait for them, and the engine for the checkpoint."""
        return self._deferred is not None and not self._deferred.done()

    async def _until_none_is_deferred(self) -> None:
        """The copy that they come from is given back so."""
        with contextlib.suppress(Error, EngineDeadError):
            await asyncio.sleep(_LATE_SECONDS)
            while self.state != "asleep" and (await self.engine.torpor.call("continue_wake"))["pending"] > 0:
                await asyncio.sleep(_LATE_SECONDS)

    async def _after_failure(self, problem: BaseException, before: str) -> None:
        """An engine that could not undo what failed runs no more; a new process goes on from its checkpoint and log."""
        lost = False
        try:
            lost = isinstance(problem, Error) and await self._is_unrecoverable()
        finally:
            if lost:
                self.fail(WrongState(f"the engine is unrecoverable: {problem}", "restart the server"), True)
            else:
                self.enter(before)

    async def checkpoint(self, progress: Watcher | None = None, metadata: dict[str, str] | None = None) -> Report:
        async with self.only_one():
            if self.state != "awake":
                raise WrongState(f"the server is {self.state}", "wake it, or let it sleep to disk")
            try:
                began = time.monotonic()
                await self.sync_log()
                report = await self.engine.checkpoint(progress=progress, metadata=metadata)
            except BaseException:
                self.metrics.failed("checkpoint", "disk")
                raise
            self.metrics.record("checkpoint", "disk", report)
            self.metrics.checkpoint_seconds.observe(time.monotonic() - began)
            self.remember(report, time.time())
            await self._push(report)
            return report

    async def remember_woken(self, report: Report) -> None:
        """The checkpoint that this process goes on from: an earlier one has written it."""
        folder, name = os.path.split(report.checkpoint)
        try:
            there = await asyncio.to_thread(_core.list_checkpoints, folder, self.options.key_file)
        except Error as problem:
            logger.warning("torpor: it is not known when %s was written: %s", report.checkpoint, problem)
            there = []
        self.remember(report, next((each["created"] for each in there if each["name"] == name), None))

    def remember(self, report: Report, written: float | None) -> None:
        """`written`: as Unix time; None: nobody knows."""
        self.last_checkpoint = {
            "path": report.checkpoint,
            "bytes": report.checkpoint_bytes,
            "requests": report.requests,
            "time": written,
        }
        if written is not None:
            self.metrics.checkpoint_time.set(written)
        self.metrics.checkpoint_bytes.set(report.checkpoint_bytes)

    def leave_checkpoint(self, path: str, problem: Error) -> None:
        """The start goes on without a checkpoint that fits no more and has no running request."""
        self.left_checkpoint = {"path": path, "why": str(problem)}
        logger.warning(
            "torpor: serving without the checkpoint in %s, which holds no running request and stays there: %s",
            path, problem,
        )  # fmt: skip

    def progress(self) -> tuple:
        """Differs from an earlier one if a request began, ended or got a token in between."""
        if self.recorder is not None:
            counts = self.recorder.answers.counts()
            return counts["running"], counts["log_bytes"]
        states = self.engine.output_processor.request_states
        given = {name: state.detokenizer.num_output_tokens() for name, state in states.items() if state.detokenizer}
        return self.begun, given

    def running(self) -> int:
        """Requests that have not ended."""
        if self.recorder is not None:
            return self.recorder.answers.counts()["running"]
        return len(self.engine.output_processor.request_states)

    async def sync_log(self) -> None:
        """Returns when the response log, if there is one, is on disk."""
        if self.recorder is not None:
            await asyncio.to_thread(self.recorder.answers.sync)

    async def _sync_each_second(self) -> None:
        while True:
            await asyncio.sleep(1)
            await self.log.sync()

    async def end(self) -> None:
        """Saves what can be saved in the given time, tells the clients, and lets vLLM end the process."""
        await ending.end(self)
