# SPDX-License-Identifier: Apache-2.0
"""The flow of blocks as a user shapes and watches it: a policy of their own, loads that are held and cancelled, hooks,
and recordings that replay. The engine is real, and its tokens are the same throughout.
"""

import copy
import gc
import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import result_of
from inspector import BINARY
from vllm import SamplingParams
from vllm.v1.request import Request, RequestStatus
from zygote import MOST_SECONDS

from torpor import _core
from torpor.errors import InvalidArgument, NotFound, Unsupported
from torpor.vllm import call_hooks, recorded_inputs, replay
from torpor.vllm.connector_options import ConnectorOptions
from torpor.vllm.policy import Policy
from torpor.vllm.values import sampling_to_value

PROCESS = Path(__file__).parent / "flow_process.py"


@pytest.fixture(scope="module")
def flow(zygote, tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("flow")
    return result_of(zygote.run([PROCESS, tiny_model, folder, folder / "recording"])) | {"folder": folder}


def tokens(stored: dict) -> list:
    return [answer for answer, _ in stored["answers"]]


@pytest.mark.slow
def test_a_policy_of_a_users_own_says_what_is_stored(flow):
    result = flow["policy"]
    nothing, some = result["nothing stored"], result["stored"]
    assert nothing["offload_transferred"] == 0 and nothing["offload_filtered"] >= 2
    assert some["offload_transferred"] >= 2 and some["offload_filtered"] == 0
    asked = [each for each in result["asked"] if each[0] == "store"]
    assert asked and all(request.startswith(("1-", "2-")) for _, request, *_ in asked[:2])
    assert {size for _, _, _, sizes, _ in result["asked"] for size in sizes} <= {8, 16, 32}
    assert all(groups == [0] * size for _, _, size, _, groups in result["asked"])


@pytest.mark.slow
def test_a_policy_of_a_users_own_says_what_of_a_hit_is_loaded(flow):
    result = flow["policy"]
    none, first, whole = (result[f"load {mode}"] for mode in ("none", "first", "keep"))
    assert none["onboard_transferred"] == 0 and [cached for _, cached in none["answers"]] == [0, 0]
    assert [cached for _, cached in first["answers"]] == [result["block"]] * 2
    assert whole["onboard_transferred"] > first["onboard_transferred"] == 2
    assert tokens(none) == tokens(first) == tokens(whole) == tokens(result["stored"])
    counts = result["counts"]
    assert counts["answered"] == len(result["asked"]) and sum(counts.values()) == counts["answered"]


@pytest.mark.slow
def test_a_policy_that_gives_no_answer_is_counted_said_once_and_bypassed(flow):
    result, counts = flow["bypassed"], flow["bypassed"]["counts"]
    for mode in ("wrong", "raise", "late"):
        assert result[mode]["offload_transferred"] >= 2 and result[mode]["offload_filtered"] == 0, mode
    assert counts["wrong"] >= 2 and counts["raised"] >= 2 and counts["late"] == 1 and counts["busy"] >= 1
    assert result["released"]["offload_transferred"] == 0  # it is asked again
    said = result["lines"]
    assert len(said) == 4 and all("flow_own:Own is bypassed" in line for line in said)
    assert "answered 1 for a key, not True or False" in said[0] and "RuntimeError: no answer today" in said[1]
    assert "took more than 0.01 s" in said[2] and "has not returned" in said[3]


@pytest.mark.slow
def test_a_load_can_be_held_waited_for_and_cancelled(flow):
    result = flow["loads"]
    [[expected, _]] = result["expected"]
    assert all("onboarding" in states for states in result["states"])
    assert "is queued after 0 s" in result["not yet"]
    [waited], [loaded] = result["waited"], result["loaded"]
    assert waited["done"] and waited["state"] == "completed" and waited["way"] == "onboard"
    assert waited["ended_blocks"] == {"transferred": waited["blocks"]}
    assert loaded[0] == expected and loaded[1] > 0
    cancelled, end, [computed] = result["cancelled"], result["end"], result["computed"]
    assert cancelled == {"blocks": waited["blocks"], "committed": False}
    assert end["ended_blocks"] == {"cancelled": cancelled["blocks"]} and end["done"]
    assert computed[0] == expected
    assert result["again"] == [loaded]  # the blocks are still there
    assert all(over["in_time"] and over["stops"] == [] for over in result["over"])
    assert [answer for over in result["over"] for answer, _ in over["answers"]] == [expected] * 3


@pytest.mark.slow
def test_block_events_tell_each_state_of_blocks_in_host_memory(flow):
    published = [tuple(each) for each in flow["recorded"]["blocks"]]
    assert published == [("empty", "in flight", 1), ("in flight", "registered", 1)]


@pytest.mark.slow
def test_hooks_stand_around_what_the_engine_does_and_keep_a_request_from_being_admitted(flow):
    result = flow["hooks"]
    assert result["tokens"] == result["raised"] == result["expected"] and result["first"]
    calls = result["calls"]
    points = {point for _, point, *_ in calls}
    assert points == {"step", "admit", "match", "allocate", "report", "finish", "transfer"}
    asked = [request for when, point, request, *_ in calls if point == "admit"]
    held = min(set(asked))
    assert asked.count(held) > asked.count(max(set(asked)))  # again in each step
    depth = 0
    for when, point, *_ in (call for call in calls if call[1] == "step"):
        depth += 1 if when == "will" else -1
        assert depth in (0, 1), point
    assert depth == 0
    assert result["slept"] and result["operations"] == [
        ["will", "sleep", None], ["finished", "sleep", None, None],
        ["will", "wake_up", None], ["finished", "wake_up", None, None],
    ]  # fmt: skip


@pytest.mark.slow
def test_a_recording_of_vllm_replays_token_by_token(flow, zygote):
    [warned] = flow["warned"]
    assert "prompts and answers of all requests" in warned
    rings = flow["folder"] / "rings of the replay"  # it has none of torpor's options, whatever is exported
    environment = os.environ | {
        "TORPOR_BINARY": str(BINARY),
        "TORPOR_RECORD_INPUTS": "1",
        "TORPOR_EVENTS_DIR": str(rings),
    }
    done = zygote.run([Path(replay.__file__), flow["folder"] / "recording", "--json"], env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["equal"] and result["requests"] == 6
    assert 8 + 9 + 10 + 11 + 12 <= result["tokens"] < 8 + 9 + 10 + 11 + 12 + 13  # one was aborted
    assert result["skipped"] == {} and not rings.exists()


class Echo:
    """An engine that answers as it is told to, a token a step; strict as vLLM's about ids."""

    def __init__(self, answers: dict[str, list[int]]):
        self.answers, self.running, self.prompts = answers, {}, {}

    def add_request(self, name, prompt, params, priority=0):
        assert name not in self.prompts and not params.stop
        if name not in self.answers:
            raise ValueError("more log probabilities than max_logprobs")
        self.prompts[name], self.running[name] = prompt["prompt_token_ids"], list(self.answers[name])

    def abort_request(self, names):
        for name in names:
            self.running.pop(name, None)

    def has_unfinished_requests(self):
        return bool(self.running)

    def step(self):
        outputs = []
        for name, left in list(self.running.items()):
            token = [left.pop(0)] if left else []
            outputs.append(type("Output", (), {"request_id": name, "outputs": [type("One", (), {"token_ids": token})]}))
            if not left:
                del self.running[name]
        return outputs


def events(*inputs: tuple[str, dict]) -> list[str]:
    lines = []
    for number, (kind, words) in enumerate(inputs):
        lines.append(json.dumps({"type": "input", "from": kind, "sequence": number}))
        lines.append(json.dumps({"type": "given", "input": number, "words": json.dumps(words)}))
    return lines


def of_process(pid: int, *inputs: tuple[str, dict]) -> list[str]:
    return [json.dumps(json.loads(line) | {"process": "core0", "pid": pid}) for line in events(*inputs)]


def asked(name: str, step: int, prompt: list[int], **more) -> list[tuple[str, dict]]:
    sampling = sampling_to_value(SamplingParams(temperature=0, max_tokens=4))
    words = {"id": name, "step": step, "priority": 0, "salt": None, "sampling": sampling, "tokens": len(prompt)}
    return [("vllm request", words | more), ("vllm tokens", {"id": name, "first": 0, "tokens": prompt})]


def answered(name: str, tokens: list[int]) -> list[tuple[str, dict]]:
    return [
        ("vllm answer", {"id": name, "status": "FINISHED_LENGTH_CAPPED", "tokens": len(tokens)}),
        ("vllm tokens", {"id": name, "first": 0, "tokens": tokens}),
    ]


class Odd:
    """What a hook may return, as an array."""

    def __eq__(self, other):
        raise ValueError("ambiguous")

    __hash__ = None


ENGINE = ("vllm engine", {"model": "m"})


def test_a_replay_says_where_an_answer_differs():
    lines = events(
        ENGINE, *asked("a", 3, [1, 2]), *asked("b", 4, [5]), *answered("b", [6, 7, 8, 9]), *answered("a", [3, 4, 5, 6])
    )
    recorded = replay.read(lines)
    engine = Echo({"a": [3, 4, 5, 6], "b": [6, 7, 0, 9]})
    result = replay.replay(recorded, engine)
    assert engine.prompts == {"a": [1, 2], "b": [5]}
    assert not result["equal"] and result["requests"] == 2 and result["tokens"] == 8
    assert result["differing"] == [{"id": "b", "at": 2, "recorded": [8, 9], "replayed": [0, 9]}]
    assert "b differs from token 2 on" in replay.shown(result)
    assert replay.replay(recorded, Echo({"a": [3, 4, 5, 6], "b": [6, 7, 8, 9]}))["equal"]
    assert not replay.replay(recorded, Echo({"a": [3, 4, 5], "b": [6, 7, 8, 9]}))["equal"]  # one is shorter


def test_a_replay_aborts_what_was_aborted_and_names_what_it_leaves_out():
    lines = events(
        ENGINE, *asked("a", 0, [1]), *asked("image", 0, [2], not_replayable="images or embeddings in its prompt"),
        ("vllm abort", {"id": "a", "step": 2}), *answered("a", [3, 4, 5]),
        *asked("cut", 1, [1, 2, 3], tokens=4), ("vllm tokens", {"id": "older", "first": 0, "tokens": [1]}),
    )  # fmt: skip
    recorded = replay.read(lines)
    result = replay.replay(recorded, Echo({"a": [3, 4, 5, 6]}))
    assert result["equal"] and result["tokens"] == 2  # as far as both came
    assert result["skipped"] == {
        "image": "images or embeddings in its prompt", "cut": "a part of its prompt is missing"
    }  # fmt: skip


def test_inputs_of_other_processes_beside_those_of_an_engine_are_passed_over():
    one = of_process(1, ENGINE, *asked("a", 0, [1, 2]), *answered("a", [3]))
    other = of_process(2, *[("console", {"id": "a"})] * (len(one) // 2))
    recorded = replay.read([line for pair in zip(one, other, strict=True) for line in pair])
    assert [(each.prompt, each.tokens) for each in recorded.requests] == [([1, 2], [3])]


def test_of_an_answer_with_a_gap_a_replay_compares_what_comes_before():
    whole = list(range(600))
    [(kind, words), (_, tokens)] = answered("a", whole)
    lines = events(
        ENGINE, *asked("a", 0, [1]), (kind, words), ("vllm tokens", tokens | {"tokens": whole[:200]}),
        ("vllm tokens", tokens | {"first": 400, "tokens": whole[400:]}),
    )  # fmt: skip
    result = replay.replay(replay.read(lines), Echo({"a": whole}))
    assert result["equal"] and result["tokens"] == 200 and result["cut"] == {"a": 200}
    assert "a: a part of its answer is missing, compared are its first 200 tokens" in replay.shown(result)
    assert not replay.replay(replay.read(lines), Echo({"a": whole[100:]}))["equal"]


def test_a_replay_names_a_request_that_vllm_refuses_and_leaves_stop_strings_to_the_recorded_abort():
    sampling = sampling_to_value(SamplingParams(temperature=0, max_tokens=4, stop=["e"]))
    lines = events(ENGINE, *asked("a", 0, [1], sampling=sampling), *asked("b", 0, [2]), *answered("a", [3, 4]))
    result = replay.replay(replay.read(lines), Echo({"a": [3, 4]}))
    assert result["equal"] and result["requests"] == 1
    assert result["skipped"] == {"b": "vLLM refuses it: more log probabilities than max_logprobs"}


def test_an_engine_that_vllm_does_not_start_is_no_traceback(monkeypatch):
    def llm(**options):
        raise RuntimeError(f"no memory for {options['model']}")

    monkeypatch.setattr("vllm.LLM", llm)
    monkeypatch.setenv("TORPOR_RECORD_INPUTS", "1")
    with pytest.raises(Unsupported, match="does not start an engine as it was recorded: no memory for other"):
        replay._engine({"model": "m"}, "other")
    assert "TORPOR_RECORD_INPUTS" not in os.environ


def test_a_recording_has_the_options_that_change_tokens_and_names_those_that_are_code(one):
    config = copy.copy(one.core.vllm_config)
    options = recorded_inputs.engine_options(config)
    assert options["structured_outputs_config"]["backend"] == "auto" and options["pipeline_parallel_size"] == 1
    assert "speculative_config" not in options and "not_given" not in options
    config.model_config, config.speculative_config = copy.copy(config.model_config), Speculation("ngram", "ngram", 3)
    config.model_config.hf_overrides = {"rope_theta": 5.0}
    options = recorded_inputs.engine_options(config)
    assert options["speculative_config"] == {"method": "ngram", "model": "ngram", "num_speculative_tokens": 3}
    assert options["hf_overrides"] == {"rope_theta": 5.0}
    assert replay.read(events(("vllm engine", options))).engine == options
    config.model_config.hf_overrides = lambda config: config
    config.model_config.logits_processors = ["my.module:Processor"]
    config.speculative_config = Speculation("custom_class", "my.module.Proposer", 3)
    options = recorded_inputs.engine_options(config)
    assert options["not_given"] == ["logits_processors", "hf_overrides", "speculative_config"]
    with pytest.raises(InvalidArgument, match="had logits_processors, hf_overrides, speculative_config"):
        replay.read(events(("vllm engine", options)))


@dataclass
class Speculation:
    method: str
    model: str
    num_speculative_tokens: int


class Recorded:
    """A scheduler's inputs, and what was written of them."""

    def __init__(self, monkeypatch):
        self.lines: list[str] = []
        self.requests: dict = {}
        self.vllm_config = None
        monkeypatch.setattr(recorded_inputs, "engine_options", lambda config: {"model": "m"})
        monkeypatch.setattr(_core, "record_input", self.write)
        self.inputs = recorded_inputs.RecordedInputs(self)

    def write(self, kind: str, words: str) -> None:
        assert len(words) <= 8192
        self.lines += events((kind, json.loads(words)))

    def read(self) -> replay.Recorded:
        numbered = [json.loads(line) for line in self.lines]
        for at in range(0, len(numbered), 2):
            numbered[at]["sequence"] = numbered[at + 1]["input"] = at
        return replay.read(map(json.dumps, numbered))

    def add(self, name: str, output: list[int], **more) -> Request:
        request = Request(name, [1, 2, 3], SamplingParams(max_tokens=9), None, **more)
        request.append_output_token_ids(output)
        known = self.requests.setdefault(name, request)
        self.inputs.add(request, 0)
        return known

    def end(self, request: Request) -> None:
        request.status = RequestStatus.FINISHED_STOPPED
        del self.requests[request.request_id]
        self.inputs.look()


def test_inputs_of_requests_with_long_names_are_recorded(monkeypatch):
    recorded = Recorded(monkeypatch)
    names = ["n" * 20_000 + end for end in "ab"]  # as a client may name them
    for name in names:
        recorded.add(name, [])
    for request in list(recorded.requests.values()):
        request.append_output_token_ids([4, 5])
        recorded.end(request)
    found = recorded.read().requests
    assert len({each.id for each in found}) == 2 and all(each.prompt == [1, 2, 3] for each in found)
    assert all(each.tokens == [4, 5] and each.not_replayable is None for each in found)


def test_inputs_that_are_no_beginning_of_a_request_are_named_and_none_is_kept(monkeypatch):
    recorded = Recorded(monkeypatch)
    piecewise = recorded.add("pieces", [], resumable=True)
    recorded.add("pieces", [], resumable=True)
    left = recorded.add("left", [])
    del recorded.requests["left"]  # a wake brought others
    recorded.inputs.look()
    child = recorded.add("child", [7])
    ended = recorded.add("ended", [])
    recorded.end(ended)
    back = recorded.add("ended", [8])  # from an image
    for request in (piecewise, child, back):
        recorded.end(request)
    assert recorded.inputs._live == {} and not left.is_finished()
    found = {each.id: each.not_replayable for each in recorded.read().requests}
    assert found == {
        "pieces": "its prompt that comes in pieces", "left": None, "ended": None,
        "child": "the tokens of its answer that it came with",
    }  # fmt: skip
    assert [each.tokens for each in recorded.read().requests if each.id == "ended"] == [[8]]


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        (events(("engine", {})), "has no inputs of vLLM"),
        (events(ENGINE, ("vllm engine", {"model": "other"})), "several engines"),
        (events(ENGINE, *asked("a", 0, [1]), ENGINE, *asked("a", 0, [2])), "several engines"),
        ([*of_process(1, ENGINE, *asked("a", 0, [1])), *of_process(2, ENGINE)], "several engines"),
        ([*of_process(1, ENGINE), *of_process(2, *asked("a", 0, [1]))], "several engines"),  # whose beginning is gone
        (events(("vllm engine", {"model": "m", "trust_remote_code": True})), "torpor did not write.*trust_remote_code"),
        (
            events(("vllm engine", {"model": "m", "speculative_config": {"method": "custom_class", "model": "a.b"}})),
            "torpor did not write.*custom_class",
        ),
        (
            events(("vllm engine", {"structured_outputs_config": {"reasoning_parser_plugin": "a.py"}})),
            "torpor did not write.*reasoning_parser_plugin",
        ),
        (events(ENGINE, ("vllm request", {"id": "a", "step": 1, "tokens": 0})), "torpor did not write.*priority"),
        (events(ENGINE, *asked("a", 0, [1]), ("vllm tokens", {"id": "a"})), "torpor did not write.*first"),
    ],
)
def test_a_recording_that_cannot_replay_says_why(lines, what):
    with pytest.raises(InvalidArgument, match=what):
        replay.read(lines)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("flow_own", "policy is 'flow_own'"),
        ("flow_own:Own()", "policy is"),
        ("no_such_module:Own", "No module named 'no_such_module'"),
        ("flow_own:Other", "has no attribute 'Other'"),
        ("flow_own:Broken", "OSError: no table of chats"),
        ("flow_own:Neither", "has no method store or load"),
    ],
)
def test_a_policy_that_cannot_be_made_ends_the_start_by_name(name, what):
    with pytest.raises(InvalidArgument, match=what.replace("(", r"\(").replace(")", r"\)")):
        ConnectorOptions.of({"host_bytes": 1 << 20, "policy": name})
        Policy(name, 1)


