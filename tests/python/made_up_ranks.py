# SPDX-License-Identifier: Apache-2.0
"""Engine cores of data parallel ranks that answer as they are told."""

import asyncio
from collections import Counter


class Core:
    """An engine core that answers as it is told; what it was asked stands in `asked`."""

    def __init__(self, directory, rank: int):
        self.path = directory / f"rank-{rank}-of-2" / "g-000001"
        self.asked: list[tuple] = []
        self.errors: dict[tuple | str, object] = {}  # by method, or (method, keep)
        self.slow = asyncio.Event()
        self.quiet = False  # frozen, or asleep
        self.asleep = False  # for the method "sent"
        self.sent: dict[str, int] = {}
        self.to_disk = False  # the sleep or checkpoint that was asked for last
        self.stands: dict = {"engine": "awake", "level": -1, "sent": {}}
        self.requests, self.others_wait = 2, False  # as it says; as the last wake said
        self.reports: dict[tuple | str, dict] = {}  # what its reports have otherwise, as `errors`

    async def call(self, method: str, options: dict) -> dict:
        what = (method, options["keep"]) if "keep" in options else method
        self.asked.append(what)
        self.others_wait = options.get("others_wait", False)
        await self.slow.wait()
        if method in ("is_quiet", "drain"):
            return {"result": self.quiet}
        if (error := self.errors.get(what)) is not None:
            return {"error": error.to_dict()}
        if method == "freeze":
            return {"result": self.stands}
        if method == "sent":
            return {"result": {} if options.get("of_asleep") and not self.asleep else self.sent}
        if method == "state":
            return {"result": {"engine": "asleep", "checkpoint": str(self.path), "recomputed_tokens": 0}}
        if method == "wake_up":
            self.asleep, self.sent = False, {} if options.get("kv") == "abort" else self.sent
        if method in ("sleep", "checkpoint"):
            self.to_disk = options.get("to") == "disk"
        writes = self.to_disk and method != "wake_up"
        report = {
            "changed": what == ("end_sleep", True), "fully_awake": method == "wake_up", "note": "",
            "preserve_state": True, "to": options.get("to", ""), "checkpoint_parts": {}, "metadata": {},
            "reload": [], "failed_requests": [], "phases": [], "seconds": 1.0, "ledgers": [{}],
            "requests": self.requests, "saved_bytes": 5, "compacted_bytes": 0, "reused_bytes": 0, "host_bytes": 5,
            "disk_bytes": 0, "freed_bytes": 7, "restored_bytes": 0, "deferred_blocks": 0, "deferred_bytes": 0,
            "unread_bytes": 0, "kept_blocks": 1, "dropped_blocks": 0,
            "checkpoint_bytes": 3, "checkpoint": str(self.path) if writes else "",
        }  # fmt: skip
        report["changed"] |= method == "wake_up"
        report |= {"held": True} if method in ("sleep", "checkpoint") else {}
        return {"result": report | self.reports.get(what, {})}


class Client:
    core_engines = (b"\0\0", b"\1\0")

    def __init__(self, directory):
        self.cores = [Core(directory, rank) for rank in range(2)]
        for core in self.cores:
            core.slow.set()
        self.reqs_in_flight: dict[str, bytes] = {}
        self.engine_inflight: Counter[bytes] = Counter()

    async def _call_utility_async(self, name: str, method: str, options: dict, engine: bytes):
        assert name == "torpor_call"
        return await self.cores[self.core_engines.index(engine)].call(method, options)
