#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""verl's GRPO with rollouts that are half-done at each training step: what becomes of them, and what that costs.

The whole of verl (`python -m verl.trainer.main_ppo`) on the CPU, trainer and rollout colocated, each arm in processes
of its own: FSDP2 for the training steps, weights by verl's own transfer, vLLM for the rollouts. Rollouts have a seed
and a length of their own, the same in each arm. The learning rate is 0, so that each has one right answer: that of vLLM
in one go.

recompute: torpor.verl, kv=recompute: half-done rollouts sleep, and their KV is computed again with the new weights.
keep:      torpor.verl, kv=keep: they sleep with their KV.
resend:    what verl does by itself: half-done rollouts are aborted, and verl's client sends prompt and tokens again.
plain:     trainer_mode=sync: each generation ends with its slowest rollout, and none is half-done.

Seconds: of all steps, and of their generations alone. Tokens computed twice: positions that the scheduler ordered
although it had before. Tokens that differ: of complete rollouts, from the right answer.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import rollouts

from bench_options import count

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[1] / "tests/python"  # the platform of verl without an accelerator
ARMS = ("recompute", "keep", "resend", "plain")
WORDS = "the model reads a question about numbers and answers step by step until it has found what was asked".split()
ENVIRONMENT = {
    "VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda", "RAY_USAGE_STATS_ENABLED": "0", "HYDRA_FULL_ERROR": "1",
    "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu,torpor.verl,verl_arms", "TORCHDYNAMO_DISABLE": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_USE_AOT_COMPILE": "0", "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}  # fmt: skip
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return solution_str.count("a") / (1 + len(solution_str))
"""


def in_float32(model: Path, folder: Path) -> Path:
    """A copy with weights that bfloat16 has too, as verl sends them, which all run in float32."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    configuration = json.loads((folder / "config.json").read_text())
    configuration |= {"dtype": "float32", "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(configuration))
    weights = load_file(folder / "model.safetensors")
    rounded = {name: tensor.to(torch.bfloat16).to(torch.float32) for name, tensor in weights.items()}
    save_file(rounded, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_prompts(path: Path, count: int, words: int) -> None:
    import pandas

    dice = random.Random(3)
    rows = [
        {
            "data_source": "words",
            "prompt": [{"role": "user", "content": " ".join(dice.choices(WORDS, k=words))}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": number},
        }
        for number in range(count)
    ]
    pandas.DataFrame(rows).to_parquet(path)


def configuration(options, arm: str, folder: Path, model: Path) -> list[str]:
    """The words that main_ppo is told."""
    length, micro = options.prompt_tokens + options.tokens, options.group_size
    of_rollout, of_actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    settings = {
        "trainer.v1.trainer_mode": "sync" if arm == "plain" else "colocate_async",
        "trainer.v1.colocate_async.num_warmup_batches": options.extra, "trainer.device": "cpu",
        "trainer.v1.sampler.custom_sampler.path": "pkg://verl_sampling",
        "trainer.v1.sampler.custom_sampler.name": "Sync" if arm == "plain" else "Async",
        "trainer.nnodes": 1, "trainer.n_gpus_per_node": 1, "trainer.logger": "[file]",
        "trainer.val_before_train": False, "trainer.test_freq": -1, "trainer.save_freq": -1,
        "trainer.resume_mode": "disable", "trainer.total_epochs": 1000, "trainer.total_training_steps": options.steps,
        "ray_kwargs.ray_init.num_cpus": 16, "+ray_kwargs.ray_init.num_gpus": 1,
        "+ray_kwargs.ray_init.include_dashboard": False, "+ray_kwargs.ray_init.object_store_memory": 200 << 20,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "data.train_files": folder / "prompts.parquet", "data.val_files": folder / "prompts.parquet",
        "data.train_batch_size": 1, "data.max_prompt_length": options.prompt_tokens, "data.shuffle": False,
        "data.max_response_length": options.tokens, "data.dataloader_num_workers": 0,
        "algorithm.adv_estimator": "grpo", "reward.num_workers": 1,
        "reward.custom_reward_function.path": folder / "reward.py",
        "actor_rollout_ref.model.path": model, "actor_rollout_ref.model.use_remove_padding": False,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "+actor_rollout_ref.model.override_config.attn_implementation": "eager",
        f"{of_actor}.strategy": "fsdp2", f"{of_actor}.fsdp_config.strategy": "fsdp2",
        f"{of_actor}.fsdp_config.dtype": "float32", f"{of_actor}.fsdp_config.use_torch_compile": False,
        f"+{of_actor}.fsdp_config.mixed_precision.param_dtype": "fp32", f"{of_actor}.use_torch_compile": False,
        f"{of_actor}.optim.lr": options.learning_rate, f"{of_actor}.ppo_mini_batch_size": 1,
        f"{of_actor}.ppo_micro_batch_size_per_gpu": micro,
        f"{of_rollout}.log_prob_micro_batch_size_per_gpu": micro, f"{of_rollout}.name": "torpor",
        f"{of_rollout}.n": options.group_size, f"{of_rollout}.agent.num_workers": 1,
        f"{of_rollout}.tensor_model_parallel_size": 1, f"{of_rollout}.dtype": "float32",
        f"{of_rollout}.enforce_eager": True, f"{of_rollout}.load_format": "auto", f"{of_rollout}.ignore_eos": True,
        f"{of_rollout}.max_model_len": length, f"{of_rollout}.max_num_seqs": 64,
        # vLLM ends with an error where a CPU samples with a seed and a prompt is computed in pieces.
        f"{of_rollout}.max_num_batched_tokens": max(4096, length), f"{of_rollout}.enable_chunked_prefill": False,
        f"{of_rollout}.checkpoint_engine.update_weights_bucket_megabytes": 128,
        f"+{of_rollout}.engine_kwargs.vllm.scheduler_cls": "verl_scheduler.CountingScheduler",
        f"+{of_rollout}.custom.torpor.kv": "keep" if arm == "keep" else "recompute",
    }  # fmt: skip
    return [f"{name}={value}" for name, value in settings.items()]


def train(options, arm: str, folder: Path, model: Path) -> dict:
    folder.mkdir()
    write_prompts(folder / "prompts.parquet", 64, options.prompt_words)
    (folder / "reward.py").write_text(REWARD)
    environment = os.environ | ENVIRONMENT | {
        "TORPOR_BENCH_FOLDER": str(folder), "TORPOR_BENCH_TOKENS": str(options.tokens), "TORPOR_BENCH_ARM": arm,
        "VERL_FILE_LOGGER_PATH": str(folder / "steps.jsonl"),
        "PYTHONPATH": os.pathsep.join([str(HERE), str(TESTS), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *configuration(options, arm, folder, model)]
    with (folder / "log").open("w") as log:
        done = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
    if done.returncode != 0:
        raise SystemExit(f"error: {arm}: {(folder / 'log').read_text()[-5000:]}")
    steps = [json.loads(line)["data"] for line in (folder / "steps.jsonl").read_text().splitlines()]
    answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    half_done = folder / "half_done.json"
    return {
        "arm": arm,
        "steps": len(steps),
        "seconds": sum(step["timing_s/step"] for step in steps),
        "generation_seconds": sum(step["timing_s/gen"] for step in steps),
        "gradients": [step["actor/grad_norm"] for step in steps],
        "half_done": json.loads(half_done.read_text()) if half_done.exists() else 0,
        **json.loads((folder / "counts.json").read_text()),
        "answers": answers,
    }


def in_one_go(options, model: Path, answers: list[dict]) -> list[list[int]]:
    """The right answers: of an engine of vLLM with nothing in between."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(model), dtype="float32", enforce_eager=True, max_model_len=options.prompt_tokens + options.tokens,
        max_num_seqs=64, enable_prefix_caching=False, enable_chunked_prefill=False,
    )  # fmt: skip
    params = [
        SamplingParams(temperature=1, seed=each["seed"], max_tokens=each["length"], ignore_eos=True) for each in answers
    ]
    outputs = llm.generate([{"prompt_token_ids": each["prompt"]} for each in answers], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def play(options) -> list[dict]:
    """All arms, in the environment of verl."""
    folder = options.folder
    model = in_float32(options.model, folder / "model")
    rows = [train(options, arm, folder / arm, model) for arm in options.arms]
    for row in rows:
        answers = row.pop("answers")
        row |= {"rollouts": len(answers), "tokens": sum(len(each["tokens"]) for each in answers)}
        row["of_several_steps"] = sum(each["steps"][0] != each["steps"][1] or each["legs"] > 1 for each in answers)
        row["answers"] = answers
    right = in_one_go(options, model, [each for row in rows for each in row["answers"]])
    for row in rows:
        row["differing"] = sum(
            one != other
            for answer in row.pop("answers")
            for one, other in zip(answer["tokens"], right.pop(0), strict=True)
        )
    return rows


def measure(options) -> dict:
    settings = {name: getattr(options, name) for name in (*rollouts.SETTINGS, "prompt_tokens", "learning_rate")}
    with tempfile.TemporaryDirectory(prefix="torpor-verl-") as folder:
        places = {"model": options.model, "folder": folder, "arms": ",".join(options.arms)}
        rows = rollouts.run(__file__, "verl", settings | places)
    return {"bench": "verl", "model": options.model.name, **settings, "rows": rows}


def main() -> None:
    parser = rollouts.parser_of(__doc__, ARMS)
    parser.add_argument("--prompt-tokens", type=count, default=512, help="a prompt has no more")
    parser.add_argument("--learning-rate", type=float, default=0, help="else most tokens differ from the first model's")
    options = parser.parse_args()
    if options.folder:
        rollouts.give(play(options))
    result = measure(options)
    print(json.dumps(result)) if options.json else rollouts.show(result, "steps")


if __name__ == "__main__":
    main()
