# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler with torpor's KV connector, without a model, and workers that are made up: what they say, and when,
is the scenario's of `connector_failures_process.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools/bench"))
import connector_replay as replay

PROMPT_BLOCKS = 16
FAILED, DAMAGED = 10, 13  # of BlockOutcome


class Workers(replay.TorporReports):
    """Ranks that do as they are told, in one step or as late as a scenario wants."""

    def __init__(self, *host_blocks: int):
        super().__init__(*(host_blocks or (400,)))
        self.plans: list[replay.PlannedMoves | None] = []  # one a step
        self.silent: set[int] = set()  # ranks
        self.watch = lambda: None  # called between a step's plan and its end
        self.late = False  # nothing is reported, not even that a step is over
        self._kept: list = []

    def step(self, orders):
        self.plans.append(None if orders.plan is None else replay.PlannedMoves.of(orders.plan))
        self.watch()
        said = super().step(orders)
        self._kept.append(said)
        if self.late:
            return None
        kept, self._kept = self._kept, []
        whole = kept[-1]
        whole.kv_connector_worker_meta.transfers = [
            report for each in kept for report in each.kv_connector_worker_meta.transfers
        ]
        whole.finished_recving = set().union(*(each.finished_recving or () for each in kept)) or None
        return whole

    def report(self, rank, moves):
        return super().report(rank, moves) if rank not in self.silent else b""

    def carry_out(self, orders):
        published = super().carry_out(orders)
        if published is None:
            return None
        loading, reports = published
        return (set() if self.silent else loading), [report for report in reports if report]

    def blocks(self, kind: int) -> list[set[int]]:
        """Of the device, a step each."""
        side = 2 if kind == replay.PlannedMoves.PUT else 3
        return [
            set() if plan is None else {block for job in plan.jobs if job[1] == kind for block in job[side]}
            for plan in self.plans
        ]


class Served:
    def __init__(
        self,
        model: str,
        device_blocks: int = 100,
        workers: Workers | None = None,
        world: int = 1,
        window: int = 0,
        **extra,
    ):
        self.workers = workers or Workers()
        own = {"kv_connector": "TorporConnector", "kv_connector_module_path": "torpor.vllm.connector"}
        own |= {
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"host_bytes": "1GiB", "sync_load_budget_bytes": 0} | extra,
        }
        own["kv_connector_extra_config"]["advanced"] = {"min_batch_size": 1}
        shape = replay.Shape(
            device_blocks=device_blocks, max_num_seqs=16, max_num_batched_tokens=512, world=world, window=window
        )
        self.replay = replay.Replay(model, own, self.workers, shape)
        self.scheduler = self.replay.scheduler
        self.side = self.scheduler.connector.scheduler
        self._asked = 0

    def ask(
        self, first: int, output_tokens: int = 4, tokens: int = PROMPT_BLOCKS * replay.BLOCK + 3, priority: int = 0
    ):
        """A request whose prompt is named by `first`."""
        ids = tuple(range(first, first + -(-tokens // (replay.HASHED_BLOCKS * replay.BLOCK))))
        self._asked += 1
        request = self.replay.request(self._asked, replay.TraceRequest(ids, tokens, output_tokens))
        request.priority = priority
        self.scheduler.add_request(request)
        return request

    def step(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.replay.step()
            self.side.core.check()

    def finish(self) -> None:
        for _ in range(2000):
            if not self.scheduler.has_requests() and not self.workers.pending:
                return
            self.step()
        raise AssertionError("it does not come to an end")

    def forget_device(self) -> bool:
        return self.scheduler.reset_prefix_cache()

    @property
    def result(self) -> replay.Result:
        return self.replay.result

    def left(self) -> dict:
        stats = self.side.stats()
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return {name: stats[name] for name in ("held_blocks", "loading_requests", "jobs_under_way")} | {"free": free}


class Damaging(Workers):
    """Of each load of a whole prompt of two groups one block is damaged, and vLLM takes nothing of it."""

    bad = PROMPT_BLOCKS // 2  # of the first group
    failing = frozenset()  # requests

    def report(self, rank, moves):
        loads = [len(to) for _, kind, _, to in moves.jobs if kind == moves.GET]
        if not any(count > PROMPT_BLOCKS for count in loads):
            return super().report(rank, moves)
        self.failing = frozenset(moves.loading)
        outcomes = b"".join(bytes(DAMAGED if at == self.bad else 0 for at in range(count)) for count in loads)
        jobs = b"".join(
            self.DONE.pack(number, *((len(to), 0) if kind == moves.GET else (0, 0)), 0)
            for number, kind, _, to in moves.jobs
        )
        return self.REPORT.pack(self.MAGIC, self.VERSION, rank, len(moves.jobs), len(outcomes), 0) + jobs + outcomes

    def step(self, orders):
        failed, self.failing = self.failing, frozenset()
        said = super().step(orders)
        if failed & (said.finished_recving or set()):
            said.failed_recving = set(failed)
        return said
