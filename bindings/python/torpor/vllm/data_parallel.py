# SPDX-License-Identifier: Apache-2.0
"""Several engine cores behind one AsyncLLM: data parallel ranks, each an engine of its own with its own requests.

All of them are asked and all replies gathered. They sleep together or not at all: each keeps what it must keep and
waits, and only when all have done so does their memory go. Their checkpoints are one (a set, written by C++ when the
last is whole); a wake from it restores all ranks, or none.

Ranks with experts compute for each other: as long as one has requests all take steps, be they empty. They stand still
before any of them is asked to sleep, by vLLM's own consent, and go on together when none is asleep any more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from vllm.v1.engine.core_client import DPLBAsyncMPClient

from torpor import _core, errors
from torpor.errors import Error, Incompatible, Unsupported, WrongState
from torpor.vllm.options import Options
from torpor.vllm.support import compute_for_each_other

logger = logging.getLogger("vllm.torpor")

_ONLY_LOOK = (
    "sent", "fingerprint", "plan_sleep", "ledger", "state", "drain", "end_drain", "checkpoint_to_wake",
    "check_directory",
)  # fmt: skip
_SET_OPTIONS = ("retain_checkpoints", "retain_checkpoint_seconds", "retain_checkpoint_bytes", "key_file", "encrypt")
_SUMS = (
    "requests", "saved_bytes", "compacted_bytes", "reused_bytes", "host_bytes", "disk_bytes", "freed_bytes",
    "restored_bytes",
    "deferred_blocks", "deferred_bytes", "unread_bytes", "kept_blocks", "dropped_blocks", "checkpoint_bytes",
)  # fmt: skip


def has_several(client) -> bool:
    """Whether this client of engine cores has more than one."""
    return len(getattr(client, "core_engines", ())) > 1


class Ranks:
    """The engine cores of a DPLBAsyncMPClient, called as if they were one."""

    def __init__(self, client: DPLBAsyncMPClient, vllm_config):
        self._client = client
        self._options = Options.of(vllm_config)
        self._size = len(client.core_engines)
        self._parallel = vllm_config.parallel_config
        self._rank_of: dict[str, int] = {}  # requests, when the engines were frozen or restored
        self._woken_set: dict | None = None  # until its requests run
        self._sleeps_in = ""  # the set of the last sleep whose ranks wrote checkpoints; "": it has none
        self._one_at_a_time = asyncio.Lock()
        self._with_experts = compute_for_each_other(vllm_config) and vllm_config.model_config.is_moe
        self._ranks_stopped = False
        self._have_requests = False  # when they last fell asleep, on any of them

    async def call(self, method: str, options: dict):
        """As torpor_call() of one engine core; raises what one of them has failed with.

        Goes to its end also when its caller is cancelled: no engine waits for ever for a word that does not come.
        """
        return await asyncio.shield(asyncio.ensure_future(self._call(method, options)))

    async def _call(self, method: str, options: dict):
        special = {
            "freeze": self._freeze, "sent": self._sent, "sleep": self._sleep, "checkpoint": self._sleep,
            "wake_up": self._wake_up, "state": self._state, "check_directory": self._check_directory,
        }  # fmt: skip
        async with self._one_at_a_time:
            self._size = len(self._client.core_engines)
            if not self._with_experts or method in _ONLY_LOOK:
                return await self._ask_all(special, method, options)
            try:
                if method in special:
                    await self._stop_ranks()
                return await self._ask_all(special, method, options)
            finally:
                await self._restart_ranks()

    async def _stop_ranks(self) -> None:
        if not self._ranks_stopped:
            # Otherwise the others would compute on, and these would wait for them for ever.
            if self._size < self._parallel.data_parallel_size:
                raise Unsupported(
                    f"data parallelism with experts: {self._size} of "
                    f"{self._parallel.data_parallel_size} ranks are behind this AsyncLLM",
                    "use one with all ranks behind it, which stops them together",
                )
            self._ranks_stopped = True
            _all(await self._ask("stop_ranks", [{}] * self._size))

    async def _restart_ranks(self) -> None:
        if self._ranks_stopped and not any(_all(await self._ask("is_quiet", [{}] * self._size))):
            _all(await self._ask("restart_ranks", [{}] * self._size))
            self._ranks_stopped = False

    async def _ask_all(self, special: dict, method: str, options: dict):
        if method in special:
            return await special[method](method, options)
        of_rank = [options] * self._size
        if method in ("plan_sleep", "drain"):
            of_rank = [options | {"data_parallel": [rank, self._size]} for rank in range(self._size)]
        if method == "end_hold":
            return await self._end_hold(options)
        return _MERGED.get(method, _first)(_all(await self._ask(method, of_rank)))

    async def _ask(self, method: str, options: list[dict], ranks=None) -> list:
        """The result of each rank, or its error."""
        ranks = range(self._size) if ranks is None else ranks
        calls = (
            self._client._call_utility_async(
                "torpor_call", method, options[rank], engine=self._client.core_engines[rank]
            )
            for rank in ranks
        )
        replies = await asyncio.gather(*calls, return_exceptions=True)
        return [_unwrapped(rank, reply) for rank, reply in zip(ranks, replies, strict=True)]

    async def _state(self, method: str, options: dict) -> dict:
        merged = _merged_states(_all(await self._ask(method, [options] * self._size)))
        return merged | ({"checkpoint": self._sleeps_in} if merged["checkpoint"] else {})

    async def _check_directory(self, method: str, options: dict) -> None:
        for rank in range(self._size):  # one after another: each takes the lock of the directory
            _all(await self._ask(method, [options] * self._size, [rank]))

    # --- sleep ---

    async def _freeze(self, method: str, options: dict) -> dict[str, Any]:
        replies = await self._ask(method, [options] * self._size)
        if any(isinstance(reply, BaseException) for reply in replies):
            await self._ask("unfreeze", [{}] * self._size)
        frozen = _all(replies)
        return _one_to_sleep(frozen) | {"sent": self._noted([rank["sent"] for rank in frozen])}

    async def _sent(self, method: str, options: dict) -> dict[str, int]:
        sent = _all(await self._ask(method, [options] * self._size))
        return _joined(sent) if options.get("of_asleep") else self._noted(sent)

    def _noted(self, sent: list[dict[str, int]]) -> dict[str, int]:
        """Return what all ranks have sent, and note which rank has which request."""
        self._rank_of = {request_id: rank for rank, of_rank in enumerate(sent) for request_id in of_rank}
        return _joined(sent)

    async def _sleep(self, method: str, options: dict) -> dict:
        asked = [options | {"data_parallel": [rank, self._size]} for rank in range(self._size)]
        if "outputs" in options:
            for rank, of_rank in enumerate(self._split(options["outputs"])):
                asked[rank]["outputs"] = of_rank
        replies = await self._ask(method, asked)
        held = [rank for rank, reply in enumerate(replies) if isinstance(reply, dict) and reply.get("held")]
        written: _core.CheckpointSet | None = None
        try:
            reports = _all(replies)
            written, note = await self._commit_set(reports, options)
        except BaseException:
            await self._take_back(held)
            raise
        ended = await self._ask("end_sleep", [{"keep": True}] * self._size, held)
        try:
            reports = [*_all(ended), *(reports[rank] for rank in range(self._size) if rank not in held)]
        except BaseException as problem:
            left = await _withdraw(written)
            if method == "sleep":
                asleep = {rank: reply for rank, reply in zip(held, ended, strict=True) if isinstance(reply, dict)}
                await self._wake_those_asleep(asleep, options, problem, left)
            elif left and isinstance(problem, Error):
                raise _extended(problem, left, state_changed=True) from problem
            raise
        report = _merged_reports(reports) | {"checkpoint": ""}
        if report["changed"]:
            self._have_requests = report["requests"] > 0
        if written is not None:
            report["checkpoint"] = written.path
            await asyncio.to_thread(written.keep)
        elif report["changed"] and options.get("to") == "disk":  # what ranks have written is for this process alone
            report |= {"to": "host", "checkpoint_bytes": 0, "checkpoint_parts": {}, "metadata": {}}
            report["note"] = "; ".join(filter(None, (report["note"], note)))
        if method == "sleep" and any(rank["checkpoint"] for rank in reports):
            self._sleeps_in = report["checkpoint"]
        return report

    async def _commit_set(self, reports: list[dict], options: dict) -> tuple[_core.CheckpointSet | None, str]:
        """One checkpoint of all, once each rank has written its own. None if there is none; then a note may say why."""
        paths = [report["checkpoint"] if report.get("held") else "" for report in reports]
        discards = options.get("on_save_error") == "discard"
        if (directory := self._options.checkpoint_dir) is not None and all(paths):
            try:
                return await asyncio.to_thread(_core.commit_set, directory, paths, self._set_options()), ""
            except Error as problem:
                if not discards:
                    raise
                note = f"there is no checkpoint of all ranks, and only this process can wake them: {problem}"
                logger.error("sleep: %s", note)
                return None, note
        if any(paths) and not discards:
            without = paths.index("")
            raise WrongState(
                f"data parallel rank {without} has no checkpoint: {reports[without]['note']}", "wake it first"
            )
        return None, ""

    async def _take_back(self, held: list[int]) -> None:
        taken = await self._ask("end_sleep", [{"keep": False}] * self._size, held)
        for failed in (reply for reply in taken if isinstance(reply, BaseException)):
            raise failed

    async def _wake_those_asleep(
        self, asleep: dict[int, dict], options: dict, problem: BaseException, left: list[str]
    ) -> None:
        """After a rank could not release its memory, the `problem`. `asleep`: the reports of those that could. `left`:
        what else is not as before.

        Ranks that sleep without their weights stay asleep: they would serve with weights that have no content. What
        cannot be woken stays asleep, too, and can be later. Raises the problem with what is not as before.
        """
        unloaded = {rank: report["reload"] for rank, report in asleep.items() if report["reload"]}
        whole = [rank for rank in asleep if rank not in unloaded]
        woken = dict(zip(whole, await self._ask("wake_up", [{}] * self._size, whole), strict=True))
        if unloaded:
            self._have_requests = any(report["requests"] > 0 for report in asleep.values())
        if not isinstance(problem, Error):
            return
        found, next_steps = list(left), []
        for rank, tags in unloaded.items():
            found.append(f"data parallel rank {rank} sleeps without {', '.join(tags)}")
        for rank, reply in woken.items():
            if isinstance(reply, BaseException):
                found.append(f"data parallel rank {rank} was not woken ({reply})")
            elif reply["reload"]:
                found.append(f"data parallel rank {rank} woke without {', '.join(reply['reload'])}")
                unloaded[rank] = reply["reload"]
            elif not reply["fully_awake"]:
                found.append(f"data parallel rank {rank} is not fully awake ({reply['note']})")
        if options.get("level", 1) > 0 and not options.get("preserve_state"):
            how = "computes its requests again" if options.get("in_flight") == "recompute" else "has ended its requests"
            found += [f"data parallel rank {rank} {how}" for rank, report in asleep.items() if report["requests"] > 0]
        if not found:
            return
        if unloaded:
            tags = sorted({tag for of_rank in unloaded.values() for tag in of_rank})
            next_steps.append(f"call wake_up(tags={tags}), load {', '.join(tags)}, then call wake_up()")
        elif not all(isinstance(reply, dict) and reply["fully_awake"] for reply in woken.values()):
            next_steps.append("call wake_up()")
        raise _extended(problem, found, next_steps, state_changed=True) from problem

    def _split(self, outputs: dict) -> list[dict]:
        """The front end's part of each rank: of its own requests."""
        parts = []
        for rank in range(self._size):
            requests = [entry for entry in outputs["requests"] if self._rank_of.get(entry["id"]) == rank]
            parents = {entry["parent"] for entry in requests}
            parts.append({
                "requests": requests,
                "parents": [parent for parent in outputs["parents"] if parent["id"] in parents],
            })  # fmt: skip
        return parts

    # --- wake ---

    async def _wake_up(self, method: str, options: dict) -> dict:
        began = time.time()
        if options.get("early"):
            raise Unsupported("a post-copy wake of data parallel ranks", "wake them without early")
        if "from_checkpoint" not in options:
            options = options | {"others_wait": self._have_requests}
            replies = await self._ask(method, [options] * self._size)
            try:
                return _merged_reports(_all(replies))
            except Error as problem:  # their requests have nothing to do with each other
                awake = [str(rank) for rank, reply in enumerate(replies) if isinstance(reply, dict)]
                found = [f"awake: {', '.join(awake) or 'none'}"]
                raise _extended(problem, found, state_changed=problem.state_changed or bool(awake)) from problem
        try:
            return await self._restore(method, options | {"on_restore_error": "abort"})
        except Error as problem:
            if options["on_restore_error"] != "discard" or problem.state_changed:
                raise
            return _NOTHING_RESTORED | {
                "note": f"the state was discarded: {problem}",
                "checkpoint": options["from_checkpoint"],
                "began": began,
            }

    async def _restore(self, method: str, options: dict) -> dict:
        found = await asyncio.to_thread(_core.open_set, options["from_checkpoint"], self._options.key_file)
        if len(found["members"]) != self._size:
            raise Incompatible(
                f"{found['path']} is of {len(found['members'])} data parallel ranks, there are {self._size}",
                f"wake it with data_parallel_size={len(found['members'])}",
            )
        replies = await self._ask(method, [options | {"from_checkpoint": path} for path in found["members"]])
        if any(isinstance(reply, BaseException) for reply in replies):
            restored = [rank for rank, reply in enumerate(replies) if isinstance(reply, dict) and reply["changed"]]
            await self._ask("end_hold", [{"keep": False}] * self._size, restored)
        reports = _all(replies)
        failed = {item["id"] for report in reports for item in report["failed_requests"]}
        self._rank_of = {
            entry["id"]: rank
            for rank, report in enumerate(reports)
            for entry in report["outputs"]["requests"]
            if entry["id"] not in failed
        }
        self._woken_set = found
        return _merged_reports(reports) | {"checkpoint": found["path"], "outputs": _merged_outputs(reports)}

    async def _end_hold(self, options: dict) -> None:
        """The restored requests run: what comes for them, and that they are to be aborted, goes to the engine that has
        them."""
        found, self._woken_set = self._woken_set, None
        if not options["keep"]:
            found = None
        if found is not None:  # before they run: one that ends at once must not count for ever
            for request_id, rank in self._rank_of.items():
                engine = self._client.core_engines[rank]
                if self._client.reqs_in_flight.setdefault(request_id, engine) is engine:
                    self._client.engine_inflight[engine] += 1
        _all(await self._ask("end_hold", [options] * self._size))
        if found is None:
            return
        place = found["directory"], found["generation"]
        try:
            await asyncio.to_thread(_core.set_woken_from, *place, self._set_options())
        except Error as problem:
            logger.warning("all ranks go on from %s; after the wake: %s", found["path"], problem)

    def _set_options(self) -> dict:
        return {name: value for name in _SET_OPTIONS if (value := getattr(self._options, name)) is not None}


