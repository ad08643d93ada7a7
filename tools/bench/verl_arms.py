# SPDX-License-Identifier: Apache-2.0
"""Rollout servers of verl_bench.py, which verl's processes import: they note answers, and one aborts and resends.

Each rollout has a seed and a length of its own, by its prompt and by how many of that prompt came before. What becomes
of them is written to the files of TORPOR_BENCH_FOLDER.
"""

from __future__ import annotations

import json
import os
import random
import zlib
from collections import defaultdict

import ray
from verl.workers.rollout.replica import RolloutReplicaRegistry, TokenOutput
from verl_counts import FOLDER, replace

TOKENS = int(os.environ["TORPOR_BENCH_TOKENS"])  # of a rollout, at most; at least a third of it
RESENDS = os.environ["TORPOR_BENCH_ARM"] == "resend"


def server_class() -> type:
    from torpor.verl.server import TorporHttpServer  # it imports vLLM's front end

    class Server(TorporHttpServer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self._before: dict[int, int] = defaultdict(int)  # by prompt: how many rollouts have begun
            self._aborted: dict[tuple, list] = defaultdict(list)  # by prompt and tokens so far: their rollouts
            self._half_done = 0

        async def generate(self, prompt_ids, sampling_params, request_id, *args, **kwargs) -> TokenOutput:
            prompt, aborted = list(prompt_ids), self._aborted[tuple(prompt_ids)]
            rollout = aborted.pop() if aborted else self._begin(prompt)
            had = prompt[len(rollout["prompt"]) :]
            rollout["legs"] += 1
            left = {"seed": rollout["seed"], "max_tokens": rollout["length"] - len(had)}
            name = f"{rollout['seed']}.{rollout['legs']}"
            output = await super().generate(prompt, sampling_params | left, name, *args, **kwargs)
            so_far = had + list(output.token_ids)
            if output.stop_reason == "aborted":
                self._aborted[tuple(rollout["prompt"] + so_far)].append(rollout)
                return output
            steps = [output.extra_fields[name] for name in ("min_global_steps", "max_global_steps")]
            with (FOLDER / "answers.jsonl").open("a") as file:
                file.write(json.dumps(rollout | {"tokens": so_far, "steps": steps}) + "\n")
            return output

        def _begin(self, prompt: list[int]) -> dict:
            of_prompt = zlib.crc32(json.dumps(prompt).encode()) >> 1
            seed = of_prompt + self._before[of_prompt]
            self._before[of_prompt] += 1
            length = random.Random(seed).randint(TOKENS // 3, TOKENS)
            return {"prompt": prompt, "seed": seed, "length": length, "legs": 0}

        async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict:
            self._half_done += len(self.engine.output_processor.request_states)
            replace(FOLDER / "half_done.json", json.dumps(self._half_done))
            if not RESENDS:
                return await super().abort_all_requests(reset_prefix_cache, reject_request)
            self._submission_paused, self._rejecting = True, reject_request
            self._resume_event.clear()
            aborted = await self._abort(reset_prefix_cache)
            return {"aborted_count": len(aborted), "request_ids": aborted}

    return Server


def replica_class() -> type:
    from torpor.verl.server import TorporReplica

    class Replica(TorporReplica):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.server_class = ray.remote(server_class())

    return Replica


RolloutReplicaRegistry.register("torpor", replica_class)  # in place of torpor.verl's own
