# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: an engine with tiers, and sessions whose KV blocks move between them.

    residency_process.py MODEL FOLDER

Prints what came of each of SCENARIOS.
"""

import dataclasses
import json
import sys

from conftest import InProcess
from connector_served import BLOCKS, ENGINE, Served, prompts
from vllm import SamplingParams

from torpor.errors import InvalidArgument, Unsupported

PROMPT = prompts()[3]
MORE = " And then the clock went on, and the river with it, until the window was dark."


class Asked(Served):
    """Requests of sessions, one after the other."""

    def __init__(self, one: InProcess):
        super().__init__(one)
        self.from_disk = 0  # tokens, since take_from_disk()
        stock = self.side.allocated

        def allocated(request, external: int) -> None:
            stock(request, external)
            if external > 0:
                self.from_disk += self.side.tokens_of_load(request.request_id)[1]

        self.side.allocated = allocated

    def turn(self, text: str, session: str | None, tenant: str = "") -> dict:
        self.rounds += 1
        name, before = f"turn-{self.rounds}", self.side.stats().get("onboard_transferred", 0)
        self.from_disk = 0
        extra = {"torpor_tenant": tenant} if tenant else None
        sampling = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, extra_args=extra)
        self.one.engine.add_request(name, {"prompt": text}, sampling, session_id=session)
        tokens, cached = self.answers()[name]
        loaded = self.side.stats().get("onboard_transferred", 0) - before
        return {"tokens": tokens, "cached": cached, "loaded": loaded, "from_disk": self.from_disk}

    def free_blocks(self) -> int:
        return self.one.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    @property
    def sessions(self):
        return self.one.llm.torpor.sessions

    def view(self, session: str) -> dict | None:
        found = [each for each in self.sessions.known() if each.id == session]
        return dataclasses.asdict(found[0]) if found else None


def _cold(asked: Asked) -> None:
    asked.one.core.scheduler.reset_prefix_cache(reset_connector=True)


def moved(asked: Asked) -> dict:
    """A conversation of two turns, whose blocks go to each tier and are found there."""
    _cold(asked)
    first = asked.turn(PROMPT, None)
    expected = asked.turn(PROMPT + MORE, None)
    result = {"expected": [first["tokens"], expected["tokens"]]}
    _cold(asked)
    result["again"] = [asked.turn(PROMPT, "agent")["tokens"], asked.turn(PROMPT + MORE, "agent")["tokens"]]
    result["known"] = asked.view("agent")
    for to in ("host", "disk"):
        answer = dataclasses.asdict(asked.sessions["agent"].demote(to=to, action_id=f"to-{to}"))
        result[to] = {"answer": answer, "view": asked.view("agent"), "turn": asked.turn(PROMPT + MORE, "agent")}
        result[to]["repeated"] = asked.sessions["agent"].demote(to=to, action_id=f"to-{to}").repeated
    asked.sessions["agent"].demote(to="disk")
    result["prefetch"] = {
        "answer": dataclasses.asdict(asked.sessions["agent"].prefetch()),
        "view": asked.view("agent"),
        "turn": asked.turn(PROMPT + MORE, "agent"),
    }
    return result


def to_the_device(asked: Asked) -> dict:
    """Blocks of a session are on the device before its next request comes; or on their way when it does."""
    _cold(asked)
    result = {}
    for tier in ("host", "disk"):
        asked.turn(PROMPT, "agent")
        asked.sessions["agent"].demote(to=tier)
        before = asked.view("agent")
        answer = dataclasses.asdict(asked.sessions["agent"].prefetch(to="device"))
        there = asked.view("agent")
        asked.side.core.check()
        result[tier] = {"before": before, "answer": answer, "view": there, "turn": asked.turn(PROMPT + MORE, "agent")}
    asked.sessions["agent"].demote(to="disk")
    before = asked.side.stats()["onboard_transferred"]
    call = {"verb": "prefetch", "session": "agent", "tenant": "", "to": "device"}
    begun = asked.side.core.session_call(call)
    turn = asked.turn(PROMPT + MORE, "agent")
    result["on its way"] = {
        "done": begun["done"],
        "answer": asked.side.core.session_answer("", begun["action_id"]),
        "turn": turn,
        "loaded": asked.side.stats()["onboard_transferred"] - before,
        "free": asked.free_blocks() == BLOCKS - 1,
    }
    return result


def reset_during_a_prefetch(asked: Asked) -> dict:
    """Nobody but a session's load has blocks of the device when vLLM's prefix cache is to be reset."""
    _cold(asked)
    asked.turn(PROMPT, "agent")
    asked.sessions["agent"].demote(to="host")
    begun = asked.side.core.session_call({"verb": "prefetch", "session": "agent", "tenant": "", "to": "device"})
    used = BLOCKS - 1 - asked.free_blocks()
    reset = asked.one.core.reset_prefix_cache()
    return {
        "begun": not begun["done"] and used > 0,
        "reset": reset,
        "answer": asked.side.core.session_answer("", begun["action_id"]),
        "free": asked.free_blocks() == BLOCKS - 1,
        "device": asked.view("agent")["device_bytes"],
    }


def beside_a_running_request(asked: Asked) -> dict:
    """Free blocks that a running request leaves: its own are not taken, and it is not preempted."""
    _cold(asked)
    expected = asked.turn(prompts()[5], None)["tokens"]
    asked.turn(PROMPT + MORE, "agent")
    asked.sessions["agent"].demote(to="host")
    pool = asked.one.core.scheduler.kv_cache_manager.block_pool
    asked.one.engine.add_request(
        "beside", {"prompt": prompts()[5]}, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    )
    while not asked.one.core.scheduler.running:
        asked.one.engine.step()
    [running] = asked.one.core.scheduler.requests.values()
    taken = pool.get_new_blocks(asked.free_blocks() - 6)  # few are left
    answer = dataclasses.asdict(asked.sessions["agent"].prefetch(to="device"))
    preempted, free = running.num_preemptions, asked.free_blocks()
    pool.free_blocks(taken)
    tokens = {name: tokens for name, (tokens, _) in asked.answers().items()}
    return {
        "expected": expected, "tokens": tokens.get("beside"), "answer": answer, "preempted": preempted, "free": free,
        "turn": asked.turn(PROMPT + MORE, "agent"),
    }  # fmt: skip


def demoted_beside_others(asked: Asked) -> dict:
    """Other requests run meanwhile: one of another session with the same beginning, whose blocks stay."""
    _cold(asked)
    expected = asked.turn(prompts()[5], None)["tokens"]
    asked.turn(PROMPT, "agent")
    asked.one.engine.add_request(
        "beside", {"prompt": prompts()[5]}, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    )
    asked.one.engine.add_request(
        "same beginning",
        {"prompt": PROMPT + MORE},
        SamplingParams(max_tokens=40, temperature=0, ignore_eos=True),
        session_id="other",
    )
    for _ in range(3):
        asked.one.engine.step()
    answer = asked.sessions["agent"].demote(to="disk")
    tokens = {name: tokens for name, (tokens, _) in asked.answers().items()}
    return {
        "expected": expected,
        "tokens": tokens,
        "answer": dataclasses.asdict(answer),
        "running": asked.sessions["other"].demote(to="disk").outcome,
    }


def held(asked: Asked) -> dict:
    """Pins and what is retained, within the budget of all of host memory, and half of that for one tenant."""
    _cold(asked)
    for number in range(4):
        asked.turn(prompts()[number], f"s{number}")
    pinned = asked.sessions["s0"].pin(ttl=600)
    clipped = asked.sessions["s0"].pin(ttl=10**6)
    retained = asked.sessions["s1"].retain(ttl=600, priority=3)
    result = {
        "pinned": dataclasses.asdict(pinned),
        "clipped": dataclasses.asdict(clipped),
        "retained": dataclasses.asdict(retained),
        "views": [asked.view("s0"), asked.view("s1")],
        "capacity": asked.side.stats()["host_capacity_blocks"],
        "block_bytes": asked.side.block_bytes,
        "stats": asked.side.stats(),
    }
    asked.sessions["s0"].demote(to="disk")
    result["after_demotion"] = asked.view("s0")
    return result


def of_tenants(asked: Asked) -> dict:
    _cold(asked)
    asked.turn(PROMPT, "agent", tenant="alice")
    core = asked.side.core

    def outcome(tenant: str) -> str:
        call = {"verb": "demote", "session": "agent", "tenant": tenant, "to": "host"}
        answer = core.session_call(call)
        asked.flush()
        return answer["outcome"]

    return {
        "bob": outcome("bob"),
        "nobody": asked.sessions["agent"].demote().outcome,
        "alice": outcome("alice"),
        "seen": [[each["id"] for each in core.session_views(tenant)["sessions"]] for tenant in ("bob", "alice", None)],
    }


def wrong(asked: Asked) -> dict:
    _cold(asked)
    asked.turn(PROMPT, "agent")
    session = asked.sessions["agent"]

    def problem(call) -> str:
        try:
            return str(call())
        except (InvalidArgument, Unsupported) as found:
            return f"{type(found).__name__}: {found}"

    return {
        "missing": asked.sessions["nobody"].demote().outcome,
        "remote": dataclasses.asdict(session.demote(to="remote")),
        "tier": problem(lambda: session.demote(to="tape")),
        "near": problem(lambda: session.prefetch(to="disk")),
        "ttl": problem(lambda: session.pin(ttl=0)),
        "empty": problem(lambda: asked.sessions[""].evict()),
        "evicted": dataclasses.asdict(session.evict()),
        "gone": asked.view("agent"),
        "cached": asked.turn(PROMPT, None)["cached"],
    }


def forgotten_with_new_weights(asked: Asked) -> dict:
    asked.turn(PROMPT, "agent")
    before = asked.view("agent") is not None
    asked.sessions["agent"].pin(ttl=600)
    _cold(asked)
    return {"before": before, "after": asked.view("agent"), "held": asked.side.stats()["held_by_sessions_blocks"]}


SCENARIOS = (
    moved,
    to_the_device,
    reset_during_a_prefetch,
    beside_a_running_request,
    demoted_beside_others,
    held,
    of_tenants,
    wrong,
    forgotten_with_new_weights,
)


def main() -> None:
    model, folder = sys.argv[1:3]
    advanced = {"session_tenant_share": 0.5, "session_pin_seconds": 3600}
    torpor = {
        "offload": "eager", "host_bytes": "2MiB", "disk_bytes": "64MiB", "session_pin_share": 1.0,
        "advanced": advanced,
    }  # fmt: skip
    asked = Asked(InProcess(model, folder, torpor=torpor, **ENGINE))
    result = {scenario.__name__: scenario(asked) for scenario in SCENARIOS}
    asked.side.core.check()
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
