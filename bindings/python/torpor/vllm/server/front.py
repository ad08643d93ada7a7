# SPDX-License-Identifier: Apache-2.0
"""What a console asks of the server itself, not of its engine: plan, sleep, wake, checkpoint (docs/console.md).

By HTTP and by a socket of this process, beside that of the engine core; both end here.
"""

from __future__ import annotations

import asyncio
import json
from typing import TypeVar

from vllm.logger import init_logger

from torpor import _core
from torpor.errors import Error, InvalidArgument
from torpor.vllm.front_end_methods import metadata_option
from torpor.vllm.server.life import Server

logger = init_logger("vllm.torpor")  # vLLM sets up only what is below its own name

Default = TypeVar("Default", str, None)
METHODS = frozenset(each["method"] for each in _core.control_methods() if each["front"])


async def carry_out(life: Server, method: str, params: dict) -> dict:
    """The report. Raises what a console is told, also of a parameter that does not fit the table of methods."""
    _core.check_call(method, json.dumps(params))
    if method == "checkpoint":
        return summary(await life.checkpoint())
    tags = [tag.strip() for tag in params["tags"].split(",")] if "tags" in params else None
    if method == "wake":
        report = await life.wake_up(tags, _word(params, "kv", None, "recompute", "keep", "abort"))
        return {"status": "awake" if report.fully_awake else "sleeping"} | summary(report)
    level, to = params.get("level", 1), _word(params, "to", "host", "disk")
    if level not in (0, 1, 2):
        raise InvalidArgument(f"level is {level}", "use 0, 1 or 2")
    if method == "plan":
        return await plan(life, int(level), params.get("preserve_state", True), to)
    return await sleep(
        life,
        int(level),
        _word(params, "mode", None, "abort", "wait", "keep"),
        params.get("preserve_state"),
        to,
        {"weights": _word(params, "weights", None, "store", "reload"), "tags": tags},
    )


async def sleep(
    life: Server, level: int, mode: str | None, preserve_state: bool | None, to: str, options: dict
) -> dict:
    """Without `mode` and `preserve_state` the requests are preserved; a caller that names a mode decides otherwise.

    options: further arguments of AsyncLLM.sleep().
    """
    metadata_option(options.get("metadata"), to)  # refused before requests are waited for
    preserve = preserve_state if preserve_state is not None else mode is None and level > 0
    report = await life.sleep(level, mode, preserve, to, **options)
    return {"status": "sleeping", "level": level} | summary(report)


async def plan(life: Server, level: int, preserve_state: bool, to: str) -> dict:
    in_flight = "freeze" if preserve_state or level == 0 else "abort"
    options = {"level": level, "preserve_state": preserve_state, "in_flight": in_flight, "to": to}
    return await life.engine.torpor.call("plan_sleep", options)


def metadata_of(pairs: list[str] | None) -> dict[str, str] | None:
    """Return "name=value", as a query has them, as a dict."""
    if pairs is None:
        return None
    metadata = dict[str, str]()
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or name in metadata:
            wrong = f"has {name!r} twice" if equals else f"has {pair!r}"
            raise InvalidArgument(f"metadata {wrong}", "say each as metadata=NAME=VALUE")
        metadata[name] = value
    return metadata


def summary(report: dict) -> dict:
    return {name: value for name, value in report.items() if name not in ("outputs", "restored", "level")}


def _word(params: dict, name: str, default: Default, *others: str) -> str | Default:
    value = params.get(name, default)
    if value != default and value not in others:
        known = ", ".join(filter(None, (default, *others)))
        raise InvalidArgument(f'{name} is "{value}"', f"use one of: {known}")
    return value


def begin(life: Server) -> None:
    """This process has a socket, too, where its engine has one. One that cannot be made is said, and it serves on."""
    options = life.options
    if options.console == "off" or options.events_dir is None:
        return
    loop = asyncio.get_running_loop()

    def asked(method: str, params: str, call) -> None:  # in the socket's thread
        async def answer() -> None:
            try:
                call.answer(json.dumps(await carry_out(life, method, json.loads(params)), default=str))
            except Error as problem:
                call.fail(problem.code, problem.what, problem.next_step, problem.state_changed)
            except BaseException as problem:
                call.fail("internal", f"{type(problem).__name__}: {problem}")
                raise

        try:
            loop.call_soon_threadsafe(lambda: life.tasks.run(answer(), "answering a console"))
        except RuntimeError:  # the loop has ended
            call.fail("unavailable", "the server ends")

    try:
        _core.begin_events(options.events_dir, "front")
        _core.begin_control(options.console == "control", options.recordings_dir or "")
    except Error as problem:
        logger.warning("torpor has no console of the server: %s", problem)
        return
    _core.serve_front(asked)
