# SPDX-License-Identifier: Apache-2.0
"""The end of a server: on SIGTERM what can be saved is saved; one that lost its ownership ends at once.

The process ends by vLLM's own way out, which a SIGINT begins: it aborts all requests, and waits until all connections
have ended. For the response log these requests run on, in the next server. A connection whose client reads nothing is
closed.
"""

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
# For clients to read the last words, once vLLM's HTTP server ends. One that reads nothing keeps the process no longer,
# and with it the lock of the directory.
_READING_SECONDS = 5.0
_LOOK_SECONDS = 0.2  # between looks whether vLLM's HTTP server ends


async def take_signals(server) -> None:
    """Take SIGTERM, or notice it, and notice SIGINT, from the moment on when vLLM's server has taken both."""
    if not server.options.checkpoint_dir:  # nothing outlives this process
        return
    await listening.http_server(server)
    server.tasks.run(_close_connections(server), _ENDING)
    if server.settings.on_sigterm == "checkpoint":
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: server.tasks.run(server.end(), _ENDING))
    else:
        _notice(server, signal.SIGTERM)
    # A Ctrl-C writes no checkpoint: a terminal sends it to the engine's processes, too, and they end at once.
    _notice(server, signal.SIGINT)


def _notice(server, number: int) -> None:
    """Have the recorder, and _end_unsaved(), know of a signal before vLLM, whose own way out it begins."""
    loop, vllms = asyncio.get_running_loop(), signal.getsignal(number)

    def notice(received: int, frame) -> None:
        if server.recorder is not None:
            server.recorder.server_ends = True  # at once: the engine may have had the signal, too
        loop.call_soon_threadsafe(_noticed, server, received)
        if callable(vllms):
            vllms(received, frame)

    signal.signal(number, notice)  # the loop calls vLLM's handler as before
    signal.siginterrupt(number, False)


def _noticed(server, number: int) -> None:
    if not server.leaving:
        server.leaving = True
        server.tasks.run(_end_unsaved(server), _ENDING)
    elif number == signal.SIGINT:
        logger.error("torpor: a second Ctrl-C: the process ends at once")
        os._exit(128 + signal.SIGINT)


async def _close_connections(server) -> None:
    """Once vLLM's HTTP server ends, for whatever reason, give clients time to read, then close their connections."""
    http = server.app_state.server
    while not http.should_exit:
        await asyncio.sleep(_LOOK_SECONDS)
    await asyncio.sleep(_READING_SECONDS)
    http.force_exit = True
    if connections := list(http.server_state.connections):
        logger.warning("torpor: %d connections are closed, whose clients have not read all", len(connections))
    for connection in connections:
        connection.transport.abort()


async def _end_unsaved(server) -> None:
    """Notify the clients, unless end() has done so. In a drain of vLLM (--shutdown-timeout) requests may end first."""
    notified = server.state == "ending" and (server.recorder is None or server.recorder.closed)
    if server.state != "ending":
        _enter_ending(server)
        drains = server.engine.vllm_config.shutdown_timeout > 0
        while drains and not server.app_state.server.should_exit:
            await asyncio.sleep(_LOOK_SECONDS)
    if server.remote is not None:
        server.remote.stop_copies()
    if notified:
        return
    lost = await _unwritten(server)
    if server.recorder is not None:
        logger.info("torpor: ends without a checkpoint, with %d requests to go on", server.running() - len(lost))
    # What is in the object store stays owned for a term: the directory has more than it, and may serve again before.
    await _goodbye(server, lost)


def _enter_ending(server) -> None:
    server.enter("ending")
    if server.listener is not None:
        server.listener.close()  # who connects from now on waits there for the next server


async def end(server) -> None:
    """Saves what can be saved in the given time, tells the clients, and lets vLLM end the process, whatever fails."""
    if server.state == "ending":
        return
    try:
        await _end(server)
    except Exception as problem:
        server.tasks.failed(_ENDING, problem)
    _begin_to_leave(server)


def _begin_to_leave(server) -> None:
    if not server.leaving:
        os.kill(os.getpid(), signal.SIGINT)  # vLLM's own way out


async def _end(server) -> None:
    began, before = time.monotonic(), server.state
    # Only the owner of the directory saves: a checkpoint of a standby would be newer than the owner's.
    begun = server.recorder is not None if server.has_log else before not in standby.STATES
    running = server.running() if begun else 0
    _enter_ending(server)
    if begun:
        problem = None if before == "failed" else await _problem_of_saving(server, before)
        saved = before != "failed" and problem is None
        server.pushed_at_end = server.remote is not None and saved and not server.push_failed
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
        if only_here := _is_only_here(server):
            logger.error(
                "torpor: what this server leaves was not pushed to %s. The next server on this machine finds all of it "
                "in %s; one on another machine goes on from the last push, and has no request that came since",
                server.settings.object_store,
                server.options.checkpoint_dir,
            )
        await _goodbye(server, lost)
    if server.remote is not None:
        await server.tasks.run(server.remote.release(), _ENDING)
    where = " in a server with this directory" if begun and only_here else ""
    logger.info("torpor: ended with %d requests to go on%s, in %.2f s", running, where, time.monotonic() - began)


def _is_only_here(server) -> bool:
    """Whether the object store lacks some of what this server leaves in its directory."""
    return server.remote is not None and not server.pushed_at_end


async def _problem_of_saving(server, before: str) -> BaseException | None:
    saving = server.tasks.run(_save_before_end(server, before))
    done, _ = await asyncio.wait({saving}, timeout=server.settings.sigterm_seconds)
    return saving.exception() if done else TimeoutError(f"it takes longer than {server.settings.sigterm_seconds:g} s")


async def after_switch(server) -> None:
    """Tell the clients of a server that has handed over, and end it. Nothing is recorded, delivered or saved."""
    await _goodbye(server)
    _begin_to_leave(server)


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
    _begin_to_leave(server)


def notify_of_failure(server) -> None:
    """End the streams of a server that has failed: their clients would wait for ever."""
    if server.recorder is not None:
        server.recorder.end_reading(f"the server is failed: {server.problem}")
    _put_errors(server, "the server is failed")


async def _unwritten(server) -> set[str]:
    """Return the ids of running requests that the next server will not find whole in the response log.

    A log that could not be written, on a disk that was full, is written anew first: there may be room now.
    """
    if server.recorder is None or server.handed_over:
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
    where = f"take up this answer at /torpor/requests/{quote(known['response'], safe='')} of the next one"
    return f"{where}, or send it again if that has none" if _is_only_here(server) else where


async def _notify_clients(server, lost: Collection[str]) -> None:
    """Their connections end. Without a word a stream that ends looks complete to some."""
    _put_errors(server, "the server ends", lost)
    await asyncio.sleep(0.1)  # for the words to be written


def _put_errors(server, what: str, lost: Collection[str] = ()) -> None:
    """End the stream of each client with an error."""
    for request_id, state in server.engine.output_processor.request_states.items():
        if state.queue is None:
            continue
        next_step = "send it again" if request_id in lost else _where_it_goes_on(server, request_id)
        state.queue.put(GracefulHTTPError(f"{what}; {next_step}", HTTPStatus.SERVICE_UNAVAILABLE))