def _unwrapped(rank: int, reply):
    """The result in a reply of a rank, or its error, which names the rank."""
    if isinstance(reply, BaseException) or "error" not in reply:
        return reply if isinstance(reply, BaseException) else reply["result"]
    error = reply["error"]
    return errors.from_dict(error | {"what": f"data parallel rank {rank}: {error['what']}"})


def _all(replies: list) -> list:
    """The results of all ranks. Raises the first error; it has changed something if any of them has."""
    failed = [reply for reply in replies if isinstance(reply, BaseException)]
    if not failed:
        return replies
    if isinstance(failed[0], Error):
        failed[0].state_changed = any(getattr(reply, "state_changed", False) for reply in failed)
    raise failed[0]


async def _withdraw(written: _core.CheckpointSet | None) -> list[str]:
    """Remove a committed set, if there is one. Return, in words, what may be left of it: a whole checkpoint."""
    if written is None:
        return []
    try:
        await asyncio.to_thread(written.withdraw)
    except Error as problem:
        logger.error("the checkpoint %s was not removed: %s", written.path, problem)
        return [f"its checkpoint may be left at {written.path}"]
    return []


def _extended(problem: Error, found: list[str], next_steps: Iterable[str] = (), *, state_changed: bool) -> Error:
    """The problem, with what else was found and what to do about that."""
    what, next_step = "; ".join([problem.what, *found]), "; ".join(filter(None, [problem.next_step, *next_steps]))
    return errors.make(problem.code, what, next_step, problem.origin, problem.native, state_changed=state_changed)


