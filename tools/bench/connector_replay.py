# SPDX-License-Identifier: Apache-2.0
"""A trace through vLLM's real scheduler with a KV connector, without a model: what `connector_bench.py` measures.

Outputs are made up, and so are the workers' reports: what a step orders is done in the next one. So all contestants see
the same steps, and only the time of the scheduler's thread is measured: schedule(), update_from_output() and, within
them and when requests come, each hook of the connector.
"""

from __future__ import annotations

import gc
import json
import math
import random
import struct
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 16
HASHED_BLOCKS = 8  # blocks of one hash id of the trace: 512 tokens / 4 / BLOCK
LAYERS, KV_HEADS, HEAD = 30, 3, 64
PAGE = 2 * BLOCK * KV_HEADS * HEAD * 2  # bytes of a block in one layer: keys and values in bfloat16
BLOCK_BYTES = LAYERS * PAGE
HOOKS = (  # all that a scheduler calls
    "on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
    "update_connector_output", "request_finished", "request_finished_all_groups", "get_kv_connector_stats",
    "take_events", "has_pending_push_work", "has_pending_block_frees", "get_external_cache_hit_sources",
    "get_loaded_kv_cache_group_ids", "register_finished_partial_tail",
)  # fmt: skip


@dataclass(frozen=True)
class TraceRequest:
    prompt: tuple[int, ...]  # hash ids, each of HASHED_BLOCKS blocks
    prompt_tokens: int
    output_tokens: int

    def tokens(self) -> list[int]:
        span = HASHED_BLOCKS * BLOCK
        made = [(each * 7919 + at * 104729 + 17) % 49000 + 1 for each in self.prompt for at in range(span)]
        return made[: self.prompt_tokens]


def read_trace(path: Path, count: int) -> list[TraceRequest]:
    """Lines of JSON with input_length, output_length and hash_ids, one for 512 tokens; all lengths are divided by 4."""
    requests = []
    with path.open() as lines:
        for line in lines:
            if len(requests) == count:
                break
            value = json.loads(line)
            prompt, answer = value["input_length"] // 4, value["output_length"] // 4
            requests.append(TraceRequest(tuple(value["hash_ids"]), max(1, prompt), max(1, answer)))
    return requests


def make_trace(count: int, seed: int = 1) -> list[TraceRequest]:
    """Conversations like those of published traces: a quarter return to what was said some 240 requests before."""
    rng = random.Random(seed)
    span = HASHED_BLOCKS * BLOCK
    requests: list[TraceRequest] = []
    next_id = 1

    def fresh(number: float) -> tuple[int, ...]:
        nonlocal next_id
        first, next_id = next_id, next_id + max(1, round(number))
        return tuple(range(first, next_id))

    for at in range(count):
        back = round(rng.lognormvariate(math.log(min(240, max(2, count / 6))), 0.6))
        if rng.random() < 0.28 and back <= at:
            prompt = requests[at - back].prompt + fresh(min(72, rng.lognormvariate(math.log(3), 1.3)))
        else:
            prompt = (0, *fresh(min(200, rng.lognormvariate(math.log(14), 1.25))))  # all begin with one system prompt
        tokens = (len(prompt) - 1) * span + rng.randrange(1, span + 1)
        answer = max(1, min(260, round(rng.gauss(88, 50))))
        requests.append(TraceRequest(prompt, tokens, answer))
    return requests


class Reports:
    """What the workers say: what a step orders is done, and told with the outputs of the next one."""

    def __init__(self):
        self._reported = None
        self.loaded = self.stored = 0  # blocks of the last step's orders

    @property
    def pending(self) -> bool:
        return self._reported is not None

    def prepare(self, connector, shape: Shape) -> None:
        """Before the first step, what ranks tell a connector."""

    def step(self, orders):
        """The output of the workers in this step."""
        reported, self._reported = self._reported, self.carry_out(orders)
        return reported


