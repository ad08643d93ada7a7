# SPDX-License-Identifier: Apache-2.0
"""verl's own server over a real AsyncLLM, called as verl's trainers do it: `verl_process.py MODEL OTHER`.

OTHER has other weights of the same shape.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
os.environ |= {"VERL_USE_EXTERNAL_MODULES": "verl_on_cpu,torpor.verl", "VERL_PLATFORM": "cpu"}
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

import ray
from safetensors.torch import load_file
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import RolloutMode, get_rollout_replica_class
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

from torpor.errors import Error
from torpor.verl.server import kv_of

TOKENS, BEFORE = 60, 12  # of an answer; those that each has at least when it is interrupted
WAITS = 120


class Scene:
    def __init__(self, model: str, other: str):
        self.weights = {
            name: load_file(Path(path) / "model.safetensors") for name, path in (("1", model), ("2", other))
        }
        self.config = RolloutConfig(
            name="torpor", tensor_model_parallel_size=1, dtype="float32", load_format="auto", enforce_eager=True,
            max_model_len=256, prompt_length=64, response_length=192, max_num_seqs=16, max_num_batched_tokens=256,
        )  # fmt: skip
        self.model, self.job = model, ray.get_runtime_context().get_job_id()
        self.numbers, self.running = 0, {}
        self.server = self.make_server()
        self.result = {
            "prefix": self.replica()._get_server_name_prefix(),
            "adapter": get_rollout_class("torpor").__name__,
            "kv": [kv_of({}), kv_of({"kv": "keep"}), refusal(kv_of, {"kv": "abort"}), refusal(kv_of, {"speed": 9})],
            "lora": refusal(self.make_server, lora_rank=8),
        }

    def replica(self, **options):
        options = {"path": self.model, "override_config": {"attn_implementation": "eager"}} | options
        return get_rollout_replica_class("torpor")(0, self.config, HFModelConfig(**options), gpus_per_node=1)

    def make_server(self, **options):
        """What the replica starts as a Ray actor, in this process."""
        replica = self.replica(**options)
        return replica.server_class.__ray_metadata__.modified_class(
            self.config, replica.model_config, RolloutMode.HYBRID, [], replica_rank=0, node_rank=0, gpus_per_node=1,
            nnodes=1, cuda_visible_devices="",
        )  # fmt: skip

    async def tags(self) -> dict:
        return (await self.server.engine.torpor.state()).tags

    def begin(self) -> list[asyncio.Task]:
        """The same four rollouts each time: greedy and seeded."""
        self.running = {}
        tasks = []
        for number in range(4):
            self.numbers += 1
            sampling = {"temperature": 0} if number % 2 == 0 else {"temperature": 0.8, "seed": number}
            sampling |= {"max_tokens": TOKENS, "ignore_eos": True, "logprobs": True}
            name = self.running[number] = f"rollout-{self.numbers}"
            tasks.append(asyncio.create_task(self.server.generate(prompt(number), sampling, name)))
        return tasks

    async def interruptible(self) -> list[asyncio.Task]:
        tasks = self.begin()
        while not all(self.tokens(name) >= BEFORE for name in self.running.values()):
            assert not any(task.done() for task in tasks)
            await asyncio.sleep(0.002)
        return tasks

    def tokens(self, name: str) -> int:
        states = self.server.engine.output_processor.request_states.values()
        found = [state for state in states if state.external_req_id == name]
        return found[0].detokenizer.num_output_tokens() if found else 0

    async def ended(self, tasks: list[asyncio.Task]) -> list[dict]:
        outputs = await asyncio.wait_for(asyncio.gather(*tasks), WAITS)
        return [output.model_dump(exclude={"routed_experts"}) for output in outputs]

    async def update(self, version: str, step: int) -> None:
        """As verl's ServerAdapter.update_weights()."""
        sender = BucketedWeightSender(
            f"ipc:///tmp/rl-colocate-zmq-{self.job}-replica-0-rank-0.sock", bucket_size_mb=8, use_shm=True
        )
        sent = asyncio.to_thread(asyncio.run, sender.async_send_weights(iter(self.weights[version].items())))
        await asyncio.gather(sent, self.server.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": True}))
        await self.server.clear_kv_cache()
        await self.server.set_global_steps(step)

    # --- what trainers do ---------------------------------------------------------------------------------------------

    async def colocated(self, version: str, step: int) -> dict:
        """One step of trainer_colocate_async: the trainer has the memory in the middle."""
        tasks = await self.interruptible()
        answer = await self.server.abort_all_requests()
        await self.server.sleep()
        drawn = [self.tokens(name) for name in self.running.values()]  # all that the engine drew has come
        asleep = await self.tags()
        before = await self.recomputed()
        freed = [ledger["device_physical_bytes"] for ledger in await self.server.engine.torpor.call("ledger")]
        late = asyncio.create_task(self.server.generate([30] * 8, {"max_tokens": 4}, f"late-{step}"))
        await self.server.wake_up(["weights"])
        await self.update(version, step)
        await self.server.wake_up(["kv_cache"])
        waits = not late.done()
        await self.server.resume_generation()
        return {
            "answer": answer, "drawn": drawn, "asleep": asleep, "left": freed, "answers": await self.ended(tasks),
            "late_waits": waits, "late": await self.ended([late]), "recomputed": await self.recomputed() - before,
        }  # fmt: skip

    async def separate(self, version: str, step: int) -> dict:
        """CheckpointEngineManager.update_weights(): only the KV cache goes."""
        tasks = await self.interruptible()
        await self.server.abort_all_requests()
        await self.server.release_kv_cache()
        asleep, before = await self.tags(), await self.recomputed()
        await self.update(version, step)
        await self.server.resume_kv_cache()
        await self.server.resume_generation()
        return {"asleep": asleep, "answers": await self.ended(tasks), "recomputed": await self.recomputed() - before}

    async def unchanged(self) -> dict:
        """Paused and resumed without an update."""
        before = await self.recomputed()
        tasks = await self.interruptible()
        await self.server.abort_all_requests()
        await self.server.resume_generation()
        return {"answers": await self.ended(tasks), "recomputed": await self.recomputed() - before}

    async def leaving(self, twice: bool) -> dict:
        """The replica leaves the load balancer, and comes back."""
        tasks = await self.interruptible()
        if twice:
            await self.server.abort_all_requests()
        answer = await self.server.abort_all_requests(reject_request=True)
        answers = await self.ended(tasks)
        late = await self.ended([asyncio.create_task(self.server.generate([30] * 8, {"max_tokens": 4}, "late"))])
        await self.server.sleep()
        asleep = await self.tags()
        await self.server.wake_up(["weights"])
        await self.update("1", 9)
        await self.server.wake_up(["kv_cache"])
        await self.server.resume_generation()
        after = await self.ended(self.begin())
        return {"answer": answer, "answers": answers, "late": late, "asleep": asleep, "after": after}

    async def failing(self) -> dict:
        """An update that ends in the middle: nobody runs on half of it."""
        tasks = await self.interruptible()
        await self.server.abort_all_requests()
        error = ""
        try:
            await self.server.collective_rpc("update_weights_from_ipc", kwargs={"no_such_argument": True})
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
        try:
            await self.server.resume_generation()
            refused = ""
        except Exception as problem:
            refused = f"{type(problem).__name__}: {problem}"
        await self.update("1", 10)
        await self.server.resume_generation()
        return {"error": error, "refused": refused, "answers": await self.ended(tasks)}

    async def continued(self, step: dict) -> list[dict]:
        """The greedy answers of a step as these weights alone go on with what was drawn before."""
        answers = []
        for number in (0, 2):
            so_far = step["answers"][number]["token_ids"][: step["drawn"][number]]
            sampling = {"temperature": 0, "max_tokens": TOKENS - len(so_far), "ignore_eos": True}
            task = self.server.generate(prompt(number) + so_far, sampling, f"continued-{number}")
            (rest,) = await self.ended([task])
            answers.append(so_far + rest["token_ids"])
        return answers

    async def stock(self) -> str:
        """verl's own pause."""
        try:
            await vLLMHttpServer.abort_all_requests(self.server)
        except TypeError as problem:
            return str(problem)
        finally:
            await self.server.open_submission_gate()
        return ""

    async def by_the_replica(self) -> list[str]:
        """What its servers are asked when verl frees memory."""
        answer: list[str] = []

        class Server:
            def __getattr__(self, method: str):
                async def remote(*_, **__):
                    answer.append(method)

                return SimpleNamespace(remote=remote)

        replica = self.replica()
        replica.servers = [Server()]
        await replica.sleep()
        await replica.release_kv_cache()
        return answer

    async def recomputed(self) -> int:
        return (await self.server.engine.torpor.state()).recomputed_tokens

    async def run(self) -> None:
        await self.server.launch_server()
        await self.server.set_global_steps(1)
        self.result["replica"] = await self.by_the_replica()
        self.result["stock"] = await self.stock()
        self.result["undisturbed"] = await self.ended(self.begin())
        self.result["same"] = await self.colocated("1", 2)
        self.result["unchanged"] = await self.unchanged()
        self.result["separate"] = await self.separate("1", 3)
        self.result["leaving"] = [await self.leaving(twice) for twice in (False, True)]
        self.result["failing"] = await self.failing()
        self.result["other"] = await self.colocated("2", 11)
        self.result["continued"] = await self.continued(self.result["other"])
        self.result["other_undisturbed"] = await self.ended(self.begin())
        self.server._kv = "keep"
        self.result["kept"] = await self.colocated("2", 12)
        self.result["kept_separate"] = await self.separate("1", 13)
        self.result["afterwards"] = await self.ended(self.begin())


def prompt(number: int) -> list[int]:
    return [20 + number * 100 + i for i in range(24)]


def refusal(call, *arguments, **options) -> str:
    try:
        call(*arguments, **options)
    except Error as problem:
        return f"{type(problem).__name__}: {problem}"
    return ""


async def main() -> None:
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)
    scene = Scene(*sys.argv[1:])
    await scene.run()
    print("RESULT " + json.dumps(scene.result), flush=True)
    scene.server.engine.shutdown()
    ray.shutdown()
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main())
