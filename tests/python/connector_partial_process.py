# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: vLLM's scheduler with torpor's KV connector, attention and a state, and hits that end in the
middle of a block. No model runs.

    connector_partial_process.py MODEL "eager" | "lazy"

A request loads 3.5 blocks, computes on to the end of the fourth, and then all that is queued ends, as before a sleep.
Prints, for each of its blocks, how many tokens it has, and how many the slot of host memory had that is said to have
its bytes; None: no slot.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools/bench"))
import connector_replay as replay
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, MambaSpec
from vllm.v1.request import Request

from torpor.vllm.connector_messages import Report

BLOCK, UNIT = 32, 16  # tokens of a block, and of the shortest hit
COMMON = [100 + i for i in range(7 * UNIT)]


def kv_cache(blocks: int, window: int = 0) -> KVCacheConfig:
    attention = FullAttentionSpec(block_size=BLOCK, num_kv_heads=3, head_size=64, dtype=torch.bfloat16)
    page = attention.page_size_bytes
    state = MambaSpec(
        block_size=BLOCK, shapes=((3, 64),), dtypes=(torch.bfloat16,), page_size_padded=page,
        mamba_type=MambaAttentionBackendEnum.SHORT_CONV, mamba_cache_mode="align",
    )  # fmt: skip
    tensors = [
        KVCacheTensor(size=blocks * page, layers=[name], layer_stride=blocks * page, block_stride=page)
        for name in ("a", "s")
    ]
    groups = [KVCacheGroupSpec(["a"], attention), KVCacheGroupSpec(["s"], state)]
    return KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=tensors, kv_cache_groups=groups, prefix_cache_retention_interval=0,
        kv_cache_layout="LBHNC",
    )  # fmt: skip


def make_config(arguments: EngineArgs):
    """That of the replay, with states and hits of a unit."""
    config = STOCK(arguments)
    config.cache_config.mamba_cache_mode, config.cache_config.block_size = "align", BLOCK
    scheduler = config.scheduler_config.get_scheduler_cls()

    def with_units(**options):
        return scheduler(**(options | {"hash_block_size": UNIT}))

    object.__setattr__(config.scheduler_config, "get_scheduler_cls", lambda: with_units)
    return config


STOCK = EngineArgs.create_engine_config
HASHER = get_request_block_hasher(UNIT, get_hash_fn_by_name("sha256"))


class Copied(replay.TorporReports):
    """Made-up ranks, which note how many tokens a slot of host memory has got."""

    def __init__(self) -> None:
        super().__init__(400)
        self.tokens: dict[int, int] = {}
        self.loaded_blocks = 0
        self.pool = None

    def carry_out(self, orders):
        moves = [] if orders.plan is None else replay.PlannedMoves.of(orders.plan).jobs
        for _, kind, blocks, slots in moves:
            self.loaded_blocks += len(blocks) if kind == replay.PlannedMoves.GET else 0
            if kind == replay.PlannedMoves.PUT:
                for block, slot in zip(blocks, slots, strict=True):
                    self.tokens[slot] = self.pool.blocks[block]._block_hash_num_tokens
        return super().carry_out(orders)


def main(model: str, mode: str) -> dict:
    EngineArgs.create_engine_config = make_config
    replay.BLOCK, replay.kv_cache = BLOCK, kv_cache
    own = {
        "kv_connector": "TorporConnector", "kv_connector_module_path": "torpor.vllm.connector", "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "host_bytes": "1GiB", "sync_load_budget_bytes": 0, "min_uses": 2 if mode == "eager" else 1, "offload": mode,
            "advanced": {"min_batch_size": 1},
        },
    }  # fmt: skip
    ranks = Copied()
    shape = replay.Shape(device_blocks=60, max_num_seqs=8, max_num_batched_tokens=512)
    run = replay.Replay(model, own, ranks, shape)
    scheduler = run.scheduler
    ranks.pool = scheduler.kv_cache_manager.block_pool

    def ask(name: str, tokens: list[int], answer: int) -> Request:
        request = Request(
            request_id=name, prompt_token_ids=tokens, pooling_params=None, block_hasher=HASHER,
            sampling_params=SamplingParams(max_tokens=answer, ignore_eos=True),
        )  # fmt: skip
        scheduler.add_request(request)
        return request

    def finish() -> None:
        while scheduler.has_requests() or ranks.pending:
            run.step()

    for number in range(2):
        ask(f"first-{number}", [*COMMON, 7, 8], 4)
        finish()
        ask(f"other-{number}", [5000 + number] * 40, 40)
        finish()
        scheduler.reset_prefix_cache()
    ranks.loaded_blocks = 0
    request = ask("second", COMMON + [900 + i for i in range(28)], 8)
    while request.num_computed_tokens < 4 * BLOCK:
        run.step()
    side = scheduler.connector.scheduler
    while side.has_rest(everything=True):
        orders = side.rest(everything=True)
        out = ranks.carry_out(orders) if orders.plan is not None else None
        side.reported(Report(orders.step, out[1] if out else []))
    result: dict = {"loaded": ranks.loaded_blocks}
    for name, manager in zip(
        ("attention", "state"), scheduler.kv_cache_manager.coordinator.single_type_managers, strict=True
    ):
        blocks = [block for block in manager.req_to_blocks["second"] if not block.is_null]
        slots = side.host_slots([block.block_id for block in blocks], False)
        result[name] = [
            [block._block_hash_num_tokens, ranks.tokens[slot] if slot >= 0 else None]
            for block, slot in zip(blocks, slots, strict=True)
        ]
    return result


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(*sys.argv[1:])), flush=True)