class SimpleReports(Reports):
    """Of SimpleCPUOffloadConnector."""

    def carry_out(self, orders):
        self.loaded, self.stored = len(orders.load_gpu_blocks), len(orders.store_gpu_blocks)
        if not self.loaded and not self.stored:
            return None
        done = set(orders.load_event_to_reqs.get(orders.load_event, ()))
        stored = {orders.store_event: 1} if self.stored else {}
        return KVConnectorOutput(
            finished_recving=done or None,
            kv_connector_worker_meta=SimpleCPUOffloadWorkerMetadata(stored) if stored else None,
        )


class OffloadingReports(Reports):
    """Of OffloadingConnector."""

    def carry_out(self, orders):
        self.loaded = sum(len(job.dst_spec.block_ids) for job in orders.load_jobs.values())
        self.stored = sum(len(job.src_spec.block_ids) for job in orders.store_jobs.values())
        jobs = {job: 1 for job in (*orders.load_jobs, *orders.store_jobs)}
        if not jobs:
            return None
        return KVConnectorOutput(
            finished_recving={job.req_id for job in orders.load_jobs.values()} or None,
            kv_connector_worker_meta=OffloadingWorkerMetadata(completed_jobs=jobs),
        )


@dataclass
class PlannedMoves:
    """A plan of torpor's, from its bytes (kvcache/transfer_plan.cpp)."""

    jobs: list[tuple[int, int, memoryview, memoryview]]  # number, PUT, GET or MOVE, from, to
    loading: set[str]  # requests

    PUT, GET, MOVE = range(3)
    HEAD, DROPPED, JOB, KEY, NAME = (struct.Struct(each) for each in ("<IIQIIIIII", "<Ii", "<Q4BI", "<40s", "<QQ"))

    @classmethod
    def of(cls, plan: bytes) -> PlannedMoves:
        _, _, _, dropped, jobs, blocks, keys, loading, _ = cls.HEAD.unpack_from(plan)
        at = cls.HEAD.size + dropped * cls.DROPPED.size
        entries = [cls.JOB.unpack_from(plan, at + number * cls.JOB.size) for number in range(jobs)]
        at += jobs * cls.JOB.size
        sources, targets = (memoryview(plan)[at + 4 * i * blocks :][: 4 * blocks].cast("i") for i in range(2))
        at += 2 * 4 * blocks + keys * cls.KEY.size
        moves, first = cls([], set()), 0
        for number, kind, _, _, _, count in entries:
            moves.jobs.append((number, kind, sources[first : first + count], targets[first : first + count]))
            first += count
        for _ in range(loading):
            _, length = cls.NAME.unpack_from(plan, at)
            at += cls.NAME.size + length
            moves.loading.add(plan[at - length : at].decode())
        return moves


class TorporReports(Reports):
    """Of torpor's: all blocks are transferred."""

    REPORT, DONE = struct.Struct("<IIiIII"), struct.Struct("<QIHH")
    MAGIC, VERSION = 0x70657254, 1

    def __init__(self, *host_blocks: int):
        """Of each rank."""
        super().__init__()
        self._host_blocks = host_blocks

    def prepare(self, connector, shape: Shape) -> None:
        from torpor.vllm.connector_messages import RankIsReady

        sizes = {
            "disk_segments": 0,
            "segment_slots": 0,
            "device_blocks": shape.device_blocks,
            "block_bytes": BLOCK_BYTES,
        }
        connector.set_xfer_handshake_metadata_pp_aware({
            rank: RankIsReady(sizes | {"host_slots": blocks}) for rank, blocks in enumerate(self._host_blocks)
        })  # fmt: skip

    def step(self, orders):
        from torpor.vllm.connector_messages import Report

        done, reports = super().step(orders) or (None, [])
        return KVConnectorOutput(finished_recving=done or None, kv_connector_worker_meta=Report(orders.step, reports))

    def carry_out(self, orders):
        self.loaded = self.stored = 0
        if orders.plan is None:
            return None
        moves = PlannedMoves.of(orders.plan)
        self.loaded = sum(len(to) for _, kind, _, to in moves.jobs if kind == moves.GET)
        self.stored = sum(len(to) for _, kind, _, to in moves.jobs if kind == moves.PUT)
        return moves.loading, [self.report(rank, moves) for rank in range(len(self._host_blocks))]

    def report(self, rank: int, moves: PlannedMoves) -> bytes:
        done = [self.DONE.pack(number, 0, 0, 0) for number, *_ in moves.jobs]
        return self.REPORT.pack(self.MAGIC, self.VERSION, rank, len(done), 0, 0) + b"".join(done)


