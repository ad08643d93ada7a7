# SPDX-License-Identifier: Apache-2.0
"""A process of the tests where the platform is CUDA to torpor: vLLM differs in what keeping requests needs.

torpor then gives vLLM's sleep mode its memory and no more. Prints the tiers, what was said, how much memory each level
frees, and whether the answers after a wake are those of before.
"""

import json
import logging
import sys
from io import StringIO
from pathlib import Path

from conftest import InProcess  # finds the GPU path
from vllm.v1.core.block_pool import BlockPool

from torpor import memory
from torpor.vllm import plugin

NAMES = ("greedy", "long")


def add_an_argument() -> None:
    """To what the adapter calls to keep requests."""
    stock = BlockPool.free_blocks
    BlockPool.free_blocks = lambda self, ordered_blocks, also=None: stock(self, ordered_blocks)


def physical() -> dict[str, bool]:
    """Of each tag, whether any of its memory is on the device."""
    return {tag: held["physical_bytes"] > 0 for tag, held in memory.ledger()[0]["tags"].items()}


def main() -> None:
    add_an_argument()
    log = StringIO()
    logging.getLogger("vllm.torpor").addHandler(logging.StreamHandler(log))
    one = InProcess(Path(sys.argv[1]), Path(sys.argv[2]), enable_sleep_mode=True)
    from torpor.vllm.gpu_allocator import TorporBackend  # as vLLM's worker for GPUs makes it

    worker = one.core.model_executor.driver_worker.worker
    before = one.finish(one.begin(0, NAMES))
    result = {
        "tiers": plugin.tiers(),
        "said": log.getvalue().splitlines(),
        "backend": one.engine.vllm_config.model_config.sleep_mode_backend,
        "worker": f"{type(worker).__module__}, {hasattr(worker, 'torpor_memory')}",
        "awake": physical(),
    }
    one.llm.reset_prefix_cache()
    backend = TorporBackend()
    backend.suspend(level=1)
    result["asleep"] = physical()
    backend.resume()
    result["same"] = one.finish(one.begin(0, NAMES)) == before
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
