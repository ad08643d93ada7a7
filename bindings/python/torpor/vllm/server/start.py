# SPDX-License-Identifier: Apache-2.0
"""The start of a server: it wakes what an earlier one left, or goes on without, as its operator wants it."""

from __future__ import annotations

import asyncio
import os
import uuid

from vllm.logger import init_logger

from torpor import _core
from torpor.errors import Error, Incompatible
from torpor.vllm import outputs as front_end
from torpor.vllm import tracing
from torpor.vllm.frontend import Report
from torpor.vllm.progress import Watcher, watched
from torpor.vllm.server.recorder import TAKEN_UP

logger = init_logger("vllm.torpor")  # vLLM sets up only what is below its own name

# What becomes of answers that still run and began with another engine, by --torpor-on-wake-error.
OF_ANOTHER_ENGINE = {"fail": "refuse", "recompute": "take_up", "discard": "set_aside"}


async def wake(server, named: str, watcher: Watcher | None = None) -> Report | None:
    """Wake `named`: a checkpoint, or a directory of them; empty: the newest of the server's own. `watcher` is called
    with the progress.

    Return the report of the wake; None if there was nothing to wake, or it was discarded.
    """
    counts = server.recorder.answers.counts()
    if counts["of_another"]:
        where = f", which are now in {counts['set_aside']}" if counts["set_aside"] else ""
        logger.warning("torpor: answers of another engine were found%s: %s", where, counts["of_another"])
        if server.settings.on_wake_error == "discard":
            logger.error("torpor: serving without what was there: %d answers ended", counts["discarded"])
            server.metrics.start_requests.labels("failed").inc(counts["discarded"])
            return None
    unfit = server.remote.unfit if server.remote is not None and not named else None
    where = named or (server.options.checkpoint_dir if unfit is None else server.settings.object_store)
    nothing_there = unfit is None and not named and not await asyncio.to_thread(has_checkpoint, server)
    if nothing_there and counts["running"] == 0:
        return None
    try:
        if unfit is not None:
            raise unfit
        report = await _wake_new(server, None if nothing_there else where, watcher)
    except Error as problem:
        if isinstance(problem, Incompatible) and await asyncio.to_thread(_is_idle, server, where):
            server.leave_checkpoint(where, problem)
            return None
        if server.settings.on_wake_error == "recompute" and not nothing_there:
            with_kv = await _wake_portable(server, where) if isinstance(problem, Incompatible) else None
            if with_kv is None:
                logger.error("torpor: going on without the checkpoint: %s", problem)
            report = with_kv or await _wake_new(server, None, watcher)
        elif server.settings.on_wake_error == "discard":
            _discard(server, str(problem))
            return None
        else:
            raise
    rolled = report.replayed
    logger.info(
        "torpor: woken from %s in %.2f s: %d requests go on "
        "(%d of them rolled forward, %d computed anew, %d had ended)",
        report.checkpoint or "the response log", report.seconds, report.requests,
        len(rolled["extended"]), len(rolled["added"]), len(rolled["dropped"]),
    )  # fmt: skip
    warn_if_paused(report)
    return report


def warn_if_paused(report: Report) -> None:
    """After a wake from a checkpoint: no request is answered while the engine is paused."""
    if report.get("paused"):
        logger.warning("torpor: the engine is paused, as it was when it fell asleep: POST /resume ends that")


def has_checkpoint(server) -> bool:
    """Return whether the server's own directory has one. The start asks no engine to wake from nothing: that fails, and
    is recorded as a failure."""
    return bool(_core.list_checkpoints(server.options.checkpoint_dir, server.options.key_file))


def _is_idle(server, where: str) -> bool:
    """Whether no request would be lost without the checkpoint: those in it, if any, have ended since.

    What comes with a checkpoint from an object store is the whole log: it knows all requests of that checkpoint.
    """
    answers = server.recorder.answers
    if answers.counts()["running"] > 0:
        return False
    if where == server.settings.object_store:
        return True
    try:
        state = _core.read_checkpoint(where, server.options.key_file).to_dict()
    except Error:
        return False
    return all(answers.get(request["id"]) is not None for request in state["scheduler"]["requests"])


def _discard(server, why: str) -> None:
    logger.error("torpor: serving without what was there: %s", why)
    for answer in server.recorder.answers.all():
        if answer["state"] == "running":
            server.end_failed(answer["request"]["id"], why)


