"""A process of the tests on the rig where the platform is CUDA to torpor: an engine with torpor's memory of a GPU.

Prints what is in force, and what differed over sleeps: to host, to disk and back from the checkpoint, woken tag by tag,
without weights.
"""

import json
import sys
from pathlib import Path

from conftest import InProcess  # finds the rig

SLEEPS = (("host", 4), ("disk", 15))  # to, after so many steps
BY_TAGS_AT = 8
RELOADED_AT = 12
NAMES = ("greedy", "seeded", "penalties", "unseeded", "bias", "long")


def in_force(one: InProcess) -> dict:
    from torpor import memory

    worker, config = one.core.model_executor.driver_worker.worker, one.engine.vllm_config
    return {
        "memory": type(worker.torpor_memory).__name__,
        "scheduler": type(one.core.scheduler).__module__,
        "backend": config.model_config.sleep_mode_backend,
        "sleep_mode": config.model_config.enable_sleep_mode,
        "tags": sorted(memory.ledger()[0]["tags"]),
        "weights_in_regions": lie_in_regions(one.runner),
    }


def lie_in_regions(runner) -> bool:
    """The model's parameters and buffers, each storage once."""
    from torpor import memory

    tensors = [*runner.model.parameters(), *runner.model.buffers()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return 0 < sum(storages.values()) <= memory.ledger()[0]["tags"]["weights"]["region_bytes"]


def paused(one: InProcess, steps: int) -> dict:
    """The oracle: it stood still at the same step, and nothing was moved."""
    answers = one.begin(steps, NAMES)
    one.llm.sleep(level=0)
    answers |= one.stopped()
    one.llm.wake_up()
    return one.finish(answers)


def slept(one: InProcess, to: str, steps: int) -> list[str]:
    twin = paused(one, steps)
    answers = one.begin(steps, NAMES)
    report = one.llm.sleep(level=1, preserve_state=True, to=to)
    answers |= one.stopped()
    one.llm.wake_up()
    found = [] if one.finish(answers) == twin else [f"{to} at {steps}"]
    if to == "disk":
        one.llm.reset_prefix_cache()
        one.llm.wake_up(from_checkpoint=report.checkpoint)
        found += [] if one.finish(answers) == twin else [f"checkpoint at {steps}"]
    return found


def woken_by_tags(one: InProcess, steps: int) -> list[str]:
    """As trainers wake it: the weights, then the KV cache. What else a GPU has (runtime and so on) nobody names."""
    twin = paused(one, steps)
    answers = one.begin(steps, NAMES)
    one.llm.sleep(level=1, preserve_state=True)
    answers |= one.stopped()
    one.llm.wake_up(tags=["weights"])
    found = [] if one.llm.is_sleeping() else [f"awake without a KV cache at {steps}"]
    one.llm.wake_up(tags=["kv_cache"])
    return found if one.finish(answers) == twin else [*found, f"by tags at {steps}"]


def reloaded(one: InProcess, steps: int) -> list[str]:
    """Weights are dropped; what vLLM allocates with them and requests write into is not."""
    twin = paused(one, steps)
    answers = one.begin(steps, NAMES)
    one.llm.sleep(level=2, preserve_state=True, weights="reload")
    answers |= one.stopped()
    one.llm.wake_up()
    one.llm.collective_rpc("reload_weights")
    one.llm.wake_up(kv="keep")
    return [] if one.finish(answers) == twin else [f"reloaded at {steps}"]


def main() -> None:
    one = InProcess(Path(sys.argv[1]), Path(sys.argv[2]), torpor={"gpu_preserve_state": True})
    result = {"in_force": in_force(one), "differing": []}
    for to, steps in SLEEPS:
        result["differing"] += slept(one, to, steps)
    result["differing"] += woken_by_tags(one, BY_TAGS_AT)
    result["differing"] += reloaded(one, RELOADED_AT)
    result["recomputed"] = one.llm.torpor.state().recomputed_tokens
    result["answers"] = len(paused(one, 1))
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
