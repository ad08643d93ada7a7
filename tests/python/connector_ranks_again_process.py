# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: two ranks on model runner V1, and a seeded request whose load within a step is said to have
failed. Neither rank has seen that itself, as a rank beside one with a damaged block has not.

connector_ranks_again_process.py MODEL FOLDER    prints the tokens without that load, and with it
"""

import json
import sys
from pathlib import Path

from conftest import InProcess
from connector_served import ENGINE, Served
from connector_within_step_process import Steps, ask, forget_device, tokens_of


def fail_next_load(served: Served, steps: list) -> None:
    """Of the first step that has a load within it, say that it left all blocks but the first without valid content."""
    scheduler, side = served.one.core.scheduler, served.side
    stock = scheduler.update_from_output

    def update_from_output(output, of_runner):
        if steps and steps[-1][1]:
            del scheduler.update_from_output
            tables = scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
            side.bad_blocks = {block.block_id for table in tables.values() for block in table[1:]}
            side.bad_since = side.steps
            of_runner.kv_connector_output.invalid_block_ids = set(side.bad_blocks)
        return stock(output, of_runner)

    scheduler.update_from_output = update_from_output


def main() -> None:
    model, folder = map(Path, sys.argv[1:])
    two_ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    served = Served(
        InProcess(
            model, folder / "checkpoints", torpor={"offload": "eager", "host_bytes": "64MiB"}, **two_ranks, **ENGINE
        )
    )
    found = {}
    for name in ("computed", "loaded"):
        forget_device(served)
        with Steps(served) as steps:
            if name == "loaded":
                fail_next_load(served, steps)
            ask(served, name, tokens_of(1, 4), tokens=12, number=5)  # seeded
            found[name], _ = served.answers()[name]
    within = sum(len(names) for _, names, _ in steps)
    print("RESULT " + json.dumps(found | {"within": within}), flush=True)
    served.one.core.shutdown()


if __name__ == "__main__":
    main()
