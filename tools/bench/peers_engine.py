# SPDX-License-Identifier: Apache-2.0
"""An engine of `peers_bench.py` in a process of its own: what it is asked, and how each contestant is set up."""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from connector_serve import BLOCK, WAIT_SECONDS, Engine, best_dtype, prompt_of

TESTS = Path(__file__).parents[2] / "tests/python"  # has the stand-ins with which vLLM's connectors copy on a CPU
AT_ONCE = 8
# A session of agents: each turn gives some tokens to the conversation, and the answer goes into it, too.
TURNS, GIVEN, ANSWER = 6, 142, 8
SESSION_BLOCKS = -(-TURNS * (GIVEN + ANSWER) // BLOCK)
DEVICE_SESSIONS, HOST_SESSIONS = 6, 12  # that have room
DISK_BYTES = "4GiB"
_IDLE_STEPS = 6  # in which vLLM's connectors hear of all copies that have ended
CONTESTANTS = ("plain", "torpor", "simple", "offloading", "offloading_fs")
DURABLE = ("torpor", "offloading_fs")  # find KV again after a kill


def block_bytes(model: str) -> int:
    """Return the bytes of a KV block in the dtype that this machine computes fastest."""
    config = json.loads((Path(model) / "config.json").read_text())
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    value_bytes = 4 if best_dtype() == "float32" else 2
    return BLOCK * config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head * value_bytes


def transfers(contestant: str, host_bytes: int, folder: Path) -> dict:
    """Return vLLM's kv_transfer_config for one of its connectors."""
    extra: dict = {"cpu_bytes_to_use": host_bytes}
    name = "SimpleCPUOffloadConnector"
    if contestant != "simple":
        name, extra = "OffloadingConnector", extra | {"offload_prompt_only": False}
    if contestant == "offloading_fs":
        tiers = [{"type": "fs", "root_dir": str(folder / "fs")}]
        extra |= {"spec_name": "TieringOffloadingSpec", "secondary_tiers": tiers}
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


class Peer(Engine):
    """One contestant, alone in its process, with one computing thread."""

    def __init__(self, contestant: str, model: str, longest: int, folder: Path):
        self._contestant, self._folder = contestant, folder
        host_bytes = HOST_SESSIONS * SESSION_BLOCKS * block_bytes(model)
        more: dict = {"max_num_batched_tokens": 1024}
        more["num_gpu_blocks_override"] = max(DEVICE_SESSIONS * SESSION_BLOCKS, -(-longest // BLOCK)) + 1
        if contestant not in ("plain", "torpor"):
            more["kv_transfer_config"] = transfers(contestant, host_bytes, folder)
        super().__init__(
            model,
            longest,
            AT_ONCE,
            folder if contestant == "torpor" else None,
            {"host_bytes": host_bytes, "disk_bytes": DISK_BYTES},
            **more,
        )

    # --- in the child ---

    def _serve(self, orders, answers) -> None:
        os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONHASHSEED": "0"}
        if self._contestant not in ("plain", "torpor"):
            sys.path.insert(0, str(TESTS))
            import offloading_on_cpu

            offloading_on_cpu.install_simple() if self._contestant == "simple" else offloading_on_cpu.install()
            # The configuration of a fork is a value of this process: vLLM's own type is made here.
            from vllm.config import KVTransferConfig

            self._more["kv_transfer_config"] = KVTransferConfig(**self._more["kv_transfer_config"])
        super()._serve(orders, answers)

    def forget(self) -> None:
        """The device has no cached prefix. vLLM's connectors hold blocks of ended requests for some steps."""
        end = time.monotonic() + WAIT_SECONDS
        while not self.llm.reset_prefix_cache():
            if time.monotonic() > end:
                raise RuntimeError("the device's prefix cache cannot be reset")
            self._idle_step()

    def settle(self) -> None:
        super().settle()
        for _ in range(0 if self._contestant in ("plain", "torpor") else _IDLE_STEPS):
            self._idle_step()

    def _idle_step(self) -> None:
        self._prompt([7, 8, 9], 2)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        time.sleep(0.02)

    def returning(self, number: int, tokens: int, more: int, evicted: bool) -> dict:
        """Time the first token of a conversation of `tokens` tokens with `more` new ones.

        evicted: the device has lost its KV; else it has it: the floor.
        """
        if evicted:
            self.forget()
        prompt = prompt_of(number, tokens) + prompt_of(number + 10**6, more)
        began, cpu = time.perf_counter(), time.process_time()
        self._prompt(prompt, 1)
        found = 0
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                found = output.num_cached_tokens or 0
        took = {"ms": 1e3 * (time.perf_counter() - began), "cpu_ms": 1e3 * (time.process_time() - cpu), "found": found}
        self.settle()
        return took

    def streams(self, first: int, tokens: int, answer: int) -> dict:
        """Take as many new prompts as run at once to the last token of each."""
        began, cpu = time.perf_counter(), time.process_time()
        for number in range(AT_ONCE):
            self._prompt(prompt_of(first + number, tokens), answer)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
        self.settle()
        made = AT_ONCE * (tokens + answer)
        return {"tokens_per_second": made / seconds, "tokens_per_cpu_second": made / cpu_seconds}

    def agents(self, seed: int, sessions: int, at_once: int) -> dict:
        """Take the turns of many sessions in a shuffled order; of a session the next one begins when one has ended."""
        order = [session for session in range(sessions) for _ in range(TURNS)]
        random.Random(seed).shuffle(order)
        history: list[list[int]] = [[] for _ in range(sessions)]
        running: dict[str, tuple[int, float]] = {}
        first_tokens: dict[str, float] = {}
        prompts = found = 0
        began, cpu = time.perf_counter(), time.process_time()
        while order or running:
            busy = {session for session, _ in running.values()}
            while len(running) < at_once and (free := [at for at, each in enumerate(order) if each not in busy]):
                session = order.pop(free[0])
                busy.add(session)
                history[session] += prompt_of(seed * 10**6 + len(history[session]) * 1000 + session, GIVEN)
                running[self._prompt(list(history[session]), ANSWER)] = session, time.perf_counter()
            for output in self.engine.step():
                session, asked = running[output.request_id]
                if output.outputs[0].token_ids:
                    first_tokens.setdefault(output.request_id, 1e3 * (time.perf_counter() - asked))
                if output.finished:
                    del running[output.request_id]
                    prompts += len(output.prompt_token_ids)
                    found += output.num_cached_tokens or 0
                    history[session] += output.outputs[0].token_ids
        took = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
        self.settle()
        waits = sorted(first_tokens.values())
        new = sessions * (TURNS * GIVEN + (TURNS - 1) * ANSWER)
        return took | {
            "recomputed": prompts - found - new,
            "first_token_ms": waits[len(waits) // 2],
            "first_token_ms_p90": waits[len(waits) * 9 // 10],
            "answers": [hashlib.sha256(repr(each).encode()).hexdigest()[:16] for each in history],
        }
