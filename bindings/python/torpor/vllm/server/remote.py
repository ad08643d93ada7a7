# SPDX-License-Identifier: Apache-2.0
"""What a server has in an object store: it owns it while it serves, and another one on any machine goes on after it."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from vllm.logger import init_logger

from torpor import _core
from torpor.errors import Aborted, Busy, Error, Incompatible, InvalidArgument, Unsupported
from torpor.vllm.options import Options
from torpor.vllm.server import durable
from torpor.vllm.server.settings import Settings

logger = init_logger("vllm.torpor")  # vLLM sets up only what is below its own name

_RENEWALS_PER_TERM = 3
_LOOKS_PER_TERM = 20
_PATIENCE_TERMS = 2.5  # who owns is known after one and a quarter
# Who served from this directory last; if that went on from a checkpoint, its name and those of the others there then.
_HOLDER_FILE = "remote.holder"


class Remote:
    """For one life.Server, in its event loop."""

    def __init__(self, settings: Settings, options: Options):
        if not options.checkpoint_dir:
            raise InvalidArgument("--torpor-object-store without a directory", "name one with --torpor-checkpoint-dir")
        if not hasattr(_core, "RemoteHome"):
            raise Unsupported(
                "--torpor-object-store: this build of torpor knows no object stores",
                "install libcurl and pugixml with their headers, then build it on this machine: pip install .",
            )
        self._settings = settings
        self._directory = Path(options.checkpoint_dir)
        self._home = _core.RemoteHome(
            settings.object_store, settings.ownership_term_seconds, options.key_file, settings.advertise_address
        )
        self._key_file = options.key_file
        self._answers = str(self._directory / "answers")
        self.unfit: Incompatible | None = None  # why the newest checkpoint in the store was left there
        self._asking = asyncio.Lock()  # one operation of the store's record at a time
        self._keeping: asyncio.Task[None]  # renews, from the moment on when it owns

    async def owner_address(self) -> str:
        """Where clients find the server that owns; empty: it is this one, or nobody knows."""
        try:
            async with self._asking:
                return await asyncio.to_thread(self._home.owner_address)
        except Error as problem:
            logger.warning("torpor: it is not known who owns: %s", problem)
            return ""

    async def arrive(self, fingerprint: dict) -> str:
        """Owns it, goes on owning, and brings what is newest into the directory. Returns the checkpoint's path; empty:
        the directory's own counts. Raises Aborted if the ownership is lost meanwhile."""
        owned_at = await self._take()
        self._keeping = asyncio.create_task(self._keep(owned_at))  # at once: a fetch may take longer than a term
        fetching = asyncio.ensure_future(asyncio.to_thread(self._fetch, fingerprint))
        try:
            await asyncio.wait({fetching, self._keeping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not fetching.done():  # the ownership is lost, or the process ends: that waits for its threads
                self._home.stop_copies()
        if fetching.done():
            return fetching.result()
        fetching.cancel()
        raise Aborted(
            f"this server lost the ownership of what is in {self._settings.object_store} while it fetched that",
            "start it again; its log says why the ownership was not renewed",
        ) from self._keeping.exception()

    async def _take(self) -> float:
        """Returns when it owns, with the time from which the first term counts."""
        term, began, said = self._settings.ownership_term_seconds, time.monotonic(), False
        answered = began
        while True:
            asked = time.monotonic()
            try:
                if await asyncio.to_thread(self._home.take):
                    return asked
                answered = time.monotonic()
            except Busy as problem:  # one call that took too long; a store that is gone is waited for no longer
                if time.monotonic() - answered > term:
                    raise
                logger.warning("torpor: %s did not answer and is asked again: %s", self._settings.object_store, problem)
                await asyncio.sleep(term / _LOOKS_PER_TERM)
                continue
            if not said:
                logger.info("torpor: another server may own what is in %s; waiting", self._settings.object_store)
                said = True
            if time.monotonic() - began > _PATIENCE_TERMS * term:
                raise Busy(
                    f"another server owns what is in {self._settings.object_store}", "end it first, or start again"
                )
            await asyncio.sleep(term / _LOOKS_PER_TERM)

    def _fetch(self, fingerprint: dict) -> str:
        """Beside the checkpoint that it goes on from, the directory may have newer ones of a server that was overtaken:
        its newest one counts again when this server has written one of its own."""
        file = self._directory / _HOLDER_FILE
        holder, *gone_on = file.read_text().splitlines() if file.exists() else [""]
        if holder == self._home.before != "":
            there = self._there()
            if not (gone_on and gone_on[0] in there and there <= set(gone_on)):
                gone_on = []
        else:
            path = self._fetch_fitting(fingerprint)
            name = Path(path).name
            gone_on = [name, *sorted(self._there() - {name})] if path else []
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        beside = durable.written_beside(file, "\n".join([self._home.holder, *gone_on]).encode())
        os.replace(beside, file)
        durable.sync_folder(self._directory)
        return str(self._directory / gone_on[0]) if gone_on else ""

    def _fetch_fitting(self, fingerprint: dict) -> str:
        """A checkpoint that does not fit the engine stays there: whether it is needed, the answers say."""
        try:
            return self._home.fetch(str(self._directory), fingerprint)
        except Incompatible as problem:
            if not self._home.fetch_answers(str(self._directory)):
                raise
            self.unfit = problem
            return ""

    def _there(self) -> set[str]:
        """The names of the directory's checkpoints."""
        return {Path(item["path"]).name for item in _core.list_checkpoints(str(self._directory), self._key_file)}

    async def disowned(self) -> None:
        """Returns when it does not own any more: renewing has failed for a term, or another one owns. Precondition: it
        has arrived."""
        await self._keeping

    async def _keep(self, at: float) -> None:
        """Renews the ownership, which counts from `at`, until it is lost."""
        renewing = None
        while True:
            await asyncio.sleep(self._settings.ownership_term_seconds / _LOOKS_PER_TERM)
            if renewing is not None and renewing.done():
                problem, renewing = renewing.exception(), None
                if problem is not None and not isinstance(problem, Aborted):
                    logger.error("torpor: its ownership could not be renewed, it is tried again: %s", problem)
            if not self._home.owns():
                return
            if renewing is None and time.monotonic() - at >= self._settings.ownership_term_seconds / _RENEWALS_PER_TERM:
                at = time.monotonic()
                renewing = asyncio.create_task(self._renew())

    async def _renew(self) -> None:
        async with self._asking:
            await asyncio.to_thread(self._home.renew)

    async def push(self, checkpoint: str) -> str:
        """Makes it, and the answers so far, what the next owner goes on from. Its name there; empty: it failed."""
        try:
            sent = await asyncio.to_thread(self._home.send, checkpoint, self._answers)
            async with self._asking:
                await asyncio.to_thread(self._home.publish, sent)
        except Error as problem:
            logger.error("torpor: %s was not pushed: %s", checkpoint, problem)
            return ""
        logger.info("torpor: pushed as %s, %.1f MB of %.1f MB moved", sent.name, sent.moved_bytes / 1e6,
                    sent.bytes / 1e6)  # fmt: skip
        return sent.name

    def stop_copies(self) -> None:
        """End what a thread sends or fetches: the process waits for its threads, and a store may answer nothing."""
        self._home.stop_copies()

    async def release(self) -> None:
        try:
            async with self._asking:
                await asyncio.to_thread(self._home.release)
        except Error as problem:
            logger.error("torpor: the next server has to wait for the end of a term: %s", problem)