def _joined(sent: list[dict[str, int]]) -> dict[str, int]:
    return {request_id: count for of_rank in sent for request_id, count in of_rank.items()}


def _first(results: list):
    return results[0]


def _merged_reports(reports: list[dict]) -> dict:
    slowest = max(reports, key=lambda report: report["seconds"])
    parts: dict[str, int] = {}
    for report in reports:
        for name, size in report["checkpoint_parts"].items():
            parts[name] = parts.get(name, 0) + size
    pauses = [report["pause_seconds"] for report in reports if "pause_seconds" in report]
    acted = [report for report in reports if report["changed"]] or reports
    return reports[0] | {
        "changed": any(report["changed"] for report in reports),
        "fully_awake": all(report["fully_awake"] for report in reports),
        "preserve_state": all(report["preserve_state"] for report in acted),
        "note": "; ".join(dict.fromkeys(report["note"] for report in reports if report["note"])),
        "checkpoint_parts": parts,
        "reload": sorted({tag for report in reports for tag in report["reload"]}),
        "failed_requests": [item for report in reports for item in report["failed_requests"]],
        "bound_requests": [item for report in reports for item in report.get("bound_requests", ())],
        "phases": slowest["phases"],
        "seconds": slowest["seconds"],
        "began": slowest.get("began"),
        "ledgers": [ledger for report in reports for ledger in report["ledgers"]],
    } | {name: sum(report[name] for report in reports) for name in _SUMS} | (
        {"pause_seconds": max(pauses)} if pauses else {}
    )  # fmt: skip


