#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""TRL's GRPO with rollouts that are half-done at each training step: what becomes of them, and what that costs.

A real GRPOTrainer with a colocated vLLM on the CPU, each arm in a process of its own. Rollouts have a seed and a length
of their own, the same in each arm. The learning rate is 0, so that each has one right answer: that of the same engine
in one go, asked afterwards.

recompute: torpor.trl, kv="recompute": half-done rollouts sleep, and their KV is computed again with the new weights.
keep:      torpor.trl, kv="keep": they sleep with their KV.
resend:    the same trainer; half-done rollouts are aborted, and prompt and tokens so far are sent again.
plain:     TRL's own trainer: each generation ends with its slowest rollout, and none is half-done.

Seconds: of trainer.train(), and of its generations alone. Tokens computed twice: positions that the scheduler ordered
although it had before. Tokens that differ: of complete rollouts, from the right answer.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import time
from pathlib import Path

import rollouts

ARMS = ("recompute", "keep", "resend", "plain")
WORDS = "the model reads a question about numbers and answers step by step until it has found what was asked".split()
ENVIRONMENT = {
    "TORPOR_ENABLED": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1", "VLLM_USE_AOT_COMPILE": "0", "TORCHDYNAMO_DISABLE": "1",
}  # fmt: skip


def in_float32(model: Path, folder: Path) -> Path:
    """A copy that vLLM runs in float32, where another batch rounds no token otherwise."""
    shutil.copytree(model, folder, symlinks=True)
    configuration = json.loads((folder / "config.json").read_text())
    configuration |= {"dtype": "float32", "torch_dtype": "float32"}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(configuration))
    return folder


def play(options) -> dict:
    """One arm, in this process."""
    (arm,) = options.arms
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from torpor.trl import PartialRolloutGRPOTrainer

    dice = random.Random(3)
    size, tokens = options.group_size, options.tokens
    prompts = [" ".join(dice.choices(WORDS, k=options.prompt_words)) for _ in range(options.steps + options.extra)]
    lengths = [dice.randint(tokens // 3, tokens) for _ in range(size * (options.steps + options.extra))]
    answers: dict[str, dict] = {}

    def reward(completions, **_) -> list[float]:
        return [text.count("a") / (1 + len(text)) for text in completions]

    class Seeded(PartialRolloutGRPOTrainer):
        """Its rollouts have seeds and lengths of their own; it notes what each has become."""

        def __init__(self, *args, **kwargs):
            self._drawn = 0
            self.generating = 0.0
            super().__init__(*args, **kwargs)

        def _sampling(self):
            params = super()._sampling()
            params.seed, params.max_tokens = self._drawn, lengths[self._drawn]
            self._drawn += 1
            return params

        def _generate_groups(self, begin):
            began = time.perf_counter()
            try:
                return super()._generate_groups(begin)
            finally:
                self.generating += time.perf_counter() - began

        def _take(self, output) -> None:
            answers[output.request_id] = {
                "prompt": list(output.prompt_token_ids), "tokens": list(output.outputs[0].token_ids),
            }  # fmt: skip
            super()._take(output)

    class Resend(Seeded):
        """Aborts what is half-done, and sends prompt and tokens again."""

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self._before: dict[str, tuple] = {}  # prompt, tokens and log probabilities so far
            llm = self.vllm_generation.llm
            self._sleep, self._wake_up = llm.sleep, llm.wake_up
            llm.sleep, llm.wake_up = self._abort_and_sleep, self._wake_and_resend

        def _abort_and_sleep(self, level, preserve_state=None, weights=None, **how):
            if preserve_state is None:
                return self._sleep(level=level, **how)
            states = self.vllm_generation.llm.llm_engine.output_processor.request_states
            for state in states.values():
                name = state.external_req_id
                prompt, had, logprobs = self._before.get(name, (list(state.prompt_token_ids), [], []))
                self._before[name] = (
                    prompt,
                    had + list(state.detokenizer.output_token_ids),
                    logprobs + list(state.logprobs_processor.logprobs or []),
                )
            self._again = [state.external_req_id for state in states.values()]
            return self._sleep(level=level, mode="abort")

        def _wake_and_resend(self, tags=None, kv=None, **how):
            report = self._wake_up(tags=tags, **how)
            if tags == ["kv_cache"]:
                for name in self.__dict__.pop("_again", []):
                    number, index = map(int, name.split("/"))
                    params = PartialRolloutGRPOTrainer._sampling(self)
                    prompt, had, _ = self._before[name]
                    params.seed = number * size + index
                    params.max_tokens = lengths[params.seed] - len(had)
                    self.vllm_generation.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt + had}, params)
            return report

        def _take(self, output) -> None:
            answer = output.outputs[0]
            if answer.finish_reason == "abort":
                return
            if output.request_id in self._before:
                prompt, had, logprobs = self._before[output.request_id]
                output.prompt_token_ids = prompt
                answer.token_ids, answer.logprobs = had + list(answer.token_ids), logprobs + list(answer.logprobs)
            super()._take(output)

    class Plain(GRPOTrainer):
        generating = 0.0

        def _generate_single_turn(self, *args, **kwargs):
            began = time.perf_counter()
            try:
                return super()._generate_single_turn(*args, **kwargs)
            finally:
                self.generating += time.perf_counter() - began

    config = {
        "output_dir": str(options.folder), "max_steps": options.steps, "per_device_train_batch_size": size,
        "num_generations": size, "max_completion_length": tokens, "use_vllm": True, "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": True, "vllm_max_model_length": 1024, "use_cpu": True, "bf16": False,
        "learning_rate": 0.0, "logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
        "gradient_checkpointing": False, "seed": 1, "model_init_kwargs": {"dtype": "float32"},
        "generation_kwargs": {"ignore_eos": True},
    }  # fmt: skip
    kind = {"recompute": Seeded, "keep": Seeded, "resend": Resend, "plain": Plain}[arm]
    more = {} if kind is Plain else {"extra_groups": options.extra, "kv": "keep" if arm == "keep" else "recompute"}
    trainer = kind(
        options.model, reward_funcs=reward, args=GRPOConfig(**config),
        train_dataset=Dataset.from_dict({"prompt": prompts}), **more,
    )  # fmt: skip
    engine = trainer.vllm_generation.llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    reached: dict[str, int] = {}
    counts = {"computed": 0, "twice": 0}
    stock = scheduler.schedule

    def schedule(*args, **kwargs):
        output = stock(*args, **kwargs)
        for request_id, count in output.num_scheduled_tokens.items():
            name, end = request_id.rsplit("-", 1)[0], scheduler.requests[request_id].num_computed_tokens
            counts["computed"] += count
            counts["twice"] += max(0, min(end, reached.get(name, 0)) - (end - count))
            reached[name] = max(end, reached.get(name, 0))
        return output

    scheduler.schedule = schedule
    began = time.perf_counter()
    trainer.train()
    result = {"arm": arm, "seconds": time.perf_counter() - began, "generation_seconds": trainer.generating}
    result |= {"computed": counts["computed"], "computed_twice": counts["twice"]}
    if kind is Plain:
        return result | {"rollouts": options.steps * size, "half_done": 0, "tokens": None, "differing": None}
    half_done = sum(phase.left for phase in trainer.phases)
    right = in_one_go(
        trainer, {name: (answer["prompt"], lengths[seed_of(name, size)]) for name, answer in answers.items()}
    )
    return result | {
        "rollouts": len(answers),
        "half_done": half_done,
        "tokens": sum(len(answer["tokens"]) for answer in answers.values()),
        "differing": sum(
            one != other
            for name, answer in answers.items()
            for one, other in zip(answer["tokens"], right[name], strict=True)
        ),
    }


