# SPDX-License-Identifier: Apache-2.0
"""Half-done rollouts that stay over a training step, for TRL's GRPO with a colocated vLLM in sleep mode.

    from torpor.trl import PartialRolloutGRPOTrainer      # arguments as of trl.GRPOTrainer, and two more

    trainer = PartialRolloutGRPOTrainer(model, reward, config, dataset, extra_groups=2, kv="recompute")

A generation ends as soon as enough groups are complete, not with its slowest rollout; the others sleep with the engine
and go on after the training step. Each step trains on the groups that are complete. A completion may thus be drawn by
several versions of the weights: `phases` says which, and its log probabilities are those of the version that drew each
token, which TRL's importance sampling takes as they are. The plain GRPOTrainer runs on torpor without this.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field

from trl import GRPOTrainer
from trl.generation.vllm_generation import extract_logprobs
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from torpor.errors import InvalidArgument, Unsupported
from torpor.staleness import least_bound, taken_in_time
from torpor.vllm.weight_updates import STALE_KV


@dataclass(eq=False)
class Group:
    """The rollouts of one prompt."""

    inputs: list[dict]  # an example for each
    outputs: list[RequestOutput | None]
    begun: int = 0  # in which generation, from 0

    @property
    def complete(self) -> list[RequestOutput]:
        """Return the outputs of the rollouts that are complete."""
        return [output for output in self.outputs if output is not None]

    @property
    def open(self) -> int:
        """How many are not complete."""
        return sum(output is None for output in self.outputs)


@dataclass
class Phase:
    """What one generation did."""

    step: int  # of the training; the version of the weights
    steps: int = 0  # of the engine
    kept: int = 0  # rollouts that were half-done when it began
    left: int = 0  # and when it ended
    saved_bytes: int = 0  # by the sleep at its end
    freed_bytes: int = 0
    staleness: list[int] = field(default_factory=list)  # of each group that was taken: generations since it was begun
    versions: list[list[tuple[str, int, int]]] = field(default_factory=list)  # of each completion: version, start, end


class PartialRolloutGRPOTrainer(GRPOTrainer):
    """extra_groups: how many groups are begun ahead, and so stay half-done at most; they come from the training set.

    kv: what becomes of the KV of half-done rollouts when the weights have changed, "recompute" or "keep".

    max_staleness: the most generations between that in which a group is begun and the one that trains on it. A
    generation then lasts until no group would come too late. None: groups are taken as they become complete, so that
    long ones may be overtaken without end. Each generation logs rollouts/kept, rollouts/left and rollouts/staleness.
    """

    def __init__(self, *args, extra_groups: int = 1, kv: str = "recompute", max_staleness: int | None = None, **kwargs):
        if kv not in STALE_KV or kv == "abort":
            raise InvalidArgument(f"kv is {kv!r}", 'use "recompute" or "keep"')
        if extra_groups < 1:
            raise InvalidArgument(f"extra_groups is {extra_groups}", "use at least 1, or the plain GRPOTrainer")
        if max_staleness is not None and max_staleness < 1:
            raise InvalidArgument(f"max_staleness is {max_staleness}", "use at least 1, or None for no bound")
        self._extra_groups, self._kv, self._max_staleness = extra_groups, kv, max_staleness
        self._groups: dict[int, Group] = {}  # by the order in which they were begun
        self._complete: list[Group] = []
        self._ready: list[RequestOutput] = []  # of the batch that is being made
        self._begun = 0
        self.phases: list[Phase] = []
        os.environ.setdefault("TORPOR_ENABLED", "1")  # TRL passes none of torpor's options to vLLM: this asks for it
        super().__init__(*args, **kwargs)
        self._refuse_what_is_not_offered()

    def _refuse_what_is_not_offered(self) -> None:
        backend = self.vllm_generation if self.use_vllm else None
        colocated = backend is not None and backend.mode == "colocate" and backend.enable_sleep_mode
        checks = {
            'anything but vllm_mode="colocate" with vllm_enable_sleep_mode=True': not colocated,
            "several processes": self.accelerator.num_processes > 1,
            "evaluation during training": self.args.eval_strategy != "no",
            "tools, environments or a rollout_func": bool(
                self.tools or self.environment_factories is not None or self.rollout_func is not None
            ),
            "structured outputs": backend is not None
            and (backend.structured_outputs_regex or backend.generation_kwargs.get("structured_outputs")) is not None,
        }
        of_trl = [(self, ("_metrics", "_tokenize_prompts"))]
        of_trl += [(backend, ("_llm_weights_sleeping", "sync_weights"))] if backend is not None else []
        checks |= {f"a TRL without {name}": not hasattr(of, name) for of, names in of_trl for name in names}
        if found := [name for name, is_so in checks.items() if is_so]:
            raise Unsupported(f"half-done rollouts with {'; '.join(found)}", "use the plain GRPOTrainer")

    @property
    def open_rollouts(self) -> int:
        """How many are half-done, asleep with the engine."""
        return sum(group.open for group in self._groups.values())

    # --- what TRL calls -----------------------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs):
        """For other inputs than TRL gives: those whose rollouts are complete by now."""
        if not self.model.training:  # by evaluate() or predict(); its prompts would be trained on
            raise Unsupported("half-done rollouts with evaluation", "evaluate with the plain GRPOTrainer")
        size = self.num_generations
        taken = self._generate_groups([inputs[i : i + size] for i in range(0, len(inputs), size)])
        self._ready = [output for group in taken for output in group.complete]
        return super()._generate_and_score_completions([example for group in taken for example in group.inputs])

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        logprobs, _ = extract_logprobs(self._ready)
        completions = [list(output.outputs[0].token_ids) for output in self._ready]
        return completions, [[of_token[0] for of_token in sequence] for sequence in logprobs]

    # --- one generation -----------------------------------------------------------------------------------------------

    def _generate_groups(self, begin: list[list[dict]]) -> list[Group]:
        """Begins these groups, and returns as many that are complete."""
        needed = len(begin)
        self._check_bound(needed)
        backend, phase = self.vllm_generation, Phase(self.state.global_step, kept=self.open_rollouts)
        self._wake()
        if self._begun == 0:
            ahead = random.Random(self.args.seed).choices(range(len(self.train_dataset)), k=self._extra_groups)
            begin = begin + [[self.train_dataset[i]] * self.num_generations for i in ahead]
        for examples in begin:
            self._begin(examples)
        while (taken := self._taken(needed)) is None:
            phase.steps += 1
            for output in backend.llm.llm_engine.step():
                self._take(output)
        report = backend.llm.sleep(level=2, preserve_state=True, weights="reload")
        backend._llm_weights_sleeping = True
        self._complete = [group for group in self._complete if group not in taken]
        phase.staleness = [len(self.phases) - group.begun for group in taken]
        phase.left, phase.saved_bytes, phase.freed_bytes = self.open_rollouts, report.saved_bytes, report.freed_bytes
        phase.versions = [
            [(span.version, span.start, span.end) for span in output.outputs[0].weight_versions or ()]
            for group in taken
            for output in group.complete
        ]
        self.phases.append(phase)
        logged = {"kept": phase.kept, "left": phase.left, "staleness": max(phase.staleness)}
        for name, value in logged.items():
            self._metrics["train"][f"rollouts/{name}"].append(value)  # as TRL's own, of which it logs the means
        return taken

    def _check_bound(self, needed: int) -> None:
        """Refuse a bound that cannot be kept even if the oldest groups are always taken first."""
        least = least_bound(self._extra_groups, needed)
        if self._max_staleness is not None and self._max_staleness < least:
            raise InvalidArgument(
                f"max_staleness is {self._max_staleness} with {self._extra_groups} extra groups, of which a generation "
                f"takes {needed}",
                f"use at least {least}, or fewer extra groups",
            )

    def _taken(self, needed: int) -> list[Group] | None:
        open_groups = self._groups.values()
        return taken_in_time(self._complete, open_groups, needed, len(self.phases), self._max_staleness)

    def _wake(self) -> None:
        """With the weights of the present step."""
        llm = self.vllm_generation.llm
        self.vllm_generation.sync_weights()  # wakes their memory and writes them all
        self._last_loaded_step = self.state.global_step
        with llm.updating_weights(version=str(self.state.global_step)):
            pass
        llm.wake_up(tags=["kv_cache"], kv=self._kv)

    def _begin(self, examples: list[dict]) -> None:
        number, self._begun = self._begun, self._begun + 1
        (ids,), images, fields = self._tokenize_prompts([examples[0]["prompt"]])
        if images or fields:
            raise Unsupported("half-done rollouts of prompts with images", "use the plain GRPOTrainer")
        self._groups[number] = Group(examples, [None] * len(examples), len(self.phases))
        for index in range(len(examples)):
            prompt = {"prompt_token_ids": ids}
            self.vllm_generation.llm.llm_engine.add_request(f"{number}/{index}", prompt, self._sampling())

    def _sampling(self) -> SamplingParams:
        """As TRL's own generation has them, but only whole answers come back."""
        backend = self.vllm_generation
        options = {
            "repetition_penalty": backend.repetition_penalty, "temperature": backend.temperature,
            "top_p": backend.top_p, "top_k": backend.top_k, "min_p": backend.min_p or 0.0,
            "max_tokens": backend.max_completion_length, "logprobs": backend.logprobs,
        }  # fmt: skip
        return SamplingParams(**(options | backend.generation_kwargs), output_kind=RequestOutputKind.FINAL_ONLY)

    def _take(self, output: RequestOutput) -> None:
        number, index = map(int, output.request_id.split("/"))
        group = self._groups[number]
        group.outputs[index] = output
        if not group.open:
            self._complete.append(self._groups.pop(number))