def _merged_outputs(reports: list[dict]) -> dict:
    """Answers to one prompt may come from several ranks: each has the prompt's own entry."""
    parents = {parent["id"]: parent for report in reports for parent in report["outputs"]["parents"]}
    return {
        "requests": [entry for report in reports for entry in report["outputs"]["requests"]],
        "parents": list(parents.values()),
    }


def _one_to_sleep(states: list[dict]) -> dict:
    """Return the state of an engine that is awake, if there is one: it is left to sleep."""
    return next((state for state in states if state["engine"] != "asleep"), states[0])


def _merged_states(states: list[dict]) -> dict:
    return _one_to_sleep(states) | {"recomputed_tokens": sum(state["recomputed_tokens"] for state in states)}


_PLAN_SUMS = ("reused_bytes", "host_bytes", "disk_bytes", "requests", "kept_blocks", "dropped_blocks")


def _merged_plans(plans: list[dict]) -> dict:
    def summed(name: str) -> dict:
        return {tag: sum(plan[name].get(tag, 0) for plan in plans) for plan in plans for tag in plan[name]}

    return {
        "save_bytes": summed("save_bytes"),
        "free_bytes": summed("free_bytes"),
        "problems": [problem for plan in plans for problem in plan["problems"]],
    } | {name: sum(plan[name] for plan in plans) for name in _PLAN_SUMS}


_NOTHING_RESTORED: dict[str, Any] = dict.fromkeys(_SUMS, 0) | {
    "changed": False, "fully_awake": True, "level": 0, "preserve_state": False, "to": "", "seconds": 0.0,
    "outputs": None, "checkpoint_parts": {}, "reload": [], "failed_requests": [], "phases": [], "ledgers": [],
    "metadata": {},
}  # fmt: skip
_MERGED: dict[str, Callable[[list], Any]] = {
    "drain": sum,
    "ledger": lambda ledgers: [ledger for of_rank in ledgers for ledger in of_rank],
    "plan_sleep": _merged_plans,
    "checkpoint_to_wake": lambda found: found[0] if all(found) else "",
}
