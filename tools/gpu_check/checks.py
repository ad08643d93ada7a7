# SPDX-License-Identifier: Apache-2.0
"""What is checked of one engine. Each check takes a CheckedEngine and returns what it saw, or raises Failed."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import time
from pathlib import Path

from vllm import SamplingParams

from checked_engine import REQUESTS, UNSEEDED, CheckedEngine, differing, pause

STEPS = (2, 14, 22)  # in the long prompt's chunks; around the end of its answer; shortly before all end
NOTES = "to_wake.json"  # in the directory: a checkpoint for a new process, and the answers that it must give


class Failed(Exception):
    """What was seen instead of what is expected."""


def _same(given: dict, expected: dict, what: str) -> None:
    if found := differing(given, expected):
        raise Failed(f"{what}: {found}")


def preserved(to: str = "host"):
    return lambda llm: llm.sleep(level=1, preserve_state=True, to=to)


def repeats(one: CheckedEngine, options) -> str:
    """Check 1."""
    core = one.core
    names = [type(core.scheduler).__name__, core.step_fn.__name__, type(one.runner).__module__]
    if names[:2] != ["AsyncScheduler", "step_with_batch_queue"] or core.batch_queue_size != 2:
        raise Failed(f"not vLLM's default path on a GPU: {', '.join(names)}, batch queue {core.batch_queue_size}")
    _same(one.finish(one.begin(0)), one.uninterrupted(), "the second run")
    return f"{len(REQUESTS)} answers equal, {names[0]} with {names[1]}"


def sleeps(one: CheckedEngine, options, to: str = "host") -> str:
    """Check 2, 3."""
    recomputed = 0
    for steps in STEPS:
        _same(one.slept(one.begin(steps), preserved(to)), one.reference(steps), f"slept after step {steps}")
        recomputed += one.llm.torpor.state().recomputed_tokens
    if recomputed:
        raise Failed(f"tokens equal, but {recomputed} of them were computed again")
    others = [steps for steps in STEPS if one.reference(steps) != one.uninterrupted()]
    compared = f"differs from reference runs paused after {others}" if others else "equal too"
    return f"equal after steps {', '.join(map(str, STEPS))}, none recomputed; uninterrupted run: {compared}"


def drafts(one: CheckedEngine, options, accepted: bool) -> str:
    """Check 14. accepted: some drafts must be right; a head that was made up has none."""
    scheduler = one.core.scheduler
    stock, places = scheduler.schedule, 0  # a place is filled on the device: whether by a draft is not seen here

    def schedule(*args, **kwargs):
        nonlocal places
        planned = stock(*args, **kwargs)
        places += sum(map(len, planned.scheduled_spec_decode_tokens.values()))
        return planned

    scheduler.schedule = schedule
    most, length = 0, dict.fromkeys(one.requests, 0)
    answers = one.begin(0)
    while one.engine.has_unfinished_requests():
        step = one.run(1)
        for name, value in step.items():
            most = max(most, len(value[1][0][0]) - length[name])
            length[name] = len(value[1][0][0])
        answers |= step
    del scheduler.schedule
    if places == 0:
        raise Failed("no step had places for drafts: vLLM does not speculate")
    if accepted and most < 2:
        raise Failed(f"of {places} places for drafts none was accepted: each step gave one token a request")
    _same(one.finish(answers), one.uninterrupted(), "the second run")
    return f"{places} places for drafts, up to {most} tokens a step; {sleeps(one, options)}"


def addresses(one: CheckedEngine, options) -> str:
    """Check 4."""

    def found() -> dict[str, int]:
        tensors = dict(one.runner.model.named_parameters()) | {
            f"KV cache {number}": cache for number, cache in enumerate(one.runner.kv_caches)
        }
        return {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor.numel()}

    from vllm.compilation.counter import compilation_counter

    before, captured = found(), compilation_counter.num_cudagraph_captured
    one.slept(one.begin(9), preserved())
    if moved := [name for name, address in found().items() if before.get(name) != address]:
        raise Failed(f"{len(moved)} of {len(before)} moved, {moved[0]} first")
    if one.llm.llm_engine.vllm_config.model_config.enforce_eager:
        return f"{len(before)} tensors of weights and KV where they were"
    if captured == 0 or compilation_counter.num_cudagraph_captured != captured:
        raise Failed(f"{captured} graphs before, {compilation_counter.num_cudagraph_captured} captured in all after")
    return f"{len(before)} tensors of weights and KV where they were; {captured} graphs, none captured again"


def leaves_checkpoint(one: CheckedEngine, options) -> str:
    """Check 5, the first process."""
    steps = 9
    answers = one.begin(steps)
    report = one.llm.sleep(level=1, preserve_state=True, to="disk")
    given = {name: value for name, value in (answers | one.run(1)).items() if value[0]}
    rest = {name: value for name, value in one.reference(steps).items() if name not in given}
    Path(one.directory, NOTES).write_text(json.dumps({"checkpoint": str(report.checkpoint), "answers": rest}))
    one.llm.wake_up()
    return f"{len(rest)} requests of {len(REQUESTS)} in a checkpoint of {report.saved_bytes} bytes"


def wakes_checkpoint(one: CheckedEngine, options) -> str:
    """Check 5, the second process."""
    notes = json.loads(Path(one.directory, NOTES).read_text())
    one.llm.wake_up(from_checkpoint=notes["checkpoint"])
    answers = json.loads(json.dumps(one.finish({})))
    _same(answers, notes["answers"], "in the new process")
    if recomputed := one.llm.torpor.state().recomputed_tokens:
        raise Failed(f"tokens equal, but {recomputed} of them were computed again")
    return f"{len(answers)} answers equal, none recomputed"


def generators(one: CheckedEngine, options, flashinfer: bool = False) -> str:
    """Check 6."""
    import numpy
    import torch

    if one.runner.sampler.use_flashinfer != flashinfer:
        raise Failed(f"FlashInfer samples: {not flashinfer}")
    late = ("What he had was", UNSEEDED["unseeded-0"][1])  # it draws its seed after the wake

    def run(sleep, disturb: bool) -> dict:
        answers = one.begin(6, UNSEEDED)
        one.engine.add_request("late", *late)

        def disturbed(llm) -> None:
            sleep(llm)
            if disturb:
                torch.manual_seed(99)
                numpy.random.seed(99)

        return one.slept(answers, disturbed)

    reference = run(pause, False)
    _same(run(preserved(), True), reference, "with generators disturbed during the sleep")
    if not differing(run(pause, True), reference):
        raise Failed("answers do not depend on the generators: this run shows nothing")
    return f"{len(reference)} answers equal though generators were disturbed; without torpor they differ"


def rebuilt(one: CheckedEngine, options) -> str:
    """Check 7."""
    sampler, states = one.runner.sampler, one.runner.req_states
    bias, penalties, bad_words = sampler.logits_processors
    lost = [penalties.prompt_bin_mask, penalties.output_bin_counts, bias.logit_bias_token_ids.gpu, bias.logit_bias.gpu]
    lost += [bias.stop_token_ids.gpu, bias.allowed_token_ids.gpu, bad_words.bad_word_token_ids.gpu]
    lost += [sampler.logprob_token_ids_state.token_ids.gpu, states.last_sampled_tokens, states.next_prefill_tokens]

    def wake(llm) -> None:
        llm.wake_up()
        for tensor in lost:  # memory that comes back without content has any
            tensor.fill_(7)
        llm.collective_rpc("reload_weights")
        if not llm.wake_up(kv="keep"):  # they are the same
            raise Failed("the engine is not awake after reload_weights and wake_up()")

    answers = one.begin(9)
    given = one.slept(answers, lambda llm: llm.sleep(preserve_state=True, weights="reload"), wake)
    _same(given, one.reference(9), "after a reload")
    return f"{len(given)} answers equal, {len(lost)} tensors overwritten meanwhile"


def kv_bytes(one: CheckedEngine, options, layout: str | None = None) -> str:
    """Check 8."""
    pool = one.core.scheduler.kv_cache_manager.block_pool
    config = one.runner.kv_cache_config
    if layout is not None and config.kv_cache_layout != layout:
        raise Failed(f"the layout is {config.kv_cache_layout}")

    def hashes() -> dict[int, str]:
        import torch

        held = [b.block_id for b in pool.blocks if not b.is_null and (b.ref_cnt > 0 or b.block_hash is not None)]
        found = {block: hashlib.blake2b(digest_size=16) for block in held}
        for cache in one.runner.kv_caches:
            rows = cache.shape[0] // config.num_blocks  # a kernel's blocks may be smaller than vLLM's
            for block, digest in found.items():
                content = cache[block * rows : (block + 1) * rows].contiguous().view(torch.uint8)
                digest.update(content.cpu().numpy().tobytes())
        return {block: digest.hexdigest() for block, digest in found.items()}

    answers = one.begin(9)
    one.llm.sleep(level=0)
    before = hashes()
    one.llm.sleep(level=1, preserve_state=True)
    answers |= one.run(1)
    one.llm.wake_up()
    after = hashes()
    changed = [block for block in before if after.get(block) != before[block]]
    if changed or before.keys() != after.keys() or not before:
        raise Failed(f"{len(before)} blocks before, {len(after)} after, changed: {changed[:8]}")
    _same(one.finish(answers), one.reference(9), "afterwards")
    contents = len(set(before.values()))
    return f"{len(before)} blocks equal, {contents} different contents, layout {config.kv_cache_layout}"


def after_each_step(one: CheckedEngine, options) -> str:
    """Check 9."""

    def run(sleep, most: int) -> tuple[dict, int]:
        answers, done = one.begin(0), 0
        while one.engine.has_unfinished_requests():
            answers |= one.run(1)
            if one.engine.has_unfinished_requests() and done < most:
                sleep(one.llm)
                one.llm.wake_up()
                done += 1
        return {name: value for name, value in answers.items() if value[0]}, done

    made, (reference, whole) = 0, run(pause, options.sleeps)
    while made < options.sleeps:
        if options.sleeps - made < whole:  # the last run sleeps after fewer steps
            reference, whole = run(pause, options.sleeps - made)
        answers, done = run(preserved(), whole)
        _same(answers, reference, f"in sleeps {made + 1} to {made + done}")
        made += done
    return f"{made} sleeps, up to {whole} in each run: all answers equal"


def host_buffers(one: CheckedEngine, options) -> str:
    """Check 10."""
    from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor

    runner = one.runner
    owners = [runner.req_states, runner.block_tables, runner.sampler, runner.sampler.sampling_states]
    owners += runner.sampler.logits_processors
    buffers = {
        f"{type(owner).__name__}.{name}": value
        for owner in owners
        for name, value in vars(owner).items()
        if isinstance(value, UvaBackedTensor)
    }

    def found(slots: list[int]) -> dict[str, list]:
        """Of each slot in use, as the host has it and as the device sees it."""
        both = {name: (buffer.np, buffer.gpu.cpu().numpy()) for name, buffer in buffers.items()}
        return {name: [of.take(slots, of.ndim - 1).tolist() for of in arrays] for name, arrays in both.items()}

    answers = one.begin(9)
    one.llm.sleep(level=0)
    slots = list(runner.req_states.req_id_to_index.values())
    before = found(slots)
    one.llm.sleep(level=1, preserve_state=True)
    answers |= one.run(1)
    one.llm.wake_up()
    after = found(slots)
    if wrong := [name for name in buffers if after[name] != before[name] or after[name][0] != after[name][1]]:
        raise Failed(f"{len(wrong)} of {len(buffers)}: {wrong[0]} was {before[wrong[0]]}, is {after[wrong[0]]}")
    _same(one.finish(answers), one.reference(9), "afterwards")
    return f"{len(buffers)} buffers equal in {len(slots)} slots, on the host and as the device sees them"


def two_in_flight(one: CheckedEngine, options) -> str:
    """Check 11."""
    core = one.core

    def run(sleep) -> dict:
        answers = one.begin(9)
        stock = core.batch_queue_size
        core.batch_queue_size = 3  # so the next step returns before it takes the older of two batches
        try:
            answers |= one.run(1)
            if len(core.batch_queue) != 2:
                raise Failed(f"{len(core.batch_queue)} steps are in flight")
            sleep(one.llm)
            if core.batch_queue:
                raise Failed(f"{len(core.batch_queue)} steps are in flight during the sleep")
        finally:
            core.batch_queue_size = stock
        answers |= one.run(1)
        one.llm.wake_up()
        return one.finish(answers)

    _same(run(preserved()), run(pause), "with two steps in flight")
    return f"{len(REQUESTS)} answers equal"


def ranks(one: CheckedEngine, options) -> str:
    """Check 12."""
    # Other processes draw seeds for what has none: this one cannot give their generators the same start each time.
    seeded = {name: request for name, request in REQUESTS.items() if name != "unseeded"}
    reference = one.slept(one.begin(9, seeded), pause)
    for to in ("host", "disk"):
        _same(one.slept(one.begin(9, seeded), preserved(to)), reference, f"to the {to}")
        if recomputed := one.llm.torpor.state().recomputed_tokens:
            raise Failed(f"to the {to}: tokens equal, but {recomputed} of them were computed again")
    compared = "equal too" if one.finish(one.begin(0, seeded)) == reference else "differs"
    return f"{len(reference)} answers equal, to the host and to disk; uninterrupted run: {compared}"


def memory_back(one: CheckedEngine, options) -> str:
    """Check 15."""
    answers = one.begin(9)
    awake = _held(one)
    report = one.llm.sleep(level=1, preserve_state=True)
    given_back = awake - _held(one)
    answers |= one.run(1)
    began = time.monotonic()
    woken = one.llm.wake_up()
    seconds = time.monotonic() - began
    _same(one.finish(answers), one.reference(9), "afterwards")
    enough = awake if one.gpu_path else report.freed_bytes
    if report.freed_bytes <= 0 or given_back < 0.9 * enough:
        raise Failed(f"{given_back} bytes came back of {enough}; torpor says {report.freed_bytes}")
    return (
        f"{given_back} bytes given back, {report.saved_bytes} saved; "
        f"sleep {report.seconds:.4f} s, wake {woken.seconds:.4f} s ({seconds:.4f} s as its caller sees it)"
    )


def shaped_as_8b(model: str, folder: Path) -> str:
    """Return a model of the shape of Llama 3 8B with the tokenizer and the vocabulary of `model`, without weights."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text()) | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 16384, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def loaded(one: CheckedEngine, options) -> str:
    """Check 16."""
    count, length, tokens = (6, 100, 24) if options.gpu_path else (options.loaded, 4000, 120)
    draws = random.Random(1)
    requests = {
        f"r{number}": (
            {"prompt_token_ids": [draws.randrange(10, 500) for _ in range(length)]},
            SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.8 * (number % 2), seed=number),
        )
        for number in range(count)
    }
    budget = one.engine.vllm_config.scheduler_config.max_num_batched_tokens
    steps = count * length // budget + tokens // 2  # in the middle of every answer, if all run at once
    expected = one.slept(one.begin(steps, requests), pause)
    sleeps = []
    for number in (1, 2):
        answers = one.begin(steps, requests)
        report = one.llm.sleep(level=1, preserve_state=True)
        answers |= one.run(1)
        woken = one.llm.wake_up()
        _same(one.finish(answers), expected, f"after sleep {number}")
        if recomputed := one.llm.torpor.state().recomputed_tokens:
            raise Failed(f"tokens equal, but {recomputed} of them were computed again")
        sleeps.append(
            f"{report.saved_bytes / 1e9:.3g} GB saved, {report.freed_bytes / 1e9:.3g} GB given back, "
            f"sleep {report.seconds:.3f} s, wake {woken.seconds:.3f} s"
        )
    return f"{len(expected)} answers equal; {'; again: '.join(sleeps)}"


def _held(one: CheckedEngine) -> int:
    """Bytes in use of the device; on the GPU path, resident bytes of the mappings that weights and KV lie in."""
    import torch

    if not one.gpu_path:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free
    wanted = [cache.data_ptr() for cache in one.runner.kv_caches]
    wanted += [weight.data_ptr() for weight in one.runner.model.parameters() if weight.numel()]
    held, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = any(start <= address < end for address in wanted)
        elif inside and first == "Rss:":
            held += int(rest[0]) * 1024
    return held
