# SPDX-License-Identifier: Apache-2.0
"""A process of the tests on the GPU path where the platform is CUDA to torpor: an engine with torpor's memory of a GPU.

Prints what is in force, and what differed over sleeps: to host, to disk and back from the checkpoint, woken tag by tag,
without weights.
"""

import functools
import json
import sys
from pathlib import Path

from conftest import InProcess  # finds the GPU path

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
    """Return the reference run: it paused at the same step, and nothing was moved."""
    answers = one.begin(steps, NAMES)
    one.llm.sleep(level=0)
    answers |= one.stopped()
    one.llm.wake_up()
    return one.finish(answers)


def slept(one: InProcess, to: str, steps: int) -> list[str]:
    reference = paused(one, steps)
    answers = one.begin(steps, NAMES)
    report = one.llm.sleep(level=1, preserve_state=True, to=to)
    answers |= one.stopped()
    one.llm.wake_up()
    found = [] if one.finish(answers) == reference else [f"{to} at {steps}"]
    if to == "disk":
        one.llm.reset_prefix_cache()
        one.llm.wake_up(from_checkpoint=report.checkpoint)
        found += [] if one.finish(answers) == reference else [f"checkpoint at {steps}"]
    return found


def woken_by_tags(one: InProcess, steps: int) -> list[str]:
    """As trainers wake it: the weights, then the KV cache. What else a GPU has (runtime and so on) nobody names."""
    reference = paused(one, steps)
    answers = one.begin(steps, NAMES)
    one.llm.sleep(level=1, preserve_state=True)
    answers |= one.stopped()
    one.llm.wake_up(tags=["weights"])
    found = [] if one.llm.is_sleeping() else [f"awake without a KV cache at {steps}"]
    one.llm.wake_up(tags=["kv_cache"])
    return found if one.finish(answers) == reference else [*found, f"by tags at {steps}"]


def known_again(one: InProcess, steps: int) -> list[str]:
    """The same weights are loaded each time: nobody has to say what becomes of KV that they computed. vLLM makes new
    scales when it loads, beside those that it had first."""
    reference = paused(one, steps)
    for _ in range(2):
        answers = one.begin(steps, NAMES)
        one.llm.sleep(level=2, preserve_state=True, weights="reload")
        answers |= one.stopped()
        one.llm.wake_up()
        one.llm.collective_rpc("reload_weights")
        one.llm.wake_up()
        if one.finish(answers) != reference:
            return [f"known again at {steps}"]
    return []


def reloaded(one: InProcess, steps: int) -> list[str]:
    """Weights are dropped; what vLLM allocates with them and requests write into is not."""
    reference = paused(one, steps)
    answers = one.begin(steps, NAMES)
    one.llm.sleep(level=2, preserve_state=True, weights="reload")
    answers |= one.stopped()
    one.llm.wake_up()
    one.llm.collective_rpc("reload_weights")
    one.llm.wake_up(kv="keep")
    return [] if one.finish(answers) == reference else [f"reloaded at {steps}"]


def kept_parameters(one: InProcess, steps: int) -> list[str]:
    """vLLM's sleep_preserve_parameter_names: what it names is there after a sleep without weights. So is what has no
    name; buffers that were loaded with new weights stay."""
    reference = paused(one, steps)
    model = one.runner.model
    answers = one.begin(steps, NAMES)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    unnamed = model.torpor_test_unnamed.clone()
    one.llm.sleep(level=2, preserve_state=True, weights="reload")
    answers |= one.stopped()
    one.llm.wake_up()
    found = []
    for name, parameter in model.named_parameters():
        if parameter.eq(before[name]).all() != name.endswith("norm.weight"):
            found.append(f"{name} at {steps}")
    if not model.torpor_test_unnamed.eq(unnamed).all():
        found.append(f"a tensor without a name at {steps}")
    one.llm.collective_rpc("reload_weights")
    model.torpor_test_unnamed.fill_(3)  # as a loader would
    one.llm.wake_up(kv="keep")
    found += [] if model.torpor_test_unnamed.eq(3).all() else [f"what was loaded at {steps}"]
    return found if one.finish(answers) == reference else [*found, f"kept parameters at {steps}"]


def given_back() -> dict:
    """What torpor has of memory that was freed in a pool: the tag is gone; of a workspace the grown one is left."""
    import torch

    from torpor import memory

    with memory.region("transient"):
        torch.zeros(1 << 20, dtype=torch.uint8)
    with memory.region("outlives"):
        tensor = torch.zeros(1 << 20, dtype=torch.uint8)
    later = "outlives" in memory.ledger()[0]["tags"]
    del tensor
    with memory.region("outlives"):
        pass
    tags = memory.ledger()[0]["tags"]
    return {
        "at_the_end": "transient" not in tags,
        "not_before": later,
        "at_the_next": "outlives" not in tags,
        "workspaces": tags["workspace"]["region_bytes"],
    }


def with_a_tensor_beside_parameters(load):
    """As kernels have it: made while the model is loaded, in an object that is no module, and read in each step."""

    @functools.wraps(load)
    def load_model(self, *args, **kwargs):
        import torch

        model = load(self, *args, **kwargs)
        object.__setattr__(model, "torpor_test_unnamed", torch.arange(1000, dtype=torch.float32))
        return model

    return load_model


def end(one: InProcess) -> dict:
    """The engine and all that it has ends. Returns which tags have memory, and what is still there."""
    import gc
    import weakref

    from vllm.distributed import cleanup_dist_env_and_memory

    from torpor import memory

    worker = one.core.model_executor.driver_worker.worker
    parts = {"core": one.core, "worker": worker, "runner": one.runner, "model": one.runner.model}
    parts = {name: weakref.ref(part) for name, part in parts.items()}
    del worker
    one.engine.engine_core.shutdown()
    one.core.model_executor.driver_worker.worker.gpu_path_scratch = None
    one.llm = one.engine = None
    cleanup_dist_env_and_memory()
    gc.collect()
    memory.release_unused()
    return {
        "tags": sorted(memory.ledger()[0]["tags"]),
        "alive": [name for name, part in parts.items() if part() is not None],
    }


def main() -> None:
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    model, folder = Path(sys.argv[1]), Path(sys.argv[2])
    torpor = {"gpu_preserve_state": True}
    BaseModelLoader.load_model = with_a_tensor_beside_parameters(BaseModelLoader.load_model)
    one = InProcess(model, folder / "first", torpor=torpor)
    result = {"in_force": in_force(one), "differing": [], "given_back": given_back()}
    result["differing"] += woken_by_tags(one, BY_TAGS_AT)
    result["differing"] += known_again(one, RELOADED_AT)
    result["differing"] += reloaded(one, RELOADED_AT)
    one.core.model_executor.driver_worker.worker.torpor_memory._preserved_parameters = ["*norm.weight"]
    result["differing"] += kept_parameters(one, RELOADED_AT)
    result["recomputed"] = one.llm.torpor.state().recomputed_tokens
    result["answers"] = len(paused(one, 1))
    result["left_by_the_first"] = end(one)
    # Another engine in its place, of another type.
    other = InProcess(model, folder / "second", torpor=torpor, dtype="bfloat16")
    result["dtype"] = str(next(other.runner.model.parameters()).dtype)
    for to, steps in SLEEPS:
        result["differing"] += [f"the second, {found}" for found in slept(other, to, steps)]
    result["left_by_the_second"] = end(other)
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
