# SPDX-License-Identifier: Apache-2.0
"""The start of a server: it wakes what an earlier one left, or goes on without, as its operator wants it."""

from __future__ import annotations

import asyncio

from vllm.logger import init_logger

from torpor import _core
from torpor.errors import Error, Incompatible
from torpor.vllm import frontend, tracing
from torpor.vllm.frontend import Report

logger = init_logger("vllm.torpor")  # vLLM sets up only what is below its own name

# What becomes of answers that still run and began with another engine, by --torpor-on-wake-error.
OF_ANOTHER_ENGINE = {"fail": "refuse", "recompute": "take_up", "discard": "set_aside"}


async def wake(server, named: str) -> Report | None:
    """Wake `named`: a checkpoint, or a directory of them; empty: the newest of the server's own.

    Return the report of the wake; None if there was nothing to wake, or it was discarded.
    """
    counts = server.recorder.answers.counts()
    if counts["of_another"]:
        where = f", which are now in {counts['set_aside']}" if counts["set_aside"] else ""
        logger.warning("torpor: answers of another engine were found%s: %s", where, counts["of_another"])
        if server.settings.on_wake_error == "discard":
            _discard(server, f"they are of another engine: {counts['of_another']}")
            return None
    unfit = server.remote.unfit if server.remote is not None and not named else None
    where = named or (server.options.checkpoint_dir if unfit is None else server.settings.object_store)
    nothing_there = unfit is None and not named and not await asyncio.to_thread(has_checkpoint, server)
    if nothing_there and counts["running"] == 0:
        return None
    try:
        if unfit is not None:
            raise unfit
        report = await _wake_new(server, None if nothing_there else where)
    except Error as problem:
        if isinstance(problem, Incompatible) and await asyncio.to_thread(_is_idle, server, where):
            server.leave_checkpoint(where, problem)
            return None
        if server.settings.on_wake_error == "recompute" and not nothing_there:
            logger.error("torpor: going on without the checkpoint: %s", problem)
            report = await _wake_new(server, None)
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
    if report.paused:
        logger.warning("torpor: the engine is paused, as it was when it fell asleep: POST /resume ends that")
    return report


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


async def _wake_new(server, checkpoint: str | None) -> Report:
    """A new engine goes on with the requests of a checkpoint, or of the log alone, from what their readers got.

    After end_hold() the engine is asked nothing: it would answer between two steps, and the server serves only later.
    """
    values = {"answers": server.recorder.answers.pack(), "hold": True} | (
        {"from_checkpoint": checkpoint} if checkpoint else {}
    )
    woken = server.engine.torpor.call("wake_up", values)
    report = Report(await tracing.traced(server.engine, "wake_up", woken))
    try:
        for failed in report.failed_requests:
            server.end_failed(failed["id"], failed["error"])
        unwanted = server.recorder.take_up(report.pop("restored"), report.pop("outputs"))
    except BaseException:
        frontend._forget(server.engine.output_processor)
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
    return report