def test_the_thread_of_a_policy_ends_with_it():
    def threads() -> set:
        return {each for each in threading.enumerate() if each.name == "torpor-policy"}

    before = threads()
    policy = Policy("flow_own:Own", MOST_SECONDS)
    assert policy.ask(0, "a", [b"key"], [0]) == b"\1"
    [mine] = threads() - before
    del policy
    gc.collect()
    mine.join(MOST_SECONDS)
    assert not mine.is_alive()


@pytest.mark.parametrize(("answer", "admitted"), [(False, False), (None, True), (0, True), (Odd(), True)])
def test_only_false_keeps_a_request_from_being_admitted(answer, admitted):
    class Fixed:
        def will_call(self, call):
            return answer

    hooks = Fixed()
    call_hooks.register(hooks)
    try:
        assert call_hooks.admits("any") is admitted
    finally:
        call_hooks.unregister(hooks)


def test_hooks_have_one_of_the_two_methods():
    with pytest.raises(InvalidArgument, match="has no will_call or finished_call"):
        call_hooks.register(object())
    seen = []

    class Last:
        def finished_call(self, call, error):
            seen.append((call.point, error))

    hooks = Last()
    call_hooks.register(hooks)
    try:
        with pytest.raises(NotFound):
            call_hooks.around("step", None, raises_not_found)
        assert call_hooks.around("step", None, lambda: 7) == 7 and call_hooks.admits("any")
    finally:
        call_hooks.unregister(hooks)
    call_hooks.unregister(hooks)
    assert [(point, type(error)) for point, error in seen] == [("step", NotFound), ("step", type(None))]
    assert call_hooks.around("step", None, lambda: 8) == 8 and len(seen) == 2


def raises_not_found():
    raise NotFound("it", "look")


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ((1, 2), "JSON has no tuples"),
        ({1: 2}, "keys are str"),
        (float("nan"), "not JSON compliant"),
        (b"x", "bytes is not JSON serializable"),
        ("\ud800", "not UTF-8"),
        ([[[[[[[[[1]]]]]]]]], "more than 8 levels"),
        (["x" * 600], "has 604 bytes"),
        ({"." + "é" * 60}, "is not JSON serializable"),  # the error has the beginning of it
    ],
)
def test_metadata_that_is_no_json_is_refused_by_name(value, why):
    with pytest.raises(InvalidArgument, match=why) as refused:
        _core.check_metadata({"run": value}, True)
    assert "run" in str(refused.value)
