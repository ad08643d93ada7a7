# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: beside a vLLM that has changed in what only some of torpor needs, an engine sleeps.

Prints which tiers are on, what was said of it, and what became of sleeps to host memory and to disk.
"""

import dataclasses
import io
import json
import logging
import sys
from pathlib import Path

from conftest import InProcess
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.worker import gpu_input_batch

from torpor import errors
from torpor.vllm import compat, plugin


def add_a_field() -> None:
    """To the requests of a worker: a new process would not have it."""
    stock = gpu_input_batch.CachedRequestState
    made = dataclasses.make_dataclass("CachedRequestState", [("brand_new", int, 0)], bases=(stock,))
    made.__module__ = stock.__module__
    gpu_input_batch.CachedRequestState = made


def change_a_signature() -> None:
    """Of what torpor's KV connector overrides."""
    KVConnectorBase_V1.build_connector_meta = lambda self, scheduler_output, also: None


def add_an_argument() -> None:
    """To what only a post-copy wake stands in front of."""
    stock = BlockPool.get_new_blocks
    BlockPool.get_new_blocks = lambda self, num_blocks, also=None: stock(self, num_blocks)


def take_a_function_away() -> None:
    """That torpor's server starts."""
    import importlib

    entry = compat.lookup("vllm.entrypoints.launchers.api_server.entry", "run_server")
    del importlib.import_module(entry.__module__).run_server


def refused(call) -> str:
    try:
        call()
    except errors.Unsupported as problem:
        return str(problem)
    raise AssertionError("it was not refused")


def main() -> None:
    model, directory = Path(sys.argv[1]), Path(sys.argv[2])
    for change in (add_a_field, change_a_signature, add_an_argument, take_a_function_away):
        change()
    log = io.StringIO()
    logging.getLogger("vllm.torpor").addHandler(logging.StreamHandler(log))
    one = InProcess(model, directory)
    expected = one.finish(one.begin())
    answers = one.begin(10)
    asleep = one.llm.sleep(level=1, preserve_state=True).changed
    answers |= one.stopped()
    early = refused(lambda: one.llm.wake_up(early=True))
    one.llm.wake_up()
    result = {"slept": asleep, "identical": one.finish(answers) == expected, "early": early}
    answers = one.begin(10)
    result["to_disk"] = refused(lambda: one.llm.sleep(level=1, preserve_state=True, to="disk"))
    result["served_on"] = one.finish(answers) == expected
    result["from_disk"] = refused(lambda: one.llm.wake_up(from_checkpoint=str(directory / "g-000001")))
    result["parts"] = {part: plugin.fits(part) for part in ("connector", "server")}
    result["tiers"] = one.llm.torpor.state().tiers
    result["said"] = [line for line in log.getvalue().splitlines() if "It is without" in line]
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
