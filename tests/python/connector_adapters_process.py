# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: an engine with LoRA adapters, whose blocks go to host memory, disk and a shared store.

    connector_adapters_process.py MODEL FOLDER OPTIONS FIRST SCENARIO…

MODEL: of feature_models.with_adapters(). OPTIONS: torpor's, as JSON; {}: vLLM without a connector. FIRST: the number of
the adapter "first". Prints what came of each scenario; "killed" ends the process as kill -9 does.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

from conftest import InProcess
from connector_models_process import ENGINE_BLOCK, Peer, count_preemptions
from connector_process import aborted_while_loading
from connector_served import ENGINE, Served, prompts, worker_side
from feature_models import ADAPTERS, beside
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

TEXTS = prompts()[:4]
TOKENS, MORE_TOKENS = 8, 60
# On the CPU vLLM computes requests without an adapter with the one in the last slot: it stays empty.
LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8, "max_cpu_loras": 3}
BASE = "base"


def place(model: Path, name: str, content: str) -> None:
    """Put the files of another adapter where those of `name` are; `name` itself: its own again."""
    folder, own = beside(model, name), beside(model, f"own {name}")
    if not own.exists():
        shutil.copytree(folder, own)
    source = own if content == name else beside(model, content)
    for file in source.iterdir():  # a new file, as a trainer writes it: vLLM has the old one mapped
        shutil.copy(file, folder / "new")
        os.replace(folder / "new", folder / file.name)


class Adapted:
    """An engine, and requests of the same prompts with and without adapters."""

    def __init__(self, served: Served, model: Path, first: int):
        self.served, self.one, self.model, self.count = served, served.one, model, 0
        self.numbers = {name: first + number for number, name in enumerate(ADAPTERS)}

    def request_of(self, name: str, **more) -> LoRARequest | None:
        """`name`: of an adapter, or BASE."""
        return None if name == BASE else LoRARequest(name, self.numbers[name], str(self.folder(name)), **more)

    def folder(self, name: str) -> Path:
        return beside(self.model, name)

    def place(self, name: str, content: str) -> None:
        place(self.model, name, content)

    def ask(self, name: str, prompt: dict, tokens: int = TOKENS, adapter: LoRARequest | None = None, **more) -> str:
        self.count += 1
        request_id = f"{name} {self.count}"
        params = SamplingParams(**{"temperature": 0, "max_tokens": tokens, "ignore_eos": True} | more)
        lora = adapter or self.request_of(name)
        self.one.engine.add_request(request_id, prompt, params, lora_request=lora)
        return request_id

    def round(self, names, tokens: int = TOKENS, texts=TEXTS) -> dict:
        """For each of these names the answers, and how many of the prompts' tokens were not computed."""
        ids = {name: [self.ask(name, {"prompt": text}, tokens) for text in texts] for name in names}
        found = self.served.answers()
        return {
            name: {"tokens": [found[i][0] for i in each], "cached": sum(found[i][1] for i in each)}
            for name, each in ids.items()
        }

    def forget_device(self) -> None:
        assert self.one.core.scheduler.reset_prefix_cache()


def expected(adapted: Adapted) -> dict:
    """One after the other: in batches of one content."""
    return {name: adapted.round([name], MORE_TOKENS)[name]["tokens"] for name in (BASE, *ADAPTERS)}


NAMES = (BASE, "first", "second")


def rounds(adapted: Adapted) -> list:
    """The same prompts, of which the device has nothing at the beginning of each round."""
    found = []
    for _ in range(2):
        adapted.forget_device()
        found.append(adapted.round(NAMES))
    return found


def pressed(adapted: Adapted) -> dict:
    """Answers that outgrow the device: requests are preempted, blocks are evicted and come back."""
    seen = count_preemptions(adapted.one.core.scheduler)
    try:
        found = adapted.round(("first", "second"), MORE_TOKENS)
    finally:
        del adapted.one.core.scheduler._preempt_request
    return found | {"preemptions": len(seen)}


def slept(adapted: Adapted) -> dict:
    """A sleep in the middle, with the state of the requests, while some wait for their blocks."""
    adapted.forget_device()
    names = ("first", "second")
    ids = {name: [adapted.ask(name, {"prompt": text}, 16) for text in TEXTS] for name in names}
    answers, loading = {}, 0
    while loading == 0:
        answers |= {o.request_id: list(o.outputs[0].token_ids) for o in adapted.one.engine.step() if o.finished}
        loading = adapted.served.side.core.loading
    adapted.one.llm.sleep(level=1, preserve_state=True)
    answers |= {o.request_id: list(o.outputs[0].token_ids) for o in adapted.one.engine.step() if o.finished}
    adapted.one.llm.wake_up()
    answers |= {i: tokens for i, (tokens, _) in adapted.served.answers().items()}
    return {name: {"tokens": [answers[i] for i in each]} for name, each in ids.items()} | {"loading": loading}


