# SPDX-License-Identifier: Apache-2.0
"""`torpor.fork()` in the engine core: children of a live request share its KV blocks.

Each child is a request of its own with the values of its parent. Its blocks are the parent's own, by reference: those
that the prefix cache would find have equal keys, which does not mean equal bytes. The one block that both would go on
in is copied within the device. Which blocks these are is decided in C++ (engine/forks.h). A child waits, as a request
whose KV a connector has loaded, and has all blocks that its first step needs: no two can wait for each other.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.request import Request, RequestStatus

from torpor import _core
from torpor.errors import InvalidArgument, NotFound, Unsupported, WrongState
from torpor.vllm import plugin, sessions
from torpor.vllm import scheduler_values as values


class Forks:
    """The forks of one EngineSide. The engine core's thread calls it between steps."""

    def __init__(self, hooks, of_sessions: sessions.Sessions):
        self._hooks = hooks
        self._scheduler = hooks.scheduler
        self._sessions = of_sessions
        self._done: dict[str, dict] = {}  # by action: fork()'s options and its answer, while one of its children lives
        self._holding: str | None = None  # the call whose children wait for their front end

    @property
    def holds(self) -> bool:
        """Whether the engine stands still until a front end has the children of a fork."""
        return self._holding is not None

    def fork(self, options: dict) -> dict:
        """Make the children of a request, all or none. The engine stands still then, until end(), unless the fork was
        made before ("repeated").

        `options`: "request" (None: it has ended), "name" (what it was made with), "children" (their ids), "at", "seeds"
        (of each child, None: the parent's), "action" (an id of the fork), "call" (an id of this call alone), "timeout".
        """
        plugin.require("fork")
        _, admissions = self._sessions.begun()
        self._forget_ended()
        if (done := self._done.get(options["action"])) is not None:
            given, answer = done["options"], done["answer"]
            same = ("name", "at", "seeds")  # n too: there is a seed for each child
            if any(given[name] != options[name] for name in same):
                raise InvalidArgument(f"the action {options['action']} was another fork", "give each fork its own")
            return answer | {"repeated": True}
        if options["request"] is None:
            raise NotFound(f"there is no unfinished request {options['name']!r}", "name it as it was made")
        self._check(options["request"], admissions)
        if self._hooks.is_quiet:
            raise WrongState("the engine stands still for another call", "call this again when that has ended")
        self._hooks.quiesce(options["timeout"])
        try:
            answer = self._make(options, admissions)
        except BaseException:
            self._hooks.resume()
            raise
        self._done[options["action"]] = {"options": options, "answer": answer}
        self._holding = options["call"]
        return answer | {"repeated": False}

    def end(self, call: str, keep: bool) -> None:
        """The front end has the children, or the caller has gone: then they end. Forks of other calls stay."""
        of_call = [action for action, done in self._done.items() if done["options"]["call"] == call]
        if not keep:
            for action in of_call:
                children = self._done.pop(action)["answer"]["children"]
                self._scheduler.finish_requests(children, RequestStatus.FINISHED_ABORTED)
        if self._holding == call:
            self._holding = None
            self._hooks.resume()

    def unstarted(self) -> int:
        """Return how many children have not taken a step. What the model runner must know of them is in no values."""
        if (admissions := sessions.admissions_of(self._scheduler)) is None:
            return 0
        children = {child for done in self._done.values() for child in done["answer"]["children"]}
        return len(admissions.requests & children)

    def _forget_ended(self) -> None:
        alive = self._scheduler.requests.keys() | self._sessions.held().keys()
        for action in [a for a, done in self._done.items() if alive.isdisjoint(done["answer"]["children"])]:
            del self._done[action]

    def _check(self, request_id: str, admissions) -> Request:
        request = self._scheduler.requests.get(request_id)
        if request is None or request.is_finished():
            raise NotFound(f"request {request_id} does not run here", "it has ended, or is hibernated")
        if request_id in admissions.requests:
            raise WrongState(f"request {request_id} comes into the engine now", "wait for its next token")
        problems = sessions.unsupported(request)
        pool = self._scheduler.kv_cache_manager.block_pool
        if pool.enable_caching and pool.hash_block_size != self._scheduler.block_size:
            problems.append("prefixes that end within a KV block")
        if problems:
            raise Unsupported(f"request {request_id} cannot be forked: {', '.join(problems)}")
        return request

    def _make(self, options: dict, admissions) -> dict:
        scheduler, request_id = self._scheduler, options["request"]
        values.assert_quiet(scheduler)
        request = self._check(request_id, admissions)  # the step that was under way may have been its last
        plan = self._plan(request, options)
        items = self._items(request, plan, options)
        made = [self._sessions.made(item) for item in items]
        for child in made:
            if child.prefill_stats is not None and plan["computed_tokens"] > 0:
                child.prefill_stats.set(child.num_prompt_tokens, plan["computed_tokens"], 0)
        copied = self._share(request_id, plan, [child.request_id for child in made])
        try:
            for item, child in zip(items, made, strict=True):
                admissions.admit(child, 0, sessions.for_runners(item))  # nothing is to be loaded
                child.num_computed_tokens = plan["computed_tokens"]
                scheduler.add_request(child)
                if child.num_output_tokens > 0:  # it was queued and scheduled as its parent
                    child.events.clear()
        except BaseException:
            for child in made:
                scheduler.finish_requests(child.request_id, RequestStatus.FINISHED_ABORTED)
                admissions.withdraw(child.request_id)
                scheduler.kv_cache_manager.coordinator.free(child.request_id)  # nothing, where that has done it
            raise
        return {
            "children": [child.request_id for child in made],
            "shared_blocks": plan["shared_blocks"],
            "bytes": copied,
            "prompt_token_ids": list(items[0]["prompt_token_ids"]),
            "token_ids": list(items[0]["output_token_ids"]),
            "sampling": items[0]["sampling"],
            "arrival_time": items[0]["arrival_time"],
            "sent": {each.request_id: len(each._output_token_ids) for each in scheduler.requests.values()}
            | self._sessions.held(),
        }

    def _plan(self, request: Request, options: dict) -> dict[str, Any]:
        (blocks,) = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)
        outputs = request.num_output_tokens if options["at"] is None else options["at"]
        params = request.sampling_params
        again = params.prompt_logprobs is not None and outputs == 0  # the runner has those of a prompt, and loses them
        parent = {
            "prompt_tokens": request.num_prompt_tokens,
            "output_tokens": request.num_output_tokens,
            "computed_tokens": 0 if again else request.num_computed_tokens,
            "blocks": list(blocks),
            "block_tokens": self._scheduler.block_size,
        }
        free = self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return _core.plan_fork(parent, options["at"], len(options["children"]), free)

    def _items(self, request: Request, plan: dict, options: dict) -> list[dict]:
        """The values of each child."""
        value, outputs = values.request_to_value(request), plan["output_tokens"]
        of_runners = self._hooks.states_of_runners([request.request_id])
        sampling = value["sampling"]
        if request.request_id in self._sessions.drawn_seeds:  # not its caller's: a child draws one for itself
            sampling = sampling | {"seed": None}
        engine = value["engine"] | {"prefill_counted": value["engine"]["prefill_counted"] and outputs > 0}
        engine.pop("prefill_stats", None)  # of its parent's beginning
        if outputs == 0:
            engine.pop("skip_reading_prefix_cache", None)  # as its parameters say: it begins
        steps = [*getattr(request, values.FORKED, ()), {"request": request.request_id, "at": outputs}]
        engine[values.FORKED] = steps[-values.MOST_FORK_STEPS :]
        items = []
        for child, seed in zip(options["children"], options["seeds"], strict=True):
            goes_on = seed is None and outputs == request.num_output_tokens
            runners = [{
                "generator": rank[0].get("generator") if goes_on else None,
                "seed": None,
                "drawn": outputs,  # so often, where there is no state of a generator
            } for rank in of_runners]  # fmt: skip
            items.append(value | {
                "id": child,
                "output_token_ids": value["output_token_ids"][:outputs],
                "num_computed_tokens": plan["computed_tokens"],
                "num_preemptions": 0,
                "stop_reason": None,
                "sampling": sampling if seed is None else sampling | {"seed": seed},
                "engine": engine | {"of_runners": runners},
            })  # fmt: skip
        return items

    def _share(self, parent: str, plan: dict, children: list[str]) -> int:
        """Give the children their blocks, and those that are copied their content. Return how many bytes were copied;
        after an error nobody has any."""
        if plan["computed_tokens"] == 0:
            return 0
        manager = self._scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        pool, shared = manager.block_pool, manager.req_to_blocks[parent][: plan["shared_blocks"]]
        self._scheduler.torpor_steps += 1  # blocks change, as in a step: what is kept of them is not theirs any more
        try:
            for child in children:
                pool.touch(shared)
                manager.req_to_blocks[child] = list(shared)
                manager.num_cached_block[child] = len(shared)  # the parent enters them into the prefix cache
                manager.req_to_blocks[child] += pool.get_new_blocks(plan["own_blocks"])
            if plan["copied_block"] is None:
                return 0
            targets = [manager.req_to_blocks[child][len(shared)].block_id for child in children]
            return _core.copy_blocks(self._hooks, plan["copied_block"], targets)
        except BaseException:
            for child in children:
                manager.free(child)
            raise
