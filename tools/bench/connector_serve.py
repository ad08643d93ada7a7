# SPDX-License-Identifier: Apache-2.0
"""Real engines on the CPU, with torpor's KV connector and without one: what `connector_bench.py --serve` measures.

First tokens of prompts that are computed, come from host memory, and come from disk in a new process after SIGKILL; how
much of them that one finds; and tokens a second of prompts that are all new, in turns by two engines side by side.
With `--packed` two engines in bfloat16, of which one packs its blocks in host memory: how many have room in as many
bytes, and first tokens from there.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "demo"))
from engine_process import best_dtype

BLOCK = 32
VOCABULARY = 40_000
WAIT_SECONDS = 120
_WARM_PROMPTS = 3
_WARM_TOKENS = 2048  # of each, or all


def prompt_of(number: int, tokens: int) -> list[int]:
    made = random.Random(number)
    return [made.randrange(100, VOCABULARY) for _ in range(tokens)]


class Engine:
    """A forked process with an engine, that does one order after the other."""

    def __init__(
        self,
        model: str,
        tokens: int,
        at_once: int,
        directory: Path | None,
        torpor: dict | None = None,
        dtype: str | None = None,
        **more,
    ):
        """With a directory, torpor's connector offloads into it; `torpor`: its options, in place of the usual ones. One
        that is None is not given: without `offload` there is no connector.
        more: arguments of the engine, in place of the bench's own."""
        self._more = more
        self._model, self._tokens, self._at_once, self._directory = model, tokens, at_once, directory
        self._dtype = dtype or best_dtype()
        self._torpor = torpor or {"host_bytes": "1GiB", "disk_bytes": "4GiB"}
        order_out, order_in = os.pipe()
        answer_out, answer_in = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            try:
                os.close(order_in)
                os.close(answer_out)
                os.dup2(2, 1)  # whatever vLLM prints
                self._serve(os.fdopen(order_out), os.fdopen(answer_in, "w"))
            except BaseException:  # the parent must not run on in here
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(order_out)
        os.close(answer_in)
        self._orders, self._answers = os.fdopen(order_in, "w"), os.fdopen(answer_out)
        self._answer()

    def order(self, what: str, **arguments):
        self._orders.write(json.dumps([what, arguments]) + "\n")
        self._orders.flush()
        return self._answer()

    def kill(self) -> None:
        os.kill(self._child, signal.SIGKILL)
        os.waitpid(self._child, 0)
        self._orders.close()
        self._answers.close()

    def _answer(self):
        if not (line := self._answers.readline()):
            raise SystemExit("an engine's process has ended, see above")
        return json.loads(line)

    # --- in the child ---

    def _serve(self, orders, answers) -> None:
        longest = self._tokens + 2 * BLOCK
        trained = json.loads((Path(self._model) / "config.json").read_text())["max_position_embeddings"]
        # Beyond what it was trained for a model makes no sense of what it reads, in the same time.
        longer = {"hf_overrides": {"max_position_embeddings": longest}} if longest > trained else {}
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "4" if longer else "1"}
        os.environ.pop("VLLM_PLUGINS", None)
        if self._directory is None:
            os.environ["VLLM_PLUGINS"] = ""
        from vllm import LLM

        given = {"offload": "eager", "checkpoint_dir": str(self._directory)} | self._torpor
        offload = {name: value for name, value in given.items() if value is not None}
        options = {
            "dtype": self._dtype,
            "block_size": BLOCK,
            "max_model_len": longest,
            "max_num_batched_tokens": 512,
            "max_num_seqs": self._at_once,
            "num_gpu_blocks_override": self._at_once * -(-longest // BLOCK) + 1,  # one is vLLM's own
            "enforce_eager": True,
            "seed": 0,
            "additional_config": {} if self._directory is None else {"torpor": offload},
        }
        self.llm = LLM(self._model, **(options | longer | self._more))
        self.engine, self.asked = self.llm.llm_engine, 0
        for number in range(_WARM_PROMPTS):  # the first long prompts of a process are slower, whoever it is of
            self.first_token(number=10**9 + number, tokens=min(self._tokens, _WARM_TOKENS))
        answers.write("null\n")
        answers.flush()
        for line in orders:
            what, arguments = json.loads(line)
            answers.write(json.dumps(getattr(self, what)(**arguments)) + "\n")
            answers.flush()

    def _ask(self, number: int, tokens: int, of_prompt: int | None = None) -> str:
        return self._prompt(prompt_of(number, of_prompt or self._tokens), tokens)

    def _prompt(self, prompt: list[int], tokens: int) -> str:
        """Ask for `tokens` greedy tokens behind this prompt. Return the id of the request."""
        from vllm import SamplingParams

        self.asked += 1
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        self.engine.add_request(str(self.asked), {"prompt_token_ids": prompt}, params)
        return str(self.asked)

    def first_token(self, number: int, tokens: int | None = None) -> dict:
        """Of this prompt alone, when the device has nothing of it. `tokens`: of so many of its tokens."""
        self.forget()
        began, cpu = time.perf_counter(), time.process_time()
        self._ask(number, 1, tokens)
        cached = 0
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                cached = output.num_cached_tokens or 0
        took = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu, "found": cached}
        self.settle()
        return took

    def batch(self, first: int, answer: int) -> dict:
        """Prompts that nobody had, all at once, to their last token: what is stored meanwhile counts."""
        began, cpu = time.perf_counter(), time.process_time()
        for number in range(self._at_once):
            self._ask(first + number, answer)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        tokens = self._at_once * (self._tokens + answer)
        took = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu, "tokens": tokens}
        self.settle()
        return took

    def room(self) -> dict:
        """Blocks that have room in host memory, how many are there, and how many were not kept."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        stats = self.engine.engine_core.engine_core.scheduler.connector.scheduler.stats()
        slots = get_kv_transfer_group().worker.core.sizes()["host_slots"]
        return {"slots": slots, "blocks": stats["host_blocks"], "not_kept": stats.get("offload_failed", 0)}

    def forget(self) -> None:
        assert self.llm.reset_prefix_cache()

    def settle(self) -> None:
        """What is to be stored is stored."""
        connector = self.engine.engine_core.engine_core.scheduler.connector
        end = time.monotonic() + WAIT_SECONDS
        while connector is not None and connector.has_pending_push_work() and time.monotonic() < end:
            self.engine.step()
            time.sleep(0.001)


def measure(model: str, tokens: int, at_once: int, answer: int, rounds: int) -> dict:
    began = time.monotonic()

    def progress(what: str) -> None:
        print(f"{time.monotonic() - began:4.0f} s  {what}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        torpor, alone = Engine(model, tokens, at_once, directory), Engine(model, tokens, at_once, None)
        try:
            first = {"computed": [], "host": [], "disk": [], "alone": []}
            for number in range(rounds):  # in turns
                first["alone"].append(alone.order("first_token", number=number))
                first["computed"].append(torpor.order("first_token", number=number))
                first["host"].append(torpor.order("first_token", number=number))
                progress(f"first tokens, {number + 1} of {rounds}")
            batches = {"alone": [], "torpor": []}
            for number in range(rounds):
                for name, engine in (("alone", alone), ("torpor", torpor)):
                    batches[name].append(engine.order("batch", first=1000 * (number + 1), answer=answer))
                progress(f"all at once, {number + 1} of {rounds}")
            torpor.kill()
            torpor = Engine(model, tokens, at_once, directory)
            first["disk"] = [torpor.order("first_token", number=number) for number in range(rounds)]
        finally:
            torpor.kill()
            alone.kill()
            shutil.rmtree(directory, ignore_errors=True)
    return {
        "prompt_tokens": tokens,
        "at_once": at_once,
        "first_token": {name: figures(each) for name, each in first.items()},
        "computed_of_alone": computed_of_alone(first),
        "findable_tokens": (tokens - 1) // BLOCK * BLOCK,
        "tokens_per_second": rates(batches, "seconds"),
        "tokens_per_cpu_second": rates(batches, "cpu_seconds"),
    }


def measure_packed(model: str, tokens: int, rounds: int) -> dict:
    """Two engines in bfloat16, the one with its blocks packed in host memory, in turns."""
    with tempfile.TemporaryDirectory() as folder:
        engines = {
            name: Engine(
                model,
                tokens,
                at_once=1,
                directory=Path(folder) / name,
                torpor={"host_bytes": "1GiB", "host_compression": codec},
                dtype="bfloat16",
            )
            for name, codec in (("plain", "none"), ("packed", "bf16"))
        }
        try:
            first = {f"{how}_{name}": [] for name in engines for how in ("computed", "host")}
            for number in range(rounds):
                for name, engine in engines.items():
                    for how in ("computed", "host"):
                        first[f"{how}_{name}"].append(engine.order("first_token", number=number))
            room = {name: engine.order("room") for name, engine in engines.items()}
        finally:
            for engine in engines.values():
                engine.kill()
    return {
        "prompt_tokens": tokens,
        "room": room,
        "room_ratio": room["packed"]["slots"] / room["plain"]["slots"],
        "findable_tokens": (tokens - 1) // BLOCK * BLOCK,
        "first_token": {name: figures(each) for name, each in first.items()},
    }


def show_packed(result: dict) -> None:
    room = result["room"]
    print(
        f"\nroom in 1 GiB of host memory: {room['plain']['slots']} blocks, packed {room['packed']['slots']} "
        f"({result['room_ratio']:.3f}); of {room['packed']['blocks']} put there {room['packed']['not_kept']} more were "
        f"not kept\nfirst token of {result['prompt_tokens']:,} tokens in bfloat16, medians"
    )
    for name, one in result["first_token"].items():
        print(f"{name.replace('_', ', '):<26}{one['seconds'] * 1e3:>9,.0f} ms{one['cpu_seconds'] * 1e3:>9,.0f} ms of "
              f"CPU{100 * one['found'] / result['findable_tokens']:>8.1f} % found")  # fmt: skip


def figures(runs: list[dict]) -> dict:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def computed_of_alone(first: dict[str, list[dict]]) -> float:
    """What a prompt of which nothing is found takes of the time that vLLM alone takes for it: median of pairs."""
    pairs = zip(first["computed"], first["alone"], strict=True)
    return statistics.median(torpor["seconds"] / alone["seconds"] for torpor, alone in pairs)


def rates(batches: dict[str, list[dict]], by: str) -> dict:
    """Medians, and the median of what each pair says."""
    each = {name: [run["tokens"] / run[by] for run in runs] for name, runs in batches.items()}
    of_pairs = statistics.median(torpor / alone for torpor, alone in zip(each["torpor"], each["alone"], strict=True))
    return {name: statistics.median(runs) for name, runs in each.items()} | {"of_pairs": of_pairs}


def show(result: dict) -> None:
    print(f"\nfirst token of {result['prompt_tokens']:,} tokens, vLLM on the CPU, medians")
    names = {
        "alone": "vLLM alone",
        "computed": "computed",
        "host": "from host memory",
        "disk": "from disk, after SIGKILL",
    }
    for name, text in names.items():
        one = result["first_token"][name]
        found = one["found"] / result["findable_tokens"]
        print(
            f"{text:<26}{one['seconds'] * 1e3:>9,.0f} ms{one['cpu_seconds'] * 1e3:>9,.0f} ms of CPU"
            f"{100 * found:>8.1f} % found"
        )
    print(f"computed with torpor: {result['computed_of_alone']:.3f} of vLLM alone, median of pairs")
    print(f"tokens with nothing ever found, {result['at_once']} requests at once, prompts and answers")
    for name, text in (("tokens_per_second", "a second"), ("tokens_per_cpu_second", "a CPU second")):
        one = result[name]
        loss = 100 * (1 - one["of_pairs"])
        print(f"{text:<26}{one['torpor']:>9,.0f}, vLLM alone {one['alone']:,.0f}: {loss:+.1f} % lost, median of pairs")