async def _wake_portable(server, where: str) -> Report | None:
    """Go on with the requests of a checkpoint of another engine, with their KV (option sessions). Return the report.

    Return None where that cannot be, and nothing has changed: the KV means something else here, a request cannot come
    alone, or readers have got more than the checkpoint has, as after a crash: this way a request goes on from the
    checkpoint's tokens.
    """
    if not server.options.sessions:
        return None
    answers, call = server.recorder.answers, {"call": uuid.uuid4().hex}
    try:
        folder = where if where == server.options.checkpoint_dir else os.path.dirname(os.path.abspath(where))
        known = await asyncio.to_thread(_core.list_checkpoints, folder, server.options.key_file)
        sizes = {os.path.abspath(each["path"]): each["bytes"] for each in known}
        if where == folder:
            where = known[-1]["path"]
        report = Report(await server.engine.torpor.call("wake_portable", call | {"from_checkpoint": where}))
    except Error as problem:
        logger.warning("torpor: the KV of the checkpoint cannot be used: %s", problem)
        return None
    kept, unwanted = False, list[str]()
    try:
        outputs = report.pop("outputs")
        restored = [
            {name: item[name] for name in ("id", *TAKEN_UP)} for item in outputs["requests"] if "token_ids" in item
        ]
        if report.failed_requests or (differing := _differing(answers, restored)):
            names = [each["id"] for each in report.failed_requests] or differing
            logger.warning("torpor: the KV of the checkpoint is not used: the log has more of %s", ", ".join(names))
            return None
        over = [item["id"] for item in restored if not _is_running(answers, item["id"])]
        unwanted = over + server.recorder.take_up([item for item in restored if item["id"] not in over], outputs)
        kept = True
    finally:
        if not kept:
            front_end.forget_all(server.engine.output_processor)
        await server.engine.torpor.call("end_portable", call | {"keep": kept, "lost": unwanted})
    server.engine._run_output_handler()
    replayed: dict[str, list[str]] = {"extended": [], "added": [], "dropped": over}
    report["requests"] -= len(over)
    report["checkpoint_bytes"] = sizes.get(os.path.abspath(report.checkpoint), 0)
    report |= {"replayed": replayed, "paused": False, "phases": [], "ledgers": [], "saved_bytes": 0, "freed_bytes": 0}
    server.metrics.record("wake", "disk", report)
    server.metrics.started(report.requests, replayed, dict.fromkeys(unwanted[len(over) :], "failed"))
    await server.remember_woken(report)
    return report


def _is_running(answers, request_id: str) -> bool:
    known = answers.get(request_id)
    return known is not None and known["state"] == "running"


def _differing(answers, restored: list[dict]) -> list[str]:
    """Return the ids of answers that run by the log, and of which a checkpoint has not exactly the tokens."""
    there = {item["id"]: list(item["token_ids"]) for item in restored}
    running = [answer["request"] for answer in answers.all() if answer["state"] == "running"]
    return [each["id"] for each in running if there.get(each["id"]) != list(each["output_token_ids"])]


async def _wake_new(server, checkpoint: str | None, watcher: Watcher | None) -> Report:
    """A new engine goes on with the requests of a checkpoint, or of the log alone, from what their readers got.

    After end_hold() the engine is asked nothing: it would answer between two steps, and the server serves only later.
    """
    values = {"answers": server.recorder.answers.pack(), "hold": True}
    if checkpoint:
        values |= {"from_checkpoint": checkpoint, "early_where_possible": True}
    with watched(watcher, values) as watched_values:
        woken = server.engine.torpor.call("wake_up", watched_values)
        report = Report(await tracing.traced(server.engine, "wake_up", woken))
    try:
        for failed in report.failed_requests:
            server.end_failed(failed["id"], failed["error"])
        unwanted = server.recorder.take_up(report.pop("restored"), report.pop("outputs"))
    except BaseException:
        front_end.forget_all(server.engine.output_processor)
        await server.engine.torpor.call("end_hold", {"keep": False})
        raise
    await server.engine.torpor.call("end_hold", {"keep": True})
    if unwanted:
        await server.engine.engine_core.abort_requests_async(unwanted)
    server.engine._run_output_handler()
    server.metrics.record("wake", "disk" if report.checkpoint else "response_log", report)
    ended = {each: "dropped" if server.recorder.answers.get(each) is None else "failed" for each in unwanted}
    server.metrics.started(report.requests, report.replayed, ended)
    if report.checkpoint:
        await server.remember_woken(report)
    server.see_to_deferred(report)
    return report
