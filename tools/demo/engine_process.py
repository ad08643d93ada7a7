# SPDX-License-Identifier: Apache-2.0
"""The child of the demo: one vLLM engine in this process, told what to do by JSON lines.

Orders come on the file descriptor of --orders, answers go to that of --answers: one object a line, {"event": …} while
requests run, then {"done": …} or {"error": …}. Standard output and error belong to vLLM's log.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

import kinds


def on_gpu_path() -> bool:
    """vLLM's GPU path on CPU tensors: its kernels are interpreted."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def best_dtype() -> str:
    """bfloat16 where the CPU multiplies it natively; elsewhere float32 is more than twice as fast.

    Triton's interpreter has no bfloat16 of its own.
    """
    if on_gpu_path():
        return "float32"
    flags = set()
    with open("/proc/cpuinfo") as info:
        for line in info:
            if line.startswith("flags"):
                flags = set(line.split())
                break
    return "bfloat16" if flags & {"avx512_bf16", "amx_bf16"} else "float32"


class Engine:
    def __init__(self, model: str, directory: str, with_features: bool, options: dict):
        from vllm import LLM

        self._directory, self._with_features = directory, with_features
        usual = {
            "dtype": best_dtype(),
            "enforce_eager": True,
            "block_size": 32,
            "max_model_len": 2048,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 512,
            "seed": 0,
            "additional_config": {"torpor": {"checkpoint_dir": directory}},
        }
        if with_features:
            usual |= kinds.options(model, directory, on_gpu_path())
        self._llm = LLM(model, **(usual | options))
        self._engine = self._llm.llm_engine
        self._tokens: dict[str, list[int]] = {}
        self._texts: dict[str, str] = {}
        self._finished: set[str] = set()
        self._children: dict[str, list[int]] = {}  # tokens of requests that forked from others

    def add(
        self, prompts: list[str], max_tokens: int, seed: int, unseeded: bool = True, only: list[int] | None = None
    ) -> dict:
        """Puts the requests to the engine, from the same start each time. With features they have prompts of their own.

        Unseeded requests draw from one generator, which is set here. `only`: numbers of those that this engine gets.
        """
        from vllm.utils.torch_utils import set_random_seed

        self._llm.reset_prefix_cache()
        set_random_seed(seed)
        tokenizer = self._llm.get_tokenizer()
        if self._with_features:
            requests = kinds.requests(self._directory, max_tokens, on_gpu_path())
        else:
            requests = chats(prompts, max_tokens, seed, unseeded)
        for number, (_, prompt, params, further) in enumerate(requests):
            if only is not None and number not in only:
                continue
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
            self._engine.add_request(str(number), text, params, **further)
        self._wait_for_grammars()
        self._tokens, self._texts, self._finished, self._children = {}, {}, set(), {}
        return {"kinds": [kind for kind, *_ in requests]}

    def _wait_for_grammars(self) -> None:
        """When one is compiled decides about the batches, and they about the last digits."""
        for request in self._engine.engine_core.engine_core.scheduler.requests.values():
            while request.use_structured_output and not request.structured_output_request.is_grammar_ready:
                time.sleep(0.01)

    def run(self, steps: int | None, send) -> dict:
        """Steps until `steps` were made or nothing is left to do."""
        made = 0
        while self._engine.has_unfinished_requests() and (steps is None or made < steps):
            for output in self._engine.step():
                if output.request_id in self._children:
                    self._children[output.request_id] = list(output.outputs[0].token_ids)
                    continue
                self._tokens[output.request_id] = list(output.outputs[0].token_ids)
                self._texts[output.request_id] = output.outputs[0].text
                if output.finished:
                    self._finished.add(output.request_id)
            made += 1
            counts = {request: len(tokens) for request, tokens in self._tokens.items()}
            send({"event": "texts", "texts": self._texts, "counts": counts})
        return {
            "steps": made, "tokens": self._tokens, "texts": self._texts, "finished": sorted(self._finished),
            "children": self._children,
        }  # fmt: skip

    def ask(self, tokens: list[int], max_tokens: int) -> dict:
        """One greedy request alone: its tokens, when the first came, and how many of the prompt's were not computed."""
        from vllm import SamplingParams

        self._asked = getattr(self, "_asked", 0) + 1
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        began, first = time.monotonic(), None
        self._engine.add_request(f"ask-{self._asked}", {"prompt_token_ids": tokens}, params)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                first = first or time.monotonic() - began
                answer = output.outputs[0]
        return {
            "tokens": list(answer.token_ids),
            "text": answer.text,
            "first_token_seconds": first,
            "cached_tokens": output.num_cached_tokens,
        }

    def settle(self) -> dict:
        """Steps without requests, until nothing is on its way to host memory or disk any more."""
        scheduler = self._engine.engine_core.engine_core.scheduler
        while scheduler.has_requests():
            self._engine.step()
        return {}

    def tokens_of(self, text: str) -> list[int]:
        return self._llm.get_tokenizer().encode(text)

    def path(self) -> dict:
        core = self._engine.engine_core.engine_core
        runner = type(core.model_executor.driver_worker.worker.model_runner)
        v2 = any(kind.__module__ == "vllm.v1.worker.gpu.model_runner" for kind in runner.__mro__)
        return {
            "runner": "V2" if v2 else "V1",
            "scheduler": type(core.scheduler).__name__,
            "async_scheduling": core.async_scheduling,
            "batches_in_flight": len(core.batch_queue or ()),
            "kv_blocks": core.scheduler.kv_cache_config.num_blocks,
        }

    def sleep(self, level: int, to: str) -> dict:
        metadata = {"made_by": "tools/dev demo"} if to == "disk" else None
        return dict(self._llm.sleep(level=level, preserve_state=True, to=to, metadata=metadata))

    def wake(self, from_checkpoint: str | None) -> dict:
        woken = self._llm.wake_up(from_checkpoint=from_checkpoint)
        return dict(woken)

    def hibernate(self, requests: list[str], to: str) -> dict:
        image = self._llm.torpor.hibernate(requests, to=to)
        return {"id": image.id, "path": image.path, "bytes": image.bytes, "tokens": image.tokens}

    def resume(self, image: str) -> dict:
        """By its id, or by the path of one of another engine."""
        return {"requests": list(self._llm.torpor.resume(image).requests)}

    def fork(self, request: str, n: int) -> dict:
        forked = self._llm.torpor.fork(request, n)
        self._children |= {child: [] for child in forked.children}
        return {"children": len(forked.children), "shared_blocks": forked.shared_blocks, "bytes": forked.bytes}

    def count(self) -> dict:
        return {"unfinished": self._engine.get_num_unfinished_requests()}

    def ledger(self) -> list:
        return self._llm.torpor.call("ledger")

    def state(self) -> dict:
        return self._llm.torpor.call("state")