@dataclass
class Result:
    steps: int = 0
    seconds: float = 0.0
    hook_seconds: Counter = field(default_factory=Counter)
    hook_calls: Counter = field(default_factory=Counter)
    prompt_tokens: int = 0
    found_tokens: int = 0  # that need not be computed
    host_tokens: int = 0  # of them, by the connector
    loaded_blocks: int = 0
    stored_blocks: int = 0
    preemptions: int = 0
    resident: list[int] = field(default_factory=list)  # bytes, at equal distances

    def report(self) -> dict:
        hooks = sum(self.hook_seconds.values())
        moved = self.loaded_blocks + self.stored_blocks
        return {
            "steps": self.steps,
            "us_per_step": self.seconds / self.steps * 1e6,
            "hooks_us_per_step": hooks / self.steps * 1e6,
            "hooks_ns_per_moved_block": hooks / moved * 1e9 if moved else None,
            "hooks": {
                name: {"us_per_step": seconds / self.steps * 1e6, "calls": self.hook_calls[name]}
                for name, seconds in self.hook_seconds.most_common()
            },
            "prompt_tokens": self.prompt_tokens,
            "found_tokens": self.found_tokens,
            "device_hit": (self.found_tokens - self.host_tokens) / self.prompt_tokens,
            "host_hit": self.host_tokens / self.prompt_tokens,
            "loaded_blocks": self.loaded_blocks,
            "stored_blocks": self.stored_blocks,
            "preemptions": self.preemptions,
            "resident": self.resident,
        }


@dataclass
class Shape:
    device_blocks: int = 16_384
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 8_192
    queued: int = 160  # running and waiting together
    world: int = 1  # ranks that are made up
    window: int = 0  # tokens that half of the layers see; 0: all layers see all


