# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: an engine whose blocks a policy of its user decides on, whose loads a console holds and
cancels, whose calls have hooks, and whose inputs are recorded.

    flow_process.py MODEL FOLDER RECORDING

Prints what came of each of SCENARIOS, and leaves a recording.
"""

import atexit
import json
import logging
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from conftest import InProcess
from connector_served import ENGINE, Served, params, prompts
from flow_own import Own, Watch
from inspector import BINARY
from zygote import MOST_SECONDS

import torpor.console


LEASE = 300  # seconds: as long as a stop may last


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def stored(served: Served, texts: list[str]) -> dict:
    """What becomes of their blocks."""
    before = served.side.stats()
    answers = served.round(texts)
    after = served.side.stats()
    names = ("offload_transferred", "offload_filtered", "onboard_transferred")
    return {name: after.get(name, 0) - before.get(name, 0) for name in names} | {"answers": answers}


def recorded(served: Served, rings: str, keep: str) -> dict:
    """Before any load: while one is under way, steps that do nothing fill the ring with events."""
    engine, made = served.one.engine, random.Random(3)
    for number in range(6):
        prompt = [20 + made.randrange(900) for _ in range(40 + 10 * number)]
        engine.add_request(f"recorded-{number}", {"prompt_token_ids": prompt}, params(number, 8 + number))
        engine.step()
    [aborted] = [name for name in served.one.core.scheduler.requests if name.startswith("recorded-5")]
    engine.abort_request([aborted], internal=True)
    served.answers()
    with torpor.console.connect(rings) as console:
        blocks = console.events(types="block", limit=10_000)["events"]
    subprocess.run([BINARY, "record", rings, "-o", keep, "--for", "0.1s"], check=True, capture_output=True)
    Own.asked.clear()
    return {"blocks": sorted({(each["from"], each["to"], each["tier_number"]) for each in blocks})}


def policy(served: Served) -> dict:
    texts, block = prompts(), served.side.block_tokens
    result: dict = {"block": block}
    before = dict(served.side.policy.counts)
    Own.mode["store"] = "none"
    result["nothing stored"] = stored(served, texts[:2])
    Own.mode["store"] = "keep"
    result["stored"] = stored(served, texts[2:4])
    for mode in ("none", "first", "keep"):  # of what was found
        served.one.core.scheduler.reset_prefix_cache()
        Own.mode["load"] = mode
        result[f"load {mode}"] = stored(served, texts[2:4])
    result["asked"] = list(Own.asked)
    counts = {name: count - before[name] for name, count in served.side.policy.counts.items()}
    return result | {"counts": counts}


def bypassed(served: Served) -> dict:
    """A policy that is wrong, raises or is late: blocks are stored as without it, and each case is said once."""
    lines, texts, made = Lines(), prompts(), served.side.policy
    logging.getLogger("vllm.torpor").addHandler(lines)
    result: dict = {}
    for number, mode in enumerate(("wrong", "raise")):
        Own.mode["store"] = mode
        result[mode] = stored(served, texts[4 + 2 * number : 6 + 2 * number])
    made._timeout, usual = 0.01, made._timeout  # it does not return before it is released
    Own.mode["store"] = "late"
    result["late"] = stored(served, texts[8:10])
    during = dict(made.counts)
    Own.mode["store"] = "none"
    Own.released.set()
    assert made._last.ended.wait(MOST_SECONDS)
    made._timeout = usual
    result["released"] = stored(served, texts[10:12])
    Own.mode["store"] = "keep"
    return result | {"counts": during, "lines": [line for line in lines.lines if "policy" in line]}


def loads(served: Served, rings: str) -> dict:
    """A load is held, goes on, and is waited for; another one is held, and cancelled."""
    texts = prompts()[2:3]
    expected = served.round(texts)
    result: dict = {"expected": expected}
    with torpor.console.connect(rings) as engine, torpor.console.connect(rings) as waiting:

        def held_load() -> torpor.console.Transfer:
            served.one.core.scheduler.reset_prefix_cache()
            served.ask(texts)
            while not engine.stops()["stops"]:
                served.one.engine.step()
            for _ in range(3):  # others would go on
                served.one.engine.step()
            candidates = engine.events(types="candidate", limit=10_000)["events"]
            loads = [each for each in candidates if each["candidate"] >> 48 == 0]
            result.setdefault("states", []).append([slot["state"] for slot in engine.slots()["slots"]])
            return waiting.transfer(loads[-1]["candidate"])

        number = engine.add_breakpoint(type="candidate", to="promoted", way="onboard", alone=True, lease=300)
        load, ended = held_load(), []
        try:
            load.wait(0)
        except TimeoutError as late:
            result["not yet"] = str(late)
        waits = threading.Thread(target=lambda: ended.append(load.wait(300)))
        waits.start()
        engine.remove_breakpoint(number)
        result["loaded"] = list(served.answers().values())
        waits.join()
        result["waited"] = ended
        engine.add_breakpoint(type="candidate", to="promoted", way="onboard", alone=True, once=True, lease=300)
        load = held_load()
        result["cancelled"] = load.cancel()
        result["computed"] = list(served.answers().values())
        result["end"] = load.wait(0)
        engine.resume()  # the stop holds later loads, too
        served.one.core.scheduler.reset_prefix_cache()
        result["again"] = served.round(texts)

        def sleep() -> None:
            served.one.llm.sleep(preserve_state=True)
            served.one.llm.wake_up()

        def pause() -> None:
            served.one.core.pause_scheduler("keep", True)
            served.one.core.resume_scheduler()

        for operation in (sleep, served.one.llm.checkpoint, pause):
            engine.add_breakpoint(type="candidate", to="promoted", way="onboard", alone=True, once=True, lease=LEASE)
            held_load()
            began = time.monotonic()
            operation()
            over = {"in_time": time.monotonic() - began < LEASE / 2, "stops": engine.stops()["stops"]}
            result.setdefault("over", []).append(over | {"answers": list(served.answers().values())})
    return result


def hooks(served: Served) -> dict:
    texts = prompts()[12:14]
    expected = served.round(texts)
    Watch.calls.clear()
    Watch.held = f"{served.rounds + 1}-0"
    held, other = served.ask(texts)
    answers: dict = {}
    while other not in answers:
        answers |= {o.request_id: list(o.outputs[0].token_ids) for o in served.one.engine.step() if o.finished}
    first = list(answers)
    Watch.held = ""
    answers |= {i: tokens for i, (tokens, _) in served.answers().items()}
    calls = list(Watch.calls)
    report = served.one.llm.sleep(preserve_state=True)
    served.one.llm.wake_up()
    operations = [call for call in Watch.calls[len(calls) :] if call[1] in ("sleep", "wake_up")]
    Watch.raises = True
    raised = served.round(texts)
    Watch.raises = False
    return {
        "expected": [tokens for tokens, _ in expected],
        "tokens": [answers[held], answers[other]],
        "raised": [tokens for tokens, _ in raised],
        "first": first == [other],
        "calls": calls,
        "slept": bool(report),
        "operations": operations,
    }


def main() -> None:
    model, folder, keep = sys.argv[1:4]
    rings = tempfile.mkdtemp(dir="/dev/shm")
    atexit.register(shutil.rmtree, rings, ignore_errors=True)
    lines = Lines()
    logging.getLogger("vllm.torpor").addHandler(lines)
    options = {
        "offload": "eager", "host_bytes": "64MiB", "policy": "flow_own:Own", "call_hooks": "flow_own:Watch",
        "events_dir": rings, "events_blocks": True, "console": "control", "record_inputs": True,
        "advanced": {"policy_timeout_ms": 1000 * MOST_SECONDS},  # a slow machine bypasses nothing
    }  # fmt: skip
    served = Served(InProcess(Path(model), Path(folder) / "checkpoints", torpor=options, **ENGINE))
    result = {"recorded": recorded(served, rings, keep), "policy": policy(served), "bypassed": bypassed(served)}
    result |= {"loads": loads(served, rings), "hooks": hooks(served)}
    result["warned"] = [line for line in lines.lines if "record_inputs" in line]
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
