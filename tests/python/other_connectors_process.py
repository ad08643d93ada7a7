# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: an engine beside a KV connector that is not torpor's, whose transfers are under way.

Prints what became of each scenario.
"""

import contextlib
import json
import sys
import traceback
from pathlib import Path

from conftest import InProcess
from requests_of_tests import run
from scripted_connector import LEDGER
from vllm import SamplingParams
from vllm.v1.request import RequestStatus

from torpor import errors
from torpor.vllm import connector_sleep


def prompt(length: int, step: int) -> list[int]:
    """Of a vocabulary as small as the GPU path's."""
    return [20 + step * position % 97 for position in range(length)]


PROMPT = prompt(140, 1)  # four whole blocks


def params(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


REQUESTS = {
    "sent": ({"prompt_token_ids": prompt(100, 2)}, params(3)),
    "running": ({"prompt_token_ids": prompt(90, 3)}, params(40)),
    "loaded": ({"prompt_token_ids": [*PROMPT, 7, 8, 9]}, params(12)),
}


class Engine:
    def __init__(self, model: Path, directory: Path, transfer: dict):
        self.one = InProcess(model, directory, kv_transfer_config=transfer, requests=REQUESTS)
        self.llm, self.core, self.scheduler = self.one.llm, self.one.core, self.one.core.scheduler
        self.send_prompt()
        self.expected = self.one.finish(self.one.begin())
        self.end_transfers()

    def send_prompt(self) -> None:
        self.one.engine.add_request("first", {"prompt_token_ids": PROMPT}, params(2))
        run(self.one.engine)
        self.end_transfers()

    def end_transfers(self) -> None:
        LEDGER.held = False
        while self.scheduler.has_requests():
            _, executed = self.core.step_fn()
            self.core.post_step(executed)

    def begin(self, held: bool) -> dict:
        """Answers so far. A load and a send are under way, and one request runs."""
        self.end_transfers()
        if tuple(PROMPT[:128]) not in LEDGER.store:  # the connector was reset
            self.send_prompt()
        kept = {tokens: kv for tokens, kv in LEDGER.store.items() if tokens == tuple(PROMPT[:128])}
        LEDGER.store.clear()  # nothing of what the last scenario sent is loaded
        LEDGER.store.update(kept)
        LEDGER.held = True
        answers = self.one.begin(0)
        statuses: dict = {}
        # What a connector beside it has of the running one's prompt comes when it comes.
        while len(LEDGER.open) < 2 or statuses["running"] is RequestStatus.WAITING_FOR_REMOTE_KVS:
            answers |= run(self.one.engine, 1)
            statuses = {r.request_id.rsplit("-", 1)[0]: r.status for r in self.scheduler.requests.values()}
        LEDGER.held = held
        LEDGER.take()
        assert statuses["sent"].name.startswith("FINISHED") and statuses["running"] is RequestStatus.RUNNING, statuses
        assert statuses["loaded"] is RequestStatus.WAITING_FOR_REMOTE_KVS, statuses
        return answers

    def is_as_expected(self, answers: dict) -> bool:
        finished = self.one.finish(answers)
        self.end_transfers()
        return finished == self.expected

    # --- scenarios ---

    def keeps_requests(self) -> dict:
        answers = self.begin(held=False)
        report = self.llm.sleep(level=1, preserve_state=True)
        slept = LEDGER.take()
        answers |= self.one.stopped()
        woken = self.llm.wake_up()
        result = {"slept": slept, "woken": LEDGER.take(), "kept": report.kept_blocks, "awake": woken.fully_awake}
        result["same"] = self.is_as_expected(answers)
        return result | {"recomputed": self.scheduler.torpor_recomputed}

    def is_refused_while_transfers_do_not_end(self) -> dict:
        answers = self.begin(held=True)
        refused = self.refused(lambda: self.llm.sleep(level=1, preserve_state=True, timeout=0.3))
        refused |= {"asleep": self.llm.is_sleeping(), "events": LEDGER.take()}
        LEDGER.held = False
        return refused | {"same": self.is_as_expected(answers)}

    def is_refused(self) -> dict:
        answers = self.begin(held=False)
        refused = self.refused(lambda: self.llm.sleep(level=1, preserve_state=True))
        return refused | {"asleep": self.llm.is_sleeping(), "same": self.is_as_expected(answers)}

    def fails_to_unregister(self) -> dict:
        answers = self.begin(held=False)
        LEDGER.failures = ["unregister"]
        refused = self.refused(lambda: self.llm.sleep(level=1, preserve_state=True))
        refused |= {"asleep": self.llm.is_sleeping(), "events": LEDGER.take()}
        answers |= run(self.one.engine, 2)
        self.llm.sleep(level=1, preserve_state=True)
        refused["again"] = LEDGER.take()
        answers |= self.one.stopped()
        self.llm.wake_up()
        return refused | {"same": self.is_as_expected(answers)}

    def fails_to_restore(self) -> dict:
        answers = self.begin(held=False)
        self.llm.sleep(level=1, preserve_state=True)
        answers |= self.one.stopped()
        LEDGER.take()
        LEDGER.failures = ["restore"]
        refused = self.refused(self.llm.wake_up)
        refused |= {"asleep": self.llm.is_sleeping(), "events": LEDGER.take()}
        refused["awake"] = self.llm.wake_up().fully_awake
        return refused | {"again": LEDGER.take(), "same": self.is_as_expected(answers)}

    def wakes_by_tags(self) -> dict:
        answers = self.begin(held=False)
        self.llm.sleep(level=1, preserve_state=True)
        answers |= self.one.stopped()
        LEDGER.take()
        self.llm.wake_up(tags=["weights"])
        weights = LEDGER.take()
        self.llm.wake_up(tags=["kv_cache"])
        kv = LEDGER.take()
        answers |= run(self.one.engine, 2)
        self.llm.sleep(level=1, preserve_state=True, tags=["weights"])
        only_weights = LEDGER.take()
        self.llm.sleep(level=1, preserve_state=True)
        deeper = LEDGER.take()
        answers |= self.one.stopped()
        self.llm.wake_up()
        return {
            "weights": weights, "kv": kv, "only_weights": only_weights, "deeper": deeper, "all": LEDGER.take(),
            "same": self.is_as_expected(answers),
        }  # fmt: skip

    def aborts_requests(self) -> dict:
        self.begin(held=False)
        LEDGER.sends_aborted = True
        self.llm.sleep(level=1, preserve_state=False)
        slept = LEDGER.take()
        LEDGER.sends_aborted = False
        run(self.one.engine)
        self.llm.wake_up()
        return {"slept": slept, "woken": LEDGER.take(), "same": self.is_as_expected(self.one.begin())}

    def ends_requests(self) -> dict:
        """The connector has no hooks for a sleep. Its transfers end first; if they do not, no request has ended."""
        answers = self.begin(held=True)
        refused = self.refused(lambda: self.llm.sleep(level=1, preserve_state=False, timeout=0.3))
        LEDGER.held = False
        refused |= {"asleep": self.llm.is_sleeping(), "same": self.is_as_expected(answers)}
        for mode in ("abort", "keep"):
            answers = self.begin(held=False)
            slept = self.llm.sleep(level=1, preserve_state=False, mode=mode).changed
            answers |= self.one.stopped()
            self.llm.wake_up()
            answers = answers if mode == "keep" else self.one.begin()
            refused[mode] = {"slept": slept, "same": self.is_as_expected(answers)}
        return refused

    def fails_when_requests_have_ended(self) -> dict:
        self.begin(held=False)
        LEDGER.failures = ["unregister"]
        refused = self.refused(lambda: self.llm.sleep(level=1, preserve_state=False))
        refused |= {"asleep": self.llm.is_sleeping(), "in_core": len(self.scheduler.requests)}
        run(self.one.engine, 3)  # outputs of steps that were under way
        refused["unfinished"] = self.one.engine.has_unfinished_requests()
        return refused | {"same": not refused["unfinished"] and self.is_as_expected(self.one.begin())}

    def puts_weights_alone_to_sleep(self) -> dict:
        """A sleep of the weights while transfers are open."""
        answers = self.begin(held=False)
        slept = self.llm.sleep(level=1, preserve_state=True, tags=["weights"]).changed
        events = LEDGER.take()
        answers |= self.one.stopped()
        self.llm.wake_up()
        return {"slept": slept, "events": events, "woken": LEDGER.take(), "same": self.is_as_expected(answers)}

    def computes_requests_again(self) -> dict:
        answers = self.begin(held=False)
        self.llm.sleep(level=1, preserve_state=False, mode="keep")
        slept = LEDGER.take()
        answers |= self.one.stopped()
        self.llm.wake_up()
        return {"slept": slept, "woken": LEDGER.take(), "same": self.is_as_expected(answers)}

    def pauses(self) -> dict:
        answers = self.begin(held=True)
        self.llm.sleep(level=0)
        slept = LEDGER.take()
        refused = self.refused(lambda: self.llm.sleep(level=1, preserve_state=True, timeout=0.3))
        self.llm.wake_up()
        LEDGER.held = False
        refused |= {"slept": slept, "woken": LEDGER.take(), "same": self.is_as_expected(answers)}
        answers = self.begin(held=False)
        self.llm.sleep(level=0)
        self.llm.sleep(level=1, preserve_state=False, mode="keep")
        refused["deeper"] = LEDGER.take()
        answers |= self.one.stopped()
        self.llm.wake_up()
        refused["same_after_deeper"] = self.is_as_expected(answers)
        answers = self.begin(held=False)
        self.llm.sleep(level=0)
        self.llm.sleep(level=1, preserve_state=True)
        refused["keeps"] = LEDGER.take()
        answers |= self.one.stopped()
        self.llm.wake_up()
        return refused | {"same_after_keeping": self.is_as_expected(answers)}

    def keeps_nothing_for_a_new_process(self) -> dict:
        answers = self.begin(held=False)
        refused = {
            "disk": self.refused(lambda: self.llm.sleep(level=1, preserve_state=True, to="disk"))["what"],
            "checkpoint": self.refused(self.llm.checkpoint)["what"],
        }
        self.llm.sleep(level=1, preserve_state=True)
        answers |= self.one.stopped()
        refused["early"] = self.refused(lambda: self.llm.wake_up(early=True))["what"]
        self.llm.wake_up()
        same = self.is_as_expected(answers)
        refused["from_checkpoint"] = self.refused(lambda: self.llm.wake_up(from_checkpoint="latest"))["what"]
        return refused | {"same": same}

    def has_torpors_inside(self) -> dict:
        """Its tiers are used, stay over a sleep, and are left by new weights."""
        side = connector_sleep.side_of(self.scheduler)
        stored = side.stats()["host_blocks"]
        cached = []
        for change in (lambda: None, lambda: None, self.new_weights):
            change()
            self.end_transfers()
            LEDGER.store.clear()
            self.one.begin(0)
            run(self.one.engine)
            cached.append(side.stats()["onboard_transferred"])
            self.end_transfers()
            self.llm.sleep(level=1, preserve_state=True)
            self.llm.wake_up()
        return {"stored": stored, "cached": cached}

    def forgets_kv_of_old_weights(self) -> dict:
        """However new weights come: in a block of their own, or while the engine is paused, with a store under way."""
        self.end_transfers()
        left = {}
        with self.llm.updating_weights():
            self.llm.collective_rpc("reload_weights")
        left["updating_weights"] = len(LEDGER.store)
        for kv in ("keep", "recompute", "abort"):
            answers = self.begin(held=False)
            self.llm.sleep(level=0)
            self.llm.collective_rpc("reload_weights")
            self.llm.wake_up(kv=kv)
            left[kv] = len(LEDGER.store)
            answers = self.one.begin() if kv == "abort" else answers
            left[f"{kv}, same"] = self.is_as_expected(answers)
        return left

    def is_reset_asleep(self) -> dict:
        """A request is aborted in the sleep, of which the connector hears in the next step."""
        answers = self.begin(held=False)
        self.llm.sleep(level=1, preserve_state=True)
        answers |= self.one.stopped()
        self.one.engine.abort_request(["running"])
        steps, stock = [], self.core.step_fn
        self.core.step_fn = lambda: (steps.append(1), stock())[1]
        self.llm.reset_prefix_cache(reset_running_requests=True)
        self.core.step_fn = stock
        self.llm.wake_up()
        finished = self.one.finish(answers)
        self.end_transfers()
        same = all(finished[name] == answer for name, answer in self.expected.items() if name != "running")
        return {"steps": len(steps), "same": same}

    def new_weights(self) -> None:
        self.llm.sleep(level=1, preserve_state=True)
        self.llm.wake_up(tags=["weights"])
        self.llm.collective_rpc("reload_weights")
        self.llm.wake_up(kv="keep")

    def refused(self, call) -> dict:
        try:
            call()
        except errors.Error as problem:
            return {"what": problem.what, "kind": type(problem).__name__, "changed": problem.state_changed}
        return {"what": "", "kind": "", "changed": True}


def main() -> None:
    model, directory, transfer, *names = sys.argv[1:]
    engine = Engine(Path(model), Path(directory), json.loads(transfer))
    result = {}
    for name in names:
        result[name] = {"error": "it did not end"}
        try:
            result[name] = getattr(engine, name)()
        except BaseException:
            result[name] = {"error": traceback.format_exc()}
            break
    with contextlib.suppress(BrokenPipeError):
        print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