def left_asleep(adapted: Adapted) -> dict:
    """Requests in the middle, asleep on disk, for another process."""
    adapted.round(["second"])  # of which blocks stay in the device's prefix cache
    ids = [adapted.ask("first", {"prompt": text}, 24) for text in TEXTS[:2]]
    for _ in range(6):
        adapted.one.engine.step()
    path = adapted.one.llm.sleep(level=1, preserve_state=True, to="disk").checkpoint
    adapted.one.engine.step()
    adapted.one.llm.wake_up()
    adapted.served.answers()
    return {"checkpoint": str(path), "ids": ids}


def gone_on(adapted: Adapted) -> dict:
    """Wake the checkpoint that another process has left, and let its requests go on. Return their answers."""
    report = adapted.one.llm.wake_up(from_checkpoint=os.environ["TORPOR_TEST_CHECKPOINT"])
    requests = adapted.one.core.scheduler.requests.values()
    salted = [" ".join((request.cache_salt or "").split()[:3]) for request in requests]
    cached = len(adapted.one.core.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache)
    answers = {i: tokens for i, (tokens, _) in adapted.served.answers().items()}
    return {"failed": report.failed_requests, "answers": answers, "salted": salted, "in_prefix_cache": cached}


def left_on_disk(adapted: Adapted) -> int:
    """For an engine that finds it. What was left out because the disk was slow is offered when it is computed again."""
    for _ in range(20):
        adapted.forget_device()
        found = adapted.round(NAMES)
        if all(each["cached"] > len(TEXTS) * ENGINE_BLOCK for each in found.values()):
            break
    return adapted.served.side.stats()["disk_blocks"]


def first_round(adapted: Adapted) -> dict:
    return adapted.round(NAMES)


def stats(adapted: Adapted) -> dict:
    return adapted.served.side.stats()


# --- the content of "first" changes under its name, number and path; that of "third" is put there ---


def reload(adapted: Adapted) -> None:
    assert adapted.one.engine.add_lora(adapted.request_of("first", load_inplace=True))


def evict(adapted: Adapted) -> None:
    """As vLLM does for others, in a step."""
    adapted.one.runner.lora_manager.remove_adapter(adapted.numbers["first"])


def reloaded(adapted: Adapted) -> dict:
    """In place, between steps; and back again."""
    found = {"before": adapted.round(["first"])["first"]}
    for name, content in (("other", "third"), ("back", "first")):
        adapted.place("first", content)
        reload(adapted)
        adapted.forget_device()
        before = stats(adapted).get("onboard_transferred", 0)
        found[name] = adapted.round(["first"])["first"]
        found[name]["loaded"] = stats(adapted).get("onboard_transferred", 0) - before
    return found


def evicted(adapted: Adapted) -> dict:
    """It gives way to others and is read again, from other files."""
    found = {"before": adapted.round(["first"])["first"]}
    for name, content in (("other", "third"), ("back", "first")):
        adapted.place("first", content)
        evict(adapted)
        found[name] = adapted.round(["first"])["first"]
    return found


def changed_in_between(adapted: Adapted) -> dict:
    """After its requests were looked up, and their blocks of the older content are being loaded, or were."""
    result, seeded = {}, {"temperature": 1.0, "seed": 5}
    for way in ("read by its first step", "reloaded while it loads"):
        adapted.place("first", "first")
        reload(adapted)
        adapted.round(["first"])
        adapted.forget_device()
        greedy = adapted.ask("first", {"prompt": TEXTS[1]})
        drawing = adapted.ask("first", {"prompt": TEXTS[2]}, **seeded)
        worker = worker_side()
        worker.look = lambda: None  # the loads end when it is said
        while (loading := adapted.served.side.core.loading) < 2:
            adapted.one.engine.step()
        adapted.place("first", "third")
        if way == "read by its first step":
            evict(adapted)
        else:
            reload(adapted)
            for _ in range(3):
                adapted.one.engine.step()
        del worker.look
        answers = adapted.served.answers()
        result[way] = {"tokens": answers[greedy][0], "loading": loading, "drawn": answers[drawing][0]}
    again = adapted.round(["first"])["first"]
    adapted.ask("first", {"prompt": TEXTS[2]}, **seeded)
    [(result["drawn"], _)] = adapted.served.answers().values()
    adapted.place("first", "first")
    reload(adapted)
    return result | {"again": again["tokens"], "back": adapted.round(["first"])["first"]["tokens"]}


