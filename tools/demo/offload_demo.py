# SPDX-License-Identifier: Apache-2.0
"""`tools/dev demo --offload`: a long conversation is evicted from the device by others and returns; its engine is
killed with SIGKILL, and it returns to a new one. Beside it, the same with vLLM alone."""

from __future__ import annotations

import json
from pathlib import Path

from engine_child import DemoError, EngineProcess
from screen import Screen

DOCUMENTS = Path(__file__).resolve().parents[2] / "docs"
READ, OTHERS = "semantics.md", ("server.md", "vllm.md", "architecture.md", "memory.md")
BLOCK = 32
QUESTION = "\n\nQuestion: what does a sleep keep?\nAnswer:"
AGAIN = "\n\nQuestion: and what does it give back?\nAnswer:"
# KV of equal tokens differs in its last digits if computed in other batches: in float32 that rounds no token otherwise.
ENGINE = {"dtype": "float32", "block_size": BLOCK}
ALONE = {"VLLM_PLUGINS": ""}


class Side:
    """An engine of one of the two, and what it said."""

    def __init__(
        self, model: Path, directory: Path, log: Path, conversation: int, torpor: dict | None, more: dict | None = None
    ):
        """`torpor`: its options; None: vLLM alone. `more`: for its environment."""
        self._start = (model, directory, log, (ALONE if torpor is None else {}) | (more or {}))
        self._conversation = conversation
        self._options = ENGINE | {
            "max_model_len": conversation * 2,
            "num_gpu_blocks_override": conversation * 2 // BLOCK + 2,  # room for two of them
            "additional_config": {} if torpor is None else {"torpor": torpor},
        }
        self.process: EngineProcess | None = None

    def launch(self) -> None:
        self.process = EngineProcess(*self._start, "--options", json.dumps(self._options))

    def start(self) -> None:
        if self.process is None:
            self.launch()
        self.process.wait_until_ready()
        # The first long prompt of a process is slower, whoever it is of.
        self.ask(self.tokens((DOCUMENTS / OTHERS[0]).read_text())[-self._conversation :], 2)

    def tokens(self, text: str) -> list[int]:
        return self.process.order("tokens_of", text=text)

    def ask(self, tokens: list[int], max_tokens: int) -> dict:
        return self.process.order("ask", tokens=tokens, max_tokens=max_tokens)

    def evict(self) -> None:
        """Other conversations, until the device has nothing else."""
        for name in OTHERS:
            self.ask(self.tokens((DOCUMENTS / name).read_text())[: self._conversation * 3 // 4], 2)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process = None


def torpor_options(directory: Path) -> dict:
    sizes = {"offload": "eager", "host_bytes": "1GiB", "disk_bytes": "2GiB"}
    return {"checkpoint_dir": str(directory)} | sizes


def run(model: Path, directory: Path, conversation: int, max_tokens: int, screen: Screen) -> dict:
    log = directory / "engine.log"
    torpor, alone = (
        Side(model, directory, log, conversation, options) for options in (torpor_options(directory), None)
    )
    try:
        screen.stage("1. An engine with torpor's KV connector answers a question about a long document")
        torpor.start()
        prompt = torpor.tokens((DOCUMENTS / READ).read_text())[:conversation] + torpor.tokens(QUESTION)
        first = torpor.ask(prompt, max_tokens)
        screen.line(said(first))
        prompt_again = prompt + first["tokens"] + torpor.tokens(AGAIN)

        screen.stage("2. Other conversations evict it from the device; then it returns")
        torpor.evict()
        evicted = torpor.ask(prompt_again, max_tokens)
        screen.line(said(evicted))

        screen.stage("3. kill -9, and a new process: it returns once more")
        torpor.process.order("settle")
        torpor.kill()
        torpor.start()
        restarted = torpor.ask(prompt_again, max_tokens)
        screen.line(said(restarted))
        torpor.kill()

        screen.stage("4. The same with vLLM alone: a new process, then after an eviction")
        alone.start()
        restarted_alone = alone.ask(prompt_again, max_tokens)
        screen.line(said(restarted_alone))
        alone.evict()
        evicted_alone = alone.ask(prompt_again, max_tokens)
        screen.line(said(evicted_alone))
    finally:
        torpor.kill()
        alone.kill()
    if not evicted["cached_tokens"] and not restarted["cached_tokens"]:
        raise DemoError("nothing was found again; the log has more: " + str(log))
    expected = evicted_alone["tokens"]
    return {
        "requests": 3,
        "identical": sum(answer["tokens"] == expected for answer in (evicted, restarted, restarted_alone)),
        "prompt_tokens": len(prompt_again),
        "answer": evicted["text"],
        "evicted": {"torpor": figures(evicted), "alone": figures(evicted_alone)},
        "restarted": {"torpor": figures(restarted), "alone": figures(restarted_alone)},
        "log": str(log),
    }


def figures(answer: dict) -> dict:
    return {name: answer[name] for name in ("first_token_seconds", "cached_tokens")}


def said(answer: dict) -> str:
    return f"first token after {answer['first_token_seconds']:.2f} s, {answer['cached_tokens']} tokens not computed"


def show(result: dict, screen: Screen) -> None:
    screen.stage("5. What happened")
    screen.line(
        f"{'first token of ' + str(result['prompt_tokens']) + ' (tokens not computed)':<44}"
        f"{'torpor':>16}{'vLLM alone':>18}"
    )
    for name, text in (("evicted", "after its KV was evicted"), ("restarted", "after kill -9, in a new process")):
        cells = [
            f"{side['first_token_seconds']:.2f} s ({side['cached_tokens']})"
            for side in (result[name]["torpor"], result[name]["alone"])
        ]
        screen.line(f"{text:<44}{cells[0]:>16}{cells[1]:>18}")
    screen.line(f"answers identical to vLLM's alone: {result['identical']} of {result['requests']}")
    screen.line(" ".join(result["answer"].split()))
