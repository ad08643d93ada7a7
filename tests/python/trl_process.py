# SPDX-License-Identifier: Apache-2.0
"""Steps of TRL's GRPO with a colocated vLLM: `trl_process.py MODEL awake|asleep|partial|bounded`."""

import json
import os
import shutil
import sys
from pathlib import Path

os.environ |= {"VLLM_USE_AOT_COMPILE": "0", "TORCHDYNAMO_DISABLE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
os.environ["TORPOR_ENABLED"] = "1"  # TRL passes no option of torpor to vLLM

import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from trl import GRPOConfig, GRPOTrainer

from torpor.vllm import plugin
from torpor.vllm.front_end_methods import Blocking

PROMPTS = ["The capital of France is", "Once upon a time", "My favourite food", "Two plus two"]
METRICS = ("loss", "grad_norm", "reward", "entropy", "sampling/sampling_logp_difference/mean")


def reward(completions, **_) -> list[float]:
    return [text.count("a") / (1 + len(text)) for text in completions]


def options(folder: str, **more) -> dict:
    config = {
        "output_dir": folder, "max_steps": 2, "per_device_train_batch_size": 4, "num_generations": 4,
        "max_completion_length": 16, "use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True,
        "vllm_max_model_length": 256, "use_cpu": True, "bf16": False, "learning_rate": 1e-3, "logging_steps": 1,
        "save_strategy": "no", "report_to": [], "disable_tqdm": True, "gradient_checkpointing": False, "seed": 1,
        "model_init_kwargs": {"dtype": "float32"},
    }  # fmt: skip
    data = Dataset.from_dict({"prompt": PROMPTS * 4})
    return {"reward_funcs": reward, "args": GRPOConfig(**(config | more)), "train_dataset": data}


def remember_sleeps() -> list[dict]:
    """What each LLM.sleep() from now on is asked, and frees."""
    assert plugin.activate()
    sleeps, ours = [], Blocking.sleep

    def sleep(self, *args, **kwargs):
        report = ours(self, *args, **kwargs)
        sleeps.append({"asked": kwargs, "freed": report.freed_bytes})
        return report

    Blocking.sleep = sleep
    return sleeps


def unchanged(model: str, asleep: bool) -> dict:
    """TRL as it is."""
    sleeps = remember_sleeps()
    trainer = GRPOTrainer(model, **options("out", vllm_enable_sleep_mode=asleep))
    trainer.train()
    return {"steps": steps_of(trainer), "sleeps": sleeps}


def steps_of(trainer) -> list[dict]:
    return [{name: entry[name] for name in METRICS} for entry in trainer.state.log_history if "loss" in entry]


def milder(model: str) -> str:
    """A copy with small weights, of which bfloat16, in which vLLM then runs, loses little."""
    shutil.copytree(model, "milder")
    path = Path("milder/model.safetensors")
    save_file(
        {name: tensor * (0.1 if tensor.ndim == 2 else 1) for name, tensor in load_file(path).items()},
        path,
        {"format": "pt"},
    )
    return "milder"


def partial(model: str, max_staleness: int | None) -> dict:
    """Half-done rollouts over steps that change the weights much; `errors`: in each version's log probabilities."""
    from torpor.trl import PartialRolloutGRPOTrainer

    errors: list[dict] = []

    class Trainer(PartialRolloutGRPOTrainer):
        def _generate_groups(self, begin):
            taken = super()._generate_groups(begin)
            for output in (output for group in taken for output in group.outputs):
                spans = output.outputs[0].weight_versions
                if len(spans) > 1 and spans[-1].version == str(self.state.global_step):  # else it waited for its group
                    errors.append(self.compare(output, spans[-1].start))
            return taken

        def compare(self, output, start: int) -> dict:
            """vLLM's log probabilities beside those of the trainer's newest weights, before and after `start`."""
            answer = output.outputs[0]
            ids = torch.tensor([[*output.prompt_token_ids, *answer.token_ids]])
            with torch.no_grad():
                logits = self.model(ids).logits[0, len(output.prompt_token_ids) - 1 : -1]
            own = torch.log_softmax(logits.float(), -1)
            wrong = [abs(own[i, t].item() - answer.logprobs[i][t].logprob) for i, t in enumerate(answer.token_ids)]
            return {"older": max(wrong[:start]), "newest": max(wrong[start:])}

    stops = {"stop_token_ids": list(range(100, 160))}  # of 2,048: answers are of many lengths
    more = {
        "max_steps": 4 if max_staleness is None else 8,
        "max_completion_length": 48,
        "learning_rate": 2e-2,
        "generation_kwargs": stops,
    }
    trainer = Trainer(milder(model), extra_groups=2, max_staleness=max_staleness, **options("out", **more))
    trainer.train()
    llm = trainer.vllm_generation.llm
    return {
        "phases": [vars(phase) for phase in trainer.phases],
        "errors": errors,
        "steps": steps_of(trainer),
        "open": trainer.open_rollouts,
        "logged": [entry["rollouts/staleness"] for entry in trainer.state.log_history if "loss" in entry],
        "tags": llm.torpor.state().tags,
    }


def main() -> None:
    model, mode = sys.argv[1:]
    if mode in ("partial", "bounded"):
        result = partial(model, 2 if mode == "bounded" else None)
    else:
        result = unchanged(model, mode == "asleep")
    print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
