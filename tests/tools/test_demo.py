# SPDX-License-Identifier: Apache-2.0
"""The demo is the acceptance test of the main job: a real model, a killed process, the very next token."""

import json
from pathlib import Path

import pytest
from conftest import demo


def check(result: dict, requests: int) -> None:
    assert result["requests"] == result["identical"] == requests
    assert result["recomputed_tokens"] == 0
    assert result["tokens"] > result["tokens_before_sleep"] > 0
    # Asleep, no page of weights and KV is resident, and the process is smaller by at least 90 % of what they held (the
    # host copy of a sleep to host aside); a process's own size moves by some MB, so only where they are much more.
    held = result["resident_weights_and_kv_bytes"]
    assert held > 0 and result["asleep_weights_and_kv_bytes"] == 0
    if held >= 64 * 2**20:
        kept = result["saved_bytes"] if result["to"] == "host" else 0
        assert result["rss_awake_bytes"] - result["rss_asleep_bytes"] >= 0.9 * held - kept
    for name in (
        "sleep_chunks",
        "wake_chunks",
    ):  # everything went through the offload core, and nothing else became of it
        assert set(result[name]) == {"transferred"} and result[name]["transferred"] > 0
    for name in ("sleep_seconds", "wake_seconds", "rss_woken_bytes", "tokens_per_second"):
        assert result[name] > 0


def test_to_disk_with_a_killed_process(shown):
    check(shown, 8)
    # Chunk files have a page of header, and chunks begin on pages: little, and nothing else.
    extra = shown["checkpoint_bytes"] - sum(shown["checkpoint_parts"].values())
    assert 0 <= extra < 0.02 * shown["checkpoint_bytes"]


