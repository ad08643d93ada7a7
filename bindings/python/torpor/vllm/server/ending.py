# SPDX-License-Identifier: Apache-2.0
"""The end of a server: on SIGTERM what can be saved is saved; one that lost its ownership ends at once."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Collection
from http import HTTPStatus
from urllib.parse import quote

from vllm.exceptions import GracefulHTTPError
from vllm.logger import init_logger

from torpor.errors import Busy, Error, WrongState
from torpor.vllm.server import listening, standby

logger = init_logger("vllm.torpor")  # vLLM sets up only what is below its own name

_ENDING = "ending"  # the name of its tasks
_WRITING_SECONDS = 5.0  # most that the last try to write the response log may take


async def take_signals(server) -> None:
    """SIGTERM is ours from the moment on when vLLM's server has taken it."""
    if server.settings.on_sigterm != "checkpoint" or not server.options.checkpoint_dir:
        return
    await listening.http_server(server)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: server.tasks.run(server.end(), _ENDING))


async def end(server) -> None:
    """Saves what can be saved in the given time, tells the clients, and lets vLLM end the process, whatever fails."""
    if server.state == "ending":
        return
    try:
        await _end(server)
    except Exception as problem:
        server.tasks.failed(_ENDING, problem)
    os.kill(os.getpid(), signal.SIGINT)  # vLLM's own way out


async def _end(server) -> None:
    began, before = time.monotonic(), server.state
    # Only the owner of the directory saves: a checkpoint of a standby would be newer than the owner's.
    begun = server.recorder is not None if server.has_log else before not in standby.STATES
    running = server.running() if begun else 0
    server.enter("ending")
    if server.listener is not None:
        server.listener.close()  # who connects from now on waits there for the next server
    if begun and before != "failed":
        saving = server.tasks.run(_save_before_end(server, before))
        done, _ = await asyncio.wait({saving}, timeout=server.settings.sigterm_seconds)
        problem = (
            saving.exception() if done else TimeoutError(f"it takes longer than {server.settings.sigterm_seconds:g} s")
        )
        lost = await _unwritten(server)
        if lost:
            running -= len(lost)
            logger.error("torpor: the response log lacks %d running answers: they are lost", len(lost))
        if problem is not None:
            logger.error(
                "torpor: no checkpoint on SIGTERM: %s. The KV cache of %d requests was not saved: %s.",
                problem,
                running,
                "the next server computes it anew from the response log"
                if server.has_log
                else "without a response log these requests end here, or go on from an older checkpoint",
            )
        await _goodbye(server, lost)
    if server.remote is not None:
        await server.tasks.run(server.remote.release(), _ENDING)
    logger.info("torpor: ended with %d requests to go on, in %.2f s", running, time.monotonic() - began)


async def after_switch(server) -> None:
    """Tell the clients of a server that has handed over, and end it. Nothing is recorded, delivered or saved."""
    await _goodbye(server)
    os.kill(os.getpid(), signal.SIGINT)


async def end_when_disowned(server) -> None:
    """Another server goes on with these requests, or may soon: nothing is recorded, delivered or saved any more.

    So it is, too, where nobody knows whether this server still owns them, because renewing has failed in a way that
    nobody thought of.
    """
    await server.tasks.run(server.remote.disowned(), "keeping ownership")
    if server.state in ("failed", "ending"):
        return
    logger.error("torpor: this server does not own what is in %s any more; it ends", server.settings.object_store)
    server.enter("ending")
    if server.recorder is not None:
        await _goodbye(server)
    os.kill(os.getpid(), signal.SIGINT)


async def _unwritten(server) -> set[str]:
    """Return the ids of running requests that the next server will not find whole in the response log.

    A log that could not be written, on a disk that was full, is written anew first: there may be room now.
    """
    if server.recorder is None:
        return set()
    answers = server.recorder.answers
    try:
        async with asyncio.timeout(_WRITING_SECONDS):
            while answers.unwritten():
                try:
                    await asyncio.to_thread(answers.rotate)
                except Busy:  # the log's own thread does the same
                    await asyncio.sleep(0.05)
    except (Error, TimeoutError) as problem:
        logger.error("torpor: the response log cannot be written: %s", problem or "it takes too long")
    return set(answers.unwritten()).intersection(server.engine.output_processor.request_states)


async def _goodbye(server, lost: Collection[str] = ()) -> None:
    """`lost`: ids of requests that the next server will not have."""
    try:
        if server.recorder is not None:
            server.recorder.close()
    except Exception as problem:
        server.tasks.failed(_ENDING, problem)
    await server.tasks.run(_notify_clients(server, lost), _ENDING)


async def _save_before_end(server, before: str) -> None:
    async with server.operation:  # what is in progress comes to its end first
        if server.handed_over:  # the directory is another server's
            return
        await server.sync_log()
        state = await server.engine.torpor.call("state")
        if state["checkpoint"]:
            return  # asleep on disk already
        if state["engine"] != "awake":  # its memory is the only place where the state is
            try:
                await server.engine.wake_up()
            except WrongState:  # new weights were loaded, and nobody said what becomes of KV
                await server.engine.wake_up(kv="keep")
        await server.sessions.bring_back()  # no checkpoint has a request that is hibernated
        report = await server.sleep_now(1, "abort", True, "disk", {"weights": "reload"})
        logger.info(
            "torpor: checkpoint %s, %d requests, %.1f MB, in %.2f s",
            report.checkpoint,
            report.requests,
            report.checkpoint_bytes / 1e6,
            report.seconds,
        )


def _where_it_goes_on(server, request_id: str) -> str:
    """Return what the client of this request can do: its answer goes on if the response log has it."""
    known = server.recorder.answers.get(request_id) if server.recorder is not None else None
    if known is None:
        return "send it again"
    return f"take up this answer at /torpor/requests/{quote(known['response'], safe='')} of the next one"


async def _notify_clients(server, lost: Collection[str]) -> None:
    """Their connections end. Without a word a stream that ends looks complete to some."""
    for request_id, state in server.engine.output_processor.request_states.items():
        if state.queue is None:
            continue
        next_step = "send it again" if request_id in lost else _where_it_goes_on(server, request_id)
        state.queue.put(GracefulHTTPError(f"the server ends; {next_step}", HTTPStatus.SERVICE_UNAVAILABLE))
    await asyncio.sleep(0.1)  # for the words to be written