def seed_of(name: str, size: int) -> int:
    number, index = map(int, name.split("/"))
    return number * size + index


def in_one_go(trainer, asked: dict[str, tuple[list[int], int]]) -> dict[str, list[int]]:
    """The right answers: by the same engine, awake, with nothing in between."""
    from torpor.trl import PartialRolloutGRPOTrainer

    llm = trainer.vllm_generation.llm
    llm.llm_engine.abort_request(
        [state.external_req_id for state in llm.llm_engine.output_processor.request_states.values()]
    )
    PartialRolloutGRPOTrainer._wake(trainer)
    llm.llm_engine.abort_request(
        [state.external_req_id for state in llm.llm_engine.output_processor.request_states.values()]
    )
    llm.reset_prefix_cache()
    size = trainer.num_generations
    for name, (prompt, length) in asked.items():
        params = PartialRolloutGRPOTrainer._sampling(trainer)
        params.seed, params.max_tokens = seed_of(name, size), length
        llm.llm_engine.add_request(f"right {name}", {"prompt_token_ids": prompt}, params)
    found = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.request_id.startswith("right "):
                found[output.request_id.removeprefix("right ")] = list(output.outputs[0].token_ids)
    return found


def measure(options) -> dict:
    settings = {name: getattr(options, name) for name in rollouts.SETTINGS}
    rows = []
    with tempfile.TemporaryDirectory(prefix="torpor-trl-") as folder:
        model = in_float32(options.model, Path(folder) / "model")
        for arm in options.arms:
            places = {"model": model, "folder": f"{folder}/{arm}", "arms": arm}
            rows.append(rollouts.run(__file__, "trl", settings | places, ENVIRONMENT))
    return {"bench": "trl", "model": options.model.name, **settings, "rows": rows}


def main() -> None:
    options = rollouts.parser_of(__doc__, ARMS).parse_args()
    if options.folder:
        options.model = str(options.model)
        rollouts.give(play(options))
    result = measure(options)
    print(json.dumps(result)) if options.json else rollouts.show(result, "train()")


if __name__ == "__main__":
    main()
