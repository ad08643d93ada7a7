# SPDX-License-Identifier: Apache-2.0
"""`tools/dev demo --sessions`: an agent's chat is hibernated while its tool runs, and others go on; a chat of another
engine forks in four; then the agent's moves to that engine, and the one that it was in is killed with SIGKILL.

Every answer is compared with a run of the same requests to which nothing happened.
"""

from __future__ import annotations

import json
from pathlib import Path

from engine_child import DemoError, EngineProcess
from screen import Screen, size

AGENT = "0"  # the chat that calls a tool, and moves
TOOL_STEPS = 20  # that the others take meanwhile
BRANCHES = 4
# In batches of other sizes the last digits differ: in float32 that rounds no token otherwise.
ENGINE = {"dtype": "float32"}


def start(model: Path, directory: Path, name: str) -> EngineProcess:
    """An engine of the two, which share a directory."""
    torpor = {"checkpoint_dir": str(directory / "shared"), "sessions": True}
    options = json.dumps(ENGINE | {"additional_config": {"torpor": torpor}})
    return EngineProcess(model, directory, directory / f"{name}.log", {}, "--options", options)


def run(
    model: Path, directory: Path, prompts: list[str], max_tokens: int, freeze_after: int, seed: int, screen: Screen
) -> dict:
    if len(prompts) < 4:
        raise DemoError(f"--sessions needs 4 prompts, {len(prompts)} were given")
    if freeze_after + TOOL_STEPS >= max_tokens:
        raise DemoError(f"--max-tokens {max_tokens}: give more than {freeze_after + TOOL_STEPS}, so that it can move")
    here = len(prompts) // 2  # chats of the first engine; the rest are the second's
    requests = {"max_tokens": max_tokens, "seed": seed, "unseeded": False}
    engines: list[EngineProcess] = []
    try:
        screen.stage("1. Two engines start, with a directory that both see")
        for name in ("first", "second"):
            engines.append(start(model, directory, name))
        first, second = engines
        for engine in engines:
            engine.wait_until_ready()

        screen.stage("2. The run to which nothing happens, to compare with")
        expected: dict[str, list[int]] = {}
        for engine, numbers in ((first, range(here)), (second, range(here, len(prompts)))):
            engine.order("add", prompts=prompts, only=list(numbers), **requests)
            expected |= engine.order("run", steps=None)["tokens"]
        screen.line(f"{len(expected)} answers, {sum(map(len, expected.values()))} tokens")

        screen.stage(f"3. The same again; after {freeze_after} steps chat {int(AGENT) + 1} calls a tool and hibernates")
        first.order("add", prompts=prompts, only=list(range(here)), **requests)
        second.order("add", prompts=prompts, only=list(range(here, len(prompts))), **requests)
        first.order("run", steps=freeze_after)
        second.order("run", steps=freeze_after)
        before = first.order("ledger")[0]["arena_used_bytes"]
        image = first.order("hibernate", requests=[AGENT], to="host")
        held = first.order("ledger")[0]["arena_used_bytes"] - before
        meanwhile = first.order("run", steps=TOOL_STEPS)
        given = len(meanwhile["tokens"].get(AGENT, ()))
        others = sum(len(tokens) for number, tokens in meanwhile["tokens"].items() if number != AGENT)
        screen.line(f"{size(held)} of host memory for {image['tokens']} tokens; the others have {others} tokens now")
        first.order("resume", image=image["id"])

        screen.stage("4. The tool has answered: the chat goes on, for a few tokens")
        went_on = first.order("run", steps=8)["tokens"]
        if len(went_on[AGENT]) <= given:
            raise DemoError(f"the chat did not go on: it has {given} tokens")

        screen.stage(f"5. A chat of the other engine forks in {BRANCHES}")
        forked = second.order("fork", request=str(here), n=BRANCHES)
        shared, branches = forked["shared_blocks"], forked["children"]
        screen.line(f"{shared} blocks are shared by {branches} children, {size(forked['bytes'])} were copied")

        screen.stage(
            "6. The agent's chat moves: to disk; kill -9 of its engine; the other one, which serves chats, takes it"
        )
        moved = first.order("hibernate", requests=[AGENT], to="disk")
        answers = first.order("run", steps=None)["tokens"]  # those that stay end here
        first.kill()
        left = int(second.order("count")["unfinished"]) - branches
        came = second.order("resume", image=moved["path"])
        ran = second.order("run", steps=None)
        rest, children = ran["tokens"], ran["children"]
        gone = not Path(moved["path"]).exists()
        screen.line(
            f"{size(moved['bytes'])} of KV came to an engine with {left} chats of its own; "
            f"its image is {'gone' if gone else 'STILL THERE'}"
        )
        answers |= rest
    finally:
        for engine in engines:
            engine.kill()
    same = {number: answers.get(number) == tokens for number, tokens in expected.items()}
    equal_children = sum(tokens == expected[str(here)] for tokens in children.values())
    return {
        "requests": len(prompts),
        "identical": sum(same.values()),
        "differing": sorted(int(number) for number, equal in same.items() if not equal),
        "hibernated": 1,
        "hibernated_tokens": given,
        "hibernated_bytes": held,
        "forks": forked["children"],
        "forks_identical": equal_children,
        "fork_bytes": forked["bytes"],
        "moved": len(came["requests"]),
        "moved_bytes": moved["bytes"],
        "moved_image_left": not gone,
        "chats_beside_the_moved": left,
        "log": str(directory),
    }


def show(result: dict, screen: Screen) -> None:
    screen.stage("7. What happened")
    screen.table([
        ("identical to the run to which nothing happened", f"{result['identical']} of {result['requests']}"),
        ("hibernated while a tool ran", f"{result['hibernated']}, after {result['hibernated_tokens']} tokens"),
        ("branches of a chat, identical to it", f"{result['forks_identical']} of {result['forks']}"),
        ("moved to another engine", f"{result['moved']}, beside {result['chats_beside_the_moved']} chats there"),
        ("KV that moved", size(result["moved_bytes"])),
    ])  # fmt: skip
    for number in result["differing"]:
        screen.line(f"chat {number + 1} DIFFERS")