def test_to_host_with_prompts_of_the_user(tmp_path, tiny):
    (tmp_path / "prompts").write_text("Say hello in French.\n\nÜber die Brücke ging 東京 \U0001f600?\nOne word:\n")
    done = demo(
        "--json",
        "--to",
        "host",
        "--level",
        2,
        "--prompts",
        tmp_path / "prompts",
        "--freeze-after",
        5,
        "--max-tokens",
        24,
        "--seed",
        3,
        model=tiny,
        forked=1,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    check(result, 3)
    assert result["checkpoint"] is None


@pytest.mark.long
def test_with_events_it_leaves_a_recording_and_pictures(tmp_path, tiny):
    done = demo("--json", "--console", "--dir", tmp_path, "--max-tokens", 24, "--freeze-after", 8, model=tiny)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["identical"] == result["requests"] == 8
    console = result["console"]
    assert console["lost_events"] == 0 and console["events"] > 500
    pictures = {Path(path).stem: Path(path).read_text() for path in console["pictures"]}
    assert "decoding" in pictures["slots"] and "host" in pictures["tiers"]
    assert "sleep" in pictures["operations"] and "wake" in pictures["operations"]
    assert "hit" in pictures["request"] and len(list(Path(console["recording"]).iterdir())) == 2
    assert "</html>" in Path(console["page"]).read_text()


@pytest.mark.long  # beside the one below
def test_on_the_gpu_path_with_a_step_in_flight(tmp_path):
    done = demo("--json", "--gpu-path", "--dir", tmp_path, "--max-tokens", 48, "--freeze-after", 20)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    check(result, 8)
    in_force = {"runner": "V2", "scheduler": "AsyncScheduler", "async_scheduling": True, "batches_in_flight": 1}
    assert {name: result[name] for name in in_force} == in_force


@pytest.mark.parametrize("model", ["tiny", pytest.param("real_model", marks=pytest.mark.long)])
@pytest.mark.parametrize("where", [[], pytest.param(["--gpu-path"], marks=pytest.mark.long)])
def test_one_request_of_each_kind(tmp_path, where, model, request):
    words = ["--json", "--features", *where, "--dir", tmp_path, "--max-tokens", 32, "--freeze-after", 12]
    done = demo(*words, model=request.getfixturevalue(model), forked=2)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    check(result, 5 if where else 7)
    assert result["batches_in_flight"] == (1 if where else 0)
    assert {"JSON schema", "regular expression", "choice"} <= set(result["sampling"])


@pytest.mark.long  # tests/python/test_server_restarts.py has each part
@pytest.mark.parametrize("model", ["tiny", "real_model"])
def test_a_drained_server_and_its_clients(tmp_path, model, request):
    (tmp_path / "prompts").write_text("Say hello in French.\nTell me a story.\nWhat is a bridge?\nHow is bread made?\n")
    tokens = 1200 if model == "tiny" else 200  # so many that none ends before the server does
    words = ["--json", "--server", "--prompts", tmp_path / "prompts", "--max-tokens", tokens]
    # The server that sleeps is forked; the one that wakes is a new interpreter.
    done = demo(*words, model=request.getfixturevalue(model), forked=1)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["requests"] == result["identical"] == result["complete"] == 4
    assert result["interrupted"] == result["taken_up"] > 0 and result["exit_code"] == 0
    assert 0 < result["wake_seconds"] < result["start_seconds"] and result["checkpoint_bytes"] > 0


@pytest.mark.long  # three engines; tests/python/test_connector*.py have each part
def test_a_conversation_that_was_evicted_returns_and_so_it_does_to_a_new_process(tmp_path):
    done = demo("--json", "--offload", "--conversation", 300, "--max-tokens", 8, "--dir", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["requests"] == result["identical"] == 3
    whole = result["prompt_tokens"] // 32 * 32
    assert result["evicted"]["torpor"]["cached_tokens"] >= whole - 32  # what the last answer's end filled is not stored
    assert result["restarted"]["torpor"]["cached_tokens"] == whole
    for case in ("evicted", "restarted"):
        assert result[case]["alone"]["cached_tokens"] == 0
        assert all(
            side["first_token_seconds"] > 0 for side in result[case].values()
        )  # so short a prompt is soon computed


@pytest.mark.parametrize("model", ["tiny", pytest.param("real_model", marks=pytest.mark.long)])
def test_a_chat_leaves_its_engine_comes_back_and_moves_to_another_one(tmp_path, model, request):
    words = ["--json", "--sessions", "--dir", tmp_path, "--max-tokens", 48, "--freeze-after", 10]
    done = demo(*words, model=request.getfixturevalue(model), forked=2)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["requests"] == result["identical"] == 8
    assert result["hibernated"] == result["moved"] == 1 and result["hibernated_tokens"] >= 9
    assert result["hibernated_bytes"] > 0 and result["moved_bytes"] > 0
    assert result["forks"] == result["forks_identical"] == 4 and result["fork_bytes"] > 0
    assert result["chats_beside_the_moved"] == 4 and not result["moved_image_left"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--sessions", "--server"], "--sessions"),
        (["--sessions", "--max-tokens", "40"], "--max-tokens 40"),
        (["--freeze-after", "0"], "freeze-after"),
        (["--to", "tape"], "tape"),
        (["--level", "7"], "level"),
        (["--gpu-path", "--server"], "--gpu-path"),
        (["--features", "--server"], "--features"),
        (["--offload", "--server"], "--offload"),
        (["--offload", "--conversation", "9"], "use 200 to 1500"),
        (["--conversation", "1000"], "--conversation is for --offload"),
        (["--kills", "1"], "--kills is for --standby"),
        (["--sessions", "--drain-at", "0.4"], "--drain-at is for --server or --standby"),
        (["--prompts", "/nowhere/prompts"], "/nowhere/prompts"),
        (["--prompts", "/dev/null"], "no prompt"),
        (["--dir", "/dev/null/x"], "/dev/null/x"),
    ],
)
def test_bad_input_is_named_and_ends_with_2(arguments, named):
    done = demo("--json", *arguments, forked=0 if "--gpu-path" in arguments else 1)
    assert done.returncode == 2
    assert named in done.stderr
    assert done.stdout == ""


def test_a_take_over_is_timed_to_the_first_token_that_the_standby_gave():
    from serving import Reading, ServerEnded
    from standby_demo import waits_of

    killed = 2.0
    went_on = Reading(
        "a", times=[1.0, killed + 0.1, killed + 3.0], pieces_before=[2]
    )  # the second had been sent before
    whole = Reading("b", times=[1.0, killed + 0.1])
    assert waits_of([went_on, whole], killed) == [3.0]
    with pytest.raises(ServerEnded, match="--drain-at"):
        waits_of([whole], killed)