def changed_while_it_waits(adapted: Adapted) -> dict:
    """After its request was looked up and found, and before there were device blocks for it."""
    adapted.round(["first"])
    adapted.forget_device()
    for number in range(3):  # together they have all blocks
        adapted.ask(BASE, {"prompt_token_ids": [260 + (token * 7 + number) % 200 for token in range(380)]}, 30)
    request_id = adapted.ask("first", {"prompt": TEXTS[1]})
    side, seen = adapted.served.side, []
    stock = side.match

    def match(request, computed: int) -> int | None:
        found = stock(request, computed)
        if request.lora_request is not None and found:
            seen.append(request.status.name)
        return found

    side.match = match
    while len(seen) < 3:  # in three steps the same was found
        adapted.one.engine.step()
    adapted.place("first", "third")
    reload(adapted)
    tokens, _ = adapted.served.answers()[request_id]
    del side.match
    adapted.place("first", "first")
    reload(adapted)
    return {"tokens": tokens, "seen": sorted(set(seen))}


def changed_under_way(adapted: Adapted, length: int = 100, tokens: int = 20) -> dict:
    """While its request computes: as in vLLM it goes on with the other content, and nobody finds what it computed.

    length: of the prompt. tokens: those of the answer that the older content has computed.
    """
    adapted.forget_device()
    prompt = [260 + number * 7 % 200 for number in range(length)]
    adapted.ask("first", {"prompt_token_ids": prompt}, 70)
    [request] = adapted.one.core.scheduler.requests.values()
    while request.num_output_tokens < tokens or request.num_computed_tokens == 0:
        adapted.one.engine.step()
    adapted.place("first", "third")
    evict(adapted)
    [(answered, _)] = adapted.served.answers().values()
    adapted.place("first", "first")
    reload(adapted)
    longer = {"prompt_token_ids": prompt + answered}

    def answer(**more) -> list[int]:
        adapted.ask("first", longer, **more)
        [(found, _)] = adapted.served.answers().values()
        return found

    with_device = answer()
    adapted.forget_device()
    found = [with_device, answer()]
    adapted.forget_device()
    return {"found": found, "computed": answer(skip_reading_prefix_cache=True)}


def changed_in_its_prompt(adapted: Adapted) -> dict:
    """Before the second of the steps that compute it: that one fills blocks which have keys of the older content."""
    return changed_under_way(adapted, 300, 0)


def in_place(adapted: Adapted) -> list:
    """Requests that have vLLM read the adapter anew in each step."""
    found = []
    for content in ("first", "first", "third"):
        adapted.place("first", content)
        adapted.ask("first", {"prompt": TEXTS[2]}, adapter=adapted.request_of("first", load_inplace=True))
        found += adapted.served.answers().values()
    adapted.place("first", "first")
    reload(adapted)
    return found


def unreadable(adapted: Adapted) -> str:
    """An adapter without files: vLLM says so, and its request does not wait for ever."""
    adapted.ask("nobody", {"prompt": TEXTS[0]}, adapter=LoRARequest("nobody", 77, str(adapted.folder("nobody"))))
    for _ in range(1000):
        try:
            adapted.one.engine.step()
        except Exception as problem:
            return type(problem).__name__
    return "it waits"


def aborted(adapted: Adapted) -> dict:
    """While they load, with an adapter."""
    served = adapted.served

    def ask(texts, tokens: int = TOKENS) -> list[str]:
        adapted.forget_device()
        return [adapted.ask("first", {"prompt": text}, tokens) for text in TEXTS]

    served.ask = ask
    try:
        return aborted_while_loading(served)
    finally:
        del served.ask


def beside_vllms(adapted: Adapted) -> list:
    """What a connector of vLLM's own is compared by."""
    found = []
    for _ in range(3):
        adapted.forget_device()
        found.append(adapted.round(NAMES))
    return found


SCENARIOS = {
    each.__name__: each
    for each in (
        expected, rounds, pressed, slept, left_asleep, gone_on, left_on_disk, first_round, stats, reloaded, evicted,
        changed_in_between, changed_while_it_waits, changed_under_way, changed_in_its_prompt, in_place, unreadable,
        aborted, beside_vllms,
    )
}  # fmt: skip


def make(model: Path, folder: Path, options: dict) -> Served:
    if not options or "peer" in options:
        engine, peer = ENGINE | LORA, options.get("peer", "none")
        if peer != "none":
            import peers_on_cpu

            engine["kv_transfer_config"] = peers_on_cpu.transfers(peer, 64 << 20)
        return Peer(InProcess(model, folder / peer, **engine), peer)
    torpor = {"offload": "eager", "sync_load_budget_bytes": 0, "advanced": {"policy_timeout_ms": 600_000}} | options
    return Served(InProcess(model, folder / "checkpoints", torpor=torpor, **ENGINE | LORA))


def main() -> None:
    model, folder, options, first, *scenarios = sys.argv[1:]
    adapted = Adapted(make(Path(model), Path(folder), json.loads(options)), Path(model), int(first))
    result = {name: SCENARIOS[name](adapted) for name in scenarios if name != "killed"}
    print("RESULT " + json.dumps(result), flush=True)
    if "killed" in scenarios:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