def clock_cost() -> float:
    """Seconds that measuring one call adds to it."""
    began = time.thread_time_ns()
    for _ in range(20_000):
        time.thread_time_ns()
    return (time.thread_time_ns() - began) / 20_000 * 1e-9


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Replay:
    """One scheduler, from its first request to its last."""

    def __init__(self, model: str, connector: dict | None, reports: Reports | None, shape: Shape):
        self.shape, self.result, self._reports = shape, Result(), reports
        config = EngineArgs(
            model=model,
            dtype="bfloat16",
            block_size=BLOCK,
            max_model_len=65_536,
            hf_overrides={"max_position_embeddings": 65_536},
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=shape.max_num_batched_tokens,
            enable_chunked_prefill=True,
            enable_prefix_caching=True,
            async_scheduling=False,
            kv_transfer_config=KVTransferConfig(**connector) if connector else None,
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = shape.device_blocks
        config.parallel_config.world_size = shape.world
        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(BLOCK, hash_function)
        with set_current_vllm_config(config):
            self.scheduler = config.scheduler_config.get_scheduler_cls()(
                vllm_config=config,
                kv_cache_config=kv_cache(shape.device_blocks, shape.window),
                structured_output_manager=StructuredOutputManager(config),
                block_size=BLOCK,
                hash_block_size=BLOCK,
                log_stats=False,
            )
        if self.scheduler.connector is not None:
            reports.prepare(self.scheduler.connector, shape)
            self._measure_hooks(self.scheduler.connector)

    def _measure_hooks(self, connector) -> None:
        cost = clock_cost()
        inside = 0  # one hook that calls another counts once
        for name in HOOKS:
            if not hasattr(connector, name):
                continue
            hook = getattr(connector, name)

            def measured(*arguments, _hook=hook, _name=name, **named):
                nonlocal inside
                if inside:
                    return _hook(*arguments, **named)
                inside = 1
                began = time.thread_time_ns()
                value = _hook(*arguments, **named)
                took = (time.thread_time_ns() - began) * 1e-9 - cost
                inside = 0
                self.result.hook_seconds[_name] += max(0.0, took)
                self.result.hook_calls[_name] += 1
                return value

            setattr(connector, name, measured)
        inner = connector.update_state_after_alloc

        def counted(request, blocks, external):
            self.result.host_tokens += external
            return inner(request, blocks, external)

        connector.update_state_after_alloc = counted

    def request(self, number: int, traced: TraceRequest):
        return Request(
            request_id=f"request-{number}",
            prompt_token_ids=traced.tokens(),
            sampling_params=SamplingParams(max_tokens=traced.output_tokens, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
        )

    def run(self, trace: list[TraceRequest], samples: int = 0) -> Result:
        """With `samples`, requests are made when they come, and the process's memory is looked at so often."""
        result = self.result
        result.prompt_tokens = sum(each.prompt_tokens for each in trace)
        made = None if samples else [self.request(number, each) for number, each in enumerate(trace)]
        if made:
            made.reverse()  # popped from the end, so that nothing keeps a request that is over
            gc.collect()
            gc.freeze()
        arrived, count = 0, len(trace)
        every = max(1, count // samples) if samples else 0
        scheduler = self.scheduler
        while True:
            while arrived < count and sum(scheduler.get_request_counts()) < self.shape.queued:
                request = made.pop() if made is not None else self.request(arrived, trace[arrived])
                arrived += 1
                scheduler.add_request(request)
                if every and arrived % every == 0:
                    result.resident.append(resident_bytes())
            if not scheduler.has_requests() and not (self._reports and self._reports.pending):
                return result
            self.step()

    def step(self) -> None:
        result, scheduler = self.result, self.scheduler
        began = time.thread_time_ns()
        planned = self.planned = scheduler.schedule()
        scheduled = time.thread_time_ns()
        reported = None
        if self._reports is not None:
            reported = self._reports.step(planned.kv_connector_metadata)
            result.loaded_blocks += self._reports.loaded
            result.stored_blocks += self._reports.stored
        result.found_tokens += sum(each.num_computed_tokens for each in planned.scheduled_new_reqs)
        result.preemptions += len(planned.preempted_req_ids or ())
        names = list(planned.num_scheduled_tokens)
        requests = scheduler.requests
        tokens = [
            [number % 40_000 + 1] if (request := requests[name]).num_computed_tokens >= request.num_tokens else []
            for number, name in enumerate(names, result.steps)
        ]
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=tokens,
            kv_connector_output=reported,
        )
        begun_again = time.thread_time_ns()
        scheduler.update_from_output(planned, output)
        result.seconds += (scheduled - began + time.thread_time_ns() - begun_again) * 1e-9
        result.steps += 1


def kv_cache(blocks: int, window: int = 0):
    """Of SmolLM2-135M in bfloat16; nothing is allocated."""
    names = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
    sizes = {"block_size": BLOCK, "num_kv_heads": KV_HEADS, "head_size": HEAD, "dtype": torch.bfloat16}
    spec = FullAttentionSpec(**sizes)
    assert spec.page_size_bytes == PAGE
    groups = [KVCacheGroupSpec(names, spec)]
    if window:
        seeing = SlidingWindowSpec(**sizes, sliding_window=window)
        groups = [KVCacheGroupSpec(names[::2], spec), KVCacheGroupSpec(names[1::2], seeing)]
    tensor = KVCacheTensor(size=blocks * BLOCK_BYTES, layers=names, layer_stride=blocks * PAGE, block_stride=PAGE)
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[tensor], kv_cache_groups=groups, kv_cache_layout="LBHNC")