def chats(prompts: list[str], max_tokens: int, seed: int, unseeded: bool) -> list[tuple]:
    """Greedy, seeded and, if asked for, unseeded requests in turn: kind, prompt, SamplingParams, nothing further."""
    from vllm import SamplingParams

    made = []
    for number, prompt in enumerate(prompts):
        kind = ("greedy", "seeded", "unseeded")[number % (3 if unseeded else 2)]
        params = {
            "greedy": {"temperature": 0},
            "seeded": {"temperature": 0.8, "top_p": 0.95, "seed": seed + number},
            "unseeded": {"temperature": 0.8, "top_p": 0.95},
        }[kind]
        made.append((kind, prompt, SamplingParams(max_tokens=max_tokens, **params), {}))
    return made


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--features", action="store_true")
    parser.add_argument("--options", type=json.loads, default={}, help="of the engine, as JSON")
    parser.add_argument("--orders", type=int, required=True)
    parser.add_argument("--answers", type=int, required=True)
    arguments = parser.parse_args()
    orders, answers = os.fdopen(arguments.orders), os.fdopen(arguments.answers, "w", buffering=1)

    def send(message: dict) -> None:
        answers.write(json.dumps(message) + "\n")

    engine = None
    try:
        engine = Engine(arguments.model, arguments.dir, arguments.features, arguments.options)
        send({"done": {}})
        for line in orders:
            order = json.loads(line)
            name = order.pop("do")
            if name == "run":
                order["send"] = send
            send({"done": getattr(engine, name)(**order)})
    except Exception as problem:
        send({"error": f"{type(problem).__name__}: {problem}"})
        raise
    finally:
        sys.stdout.flush()
        os._exit(0)  # vLLM's own shutdown takes seconds, and there is nothing to keep


if __name__ == "__main__":
    main()
