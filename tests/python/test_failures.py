# SPDX-License-Identifier: Apache-2.0
"""Bad input and failures on the real engine: a clear error, nothing lost, and tokens as if nothing had been asked."""

import os
import resource
import shutil
import subprocess

import pytest
from inspector import look
from requests_of_tests import run
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from torpor import errors


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"level": 3}, "level is 3"),
        ({"level": -1}, "level is -1"),
        ({"level": 1, "to": "tape"}, "tape"),
        ({"level": 1, "tags": ["wieghts"]}, "wieghts"),
        ({"level": 1, "mode": "explode"}, "explode"),
        ({"level": 1, "on_save_error": "shrug"}, "shrug"),
        ({"level": 1, "timeout": -2.0}, "timeout"),
        ({"level": 1, "progress": 3}, "progress is 3"),
    ],
)
def test_wrong_arguments_are_refused_by_name(one, options, named):
    answers = one.begin(10)
    with pytest.raises(errors.InvalidArgument, match=named) as caught:
        one.llm.sleep(preserve_state=True, **options)
    assert caught.value.next_step and not caught.value.state_changed
    assert not one.llm.is_sleeping()
    assert one.finish(answers) == one.expected


@pytest.mark.parametrize("options", [{"kv": "abort"}, {"weights_changed": True}, {"tags": ["weights"]}])
def test_a_wake_from_a_checkpoint_takes_no_kv_and_no_tags(one, options):
    answers = one.begin(10)
    with pytest.raises(errors.InvalidArgument, match="tags and kv") as caught:
        one.llm.wake_up(from_checkpoint=one.directory, **options)
    assert caught.value.next_step and not caught.value.state_changed
    assert one.finish(answers) == one.expected


def test_a_second_sleep_and_a_wake_while_awake_change_nothing(one):
    answers = one.begin(10)
    woken = one.llm.wake_up()
    assert woken and not woken.changed
    assert one.llm.sleep(level=1, preserve_state=True).changed
    again = one.llm.sleep(level=1, preserve_state=True)
    assert not again.changed and again.note == "already asleep"
    with pytest.raises(errors.WrongState, match=r"kv_cache.*asleep already") as refused:  # no checkpoint would have it
        one.llm.sleep(level=1, preserve_state=True, to="disk")
    assert not refused.value.state_changed and one.llm.is_sleeping()
    with pytest.raises(errors.InvalidArgument, match="wieghts"):
        one.llm.wake_up(tags=["wieghts"])
    one.llm.wake_up()
    assert one.finish(answers) == one.expected


@pytest.mark.parametrize("to", ["host", "disk"])
def test_who_watches_sees_all_that_is_copied_and_may_cancel(one, to):
    def fails(_progress):
        raise ZeroDivisionError

    def checkpoints():
        return sorted(one.directory.glob("g-*"))

    answers = one.begin(10)
    seen, before = [], checkpoints()
    asked = {"level": 1, "preserve_state": True, "to": to, "on_save_error": "discard"}
    for watcher in (lambda progress: False, fails):
        with pytest.raises(errors.Aborted, match="cancelled") as caught:
            one.llm.sleep(**asked, progress=watcher)
        assert not caught.value.state_changed and not one.llm.is_sleeping() and checkpoints() == before
    asleep = one.llm.sleep(**asked, progress=seen.append)
    assert seen[0].phase == "" and seen[0].bytes_total == 0
    assert seen[-1].phase == "detach" and seen[-1].bytes_done == seen[-1].bytes_total == asleep.saved_bytes > 0
    with pytest.raises(errors.Aborted, match="cancelled"):
        one.llm.wake_up(progress=lambda progress: False)
    assert one.llm.is_sleeping()
    woken = one.llm.wake_up(progress=seen.append)
    assert woken and seen[-1].phase == "reconnect" and seen[-1].bytes_done == woken.restored_bytes > 0
    assert one.finish(answers) == one.expected


@pytest.fixture
def elsewhere(one, monkeypatch):
    """Makes the engine's controller write checkpoints to another directory."""

    def use(directory):
        from torpor import _core

        side = one.core.torpor_side
        monkeypatch.setattr(
            side,
            "controller",
            _core.SleepController(side.hooks, {"directory": str(directory), "retain_checkpoints": 2}),
        )

    one.llm.torpor.call("state")
    return use


@pytest.mark.gpu_path
def test_a_full_disk_leaves_the_engine_awake(one, elsewhere, tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "tmpfs", tmp_path]
    if os.geteuid() != 0 or subprocess.run(mount).returncode != 0:
        pytest.skip("needs to mount a small tmpfs")
    try:
        answers = one.begin(10)
        elsewhere(tmp_path)
        with pytest.raises(errors.NotEnoughRoom, match="free") as caught:
            one.llm.sleep(level=1, preserve_state=True, to="disk")
        assert not caught.value.state_changed
        assert [p.name for p in tmp_path.iterdir()] == ["LOCK"]
        assert one.finish(answers) == one.expected
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_disk_that_takes_no_more_in_the_middle_of_a_save_leaves_the_engine_awake(one, elsewhere, tmp_path):
    """There seems to be room, and then a write fails: here by the largest size that this process may give a file."""
    answers = one.begin(10)
    elsewhere(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(errors.Error, match="chunks-r0") as caught:
            one.llm.sleep(level=1, preserve_state=True, to="disk")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not caught.value.state_changed and not one.llm.is_sleeping()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("g-")]
    assert one.llm.sleep(level=1, preserve_state=True, to="disk").checkpoint  # with room it is written
    one.llm.wake_up()
    assert one.finish(answers) == one.expected


def test_a_directory_that_cannot_be_made_leaves_the_engine_awake(one, elsewhere, tmp_path):
    (tmp_path / "file").write_text("in the way")
    answers = one.begin(10)
    elsewhere(tmp_path / "file" / "checkpoints")
    with pytest.raises(errors.Error, match="file"):
        one.llm.sleep(level=1, preserve_state=True, to="disk")
    assert one.finish(answers) == one.expected


def test_on_request_what_cannot_go_to_disk_is_kept_in_host_memory(one, elsewhere, tmp_path):
    (tmp_path / "file").write_text("in the way")
    answers = one.begin(10)
    elsewhere(tmp_path / "file" / "checkpoints")
    report = one.llm.sleep(level=1, preserve_state=True, to="disk", on_save_error="discard")
    assert report.changed and report.preserve_state and report.to == "host" and not report.checkpoint
    assert "host memory" in report.note and "file" in report.note
    one.llm.wake_up()
    assert one.finish(answers) == one.expected


def test_on_request_requests_that_can_be_kept_nowhere_are_dropped(one, elsewhere, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    one.begin(10)
    elsewhere(tmp_path / "file" / "checkpoints")
    side = one.core.torpor_side
    with monkeypatch.context() as broken:
        broken.setattr(side.hooks, "capture", lambda: (_ for _ in ()).throw(RuntimeError("broken on purpose")))
        report = one.llm.sleep(level=1, preserve_state=True, to="disk", on_save_error="discard")
    assert report.changed and not report.preserve_state and report.to == "host"
    assert "discarded" in report.note and "broken on purpose" in report.note
    one.llm.wake_up()
    run(one.engine)  # what a step in flight had made
    assert not one.core.scheduler.requests and not one.engine.has_unfinished_requests()
    assert one.finish(one.begin()) == one.expected


@pytest.fixture
def checkpoint(one, tmp_path):
    """A copy of a good checkpoint, to damage; the engine is awake and has no requests."""
    one.begin(10)
    report = one.llm.sleep(level=1, preserve_state=True, to="disk")
    copy = tmp_path / "store" / "g-000001"
    shutil.copytree(report.checkpoint, copy)
    one.llm.wake_up()
    run(one.engine)
    return copy


def expect_refused(one, path, kind, named):
    with pytest.raises(kind, match=named) as caught:
        one.llm.wake_up(from_checkpoint=path)
    assert caught.value.next_step and not caught.value.state_changed
    assert not one.llm.is_sleeping()
    assert one.finish(one.begin()) == one.expected


def flip(path, at, every=1 << 40):
    """One bit, at `at` and again every so many bytes."""
    content = bytearray(path.read_bytes())
    for place in range(at, len(content), every):
        content[place] ^= 4
    path.write_bytes(content)


def test_a_missing_checkpoint_is_refused(one, checkpoint):
    expect_refused(one, checkpoint / "none", errors.NotFound, "none")


def test_a_truncated_checkpoint_is_refused(one, checkpoint):
    state = (checkpoint / "STATE").read_bytes()
    (checkpoint / "STATE").write_bytes(state[: len(state) // 2])
    expect_refused(one, checkpoint, errors.Damaged, "STATE")


@pytest.mark.parametrize("name", ["MANIFEST", "STATE", "refs-r0", "chunks-r0"])
def test_a_flipped_bit_is_refused(one, checkpoint, name):
    if name == "chunks-r0":
        flip(checkpoint / name, 4096 + 50, every=4096)  # in each page: which chunk lies where differs from run to run
    else:
        flip(checkpoint / name, 100)
    expect_refused(one, checkpoint, errors.Damaged, "MANIFEST|STATE|section|refs-r0|kv_cache|weights")


def test_on_request_a_damaged_checkpoint_is_woken_without_its_state(one, checkpoint):
    flip(checkpoint / "STATE", 100)
    report = one.llm.wake_up(from_checkpoint=checkpoint, on_restore_error="discard")
    assert report and "discarded" in report.note
    assert one.finish(one.begin()) == one.expected


def test_of_several_answers_the_others_end_their_call_without_the_one_that_repair_dropped(one, tmp_path):
    one.begin(0, ["short"])
    run(one.engine)
    both = SamplingParams(
        temperature=1.0, seed=11, n=2, max_tokens=25, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )
    one.engine.add_request("both", "Write a poem:", both)
    run(one.engine, 10)
    report = one.llm.sleep(level=1, preserve_state=True, to="disk")
    checkpoint = tmp_path / "store" / "g-000001"
    shutil.copytree(report.checkpoint, checkpoint)
    one.llm.wake_up()
    _, expected, _ = run(one.engine)["both"]
    child = next(
        request["id"] for request in look("requests", checkpoint)["requests"] if request["id"].startswith("1_both")
    )
    block = next(block for block in look("blocks", checkpoint)["blocks"] if block["requests"] == [child])
    flip(checkpoint / block["saved"][0]["file"], block["saved"][0]["offset"] + 7)
    repaired = look("repair", checkpoint)
    assert [dropped["id"] for dropped in repaired["dropped_requests"]] == [child]
    one.llm.wake_up(from_checkpoint=repaired["repaired"])
    ended, [whole, dropped], _ = run(one.engine)["both"]
    assert ended and whole == expected[0]
    assert dropped[3] == "error" and "repair" in dropped[4]
    assert not [name for name in one.engine.output_processor.parent_requests if name.startswith("both")]


def test_an_engine_with_requests_takes_no_checkpoint(one, checkpoint):
    answers = one.begin(10)
    with pytest.raises(errors.WrongState, match="requests of its own"):
        one.llm.wake_up(from_checkpoint=checkpoint)
    assert one.finish(answers) == one.expected


def tokens_and_text(answer) -> list:
    return [completion[1:5] for completion in answer[1]]


def test_a_request_that_cannot_be_restored_fails_alone(one, checkpoint, monkeypatch):
    from torpor.vllm import scheduler_values

    stock = scheduler_values.request_from_value

    def refuse_one(value, hasher):
        if value["id"].startswith("greedy"):
            raise errors.Incompatible("refused for this test")
        return stock(value, hasher)

    monkeypatch.setattr(scheduler_values, "request_from_value", refuse_one)
    report = one.llm.wake_up(from_checkpoint=checkpoint)
    [failed] = report.failed_requests
    assert failed["id"].startswith("greedy") and "refused for this test" in failed["error"]
    assert one.engine.has_unfinished_requests()
    answers = one.finish({})
    [completion] = answers["greedy"][1]
    assert completion[3] == "error" and "refused for this test" in completion[4]
    assert completion[1] == one.expected["greedy"][1][0][1][: len(completion[1])]  # what it had so far
    # All but those whose draws depend on how many rows the batch has. Its last bits, those of log probabilities, may.
    for name in ("seeded", "prefix-a", "stops", "long", "penalties"):
        assert tokens_and_text(answers[name]) == tokens_and_text(one.expected[name])


def test_a_restore_that_fails_after_one_that_did_not_leaves_the_label_of_the_weights(one, checkpoint, monkeypatch):
    version, hooks = one.engine.get_weight_version(), one.core.torpor_side.hooks
    stock = hooks._rpc

    def fails(method, *args):
        if method == "torpor_restore":
            raise RuntimeError("broken on purpose")
        return stock(method, *args)

    try:
        one.llm.wake_up(from_checkpoint=checkpoint)
        run(one.engine)
        one.engine.set_weight_version("17")
        monkeypatch.setattr(hooks, "_rpc", fails)
        with pytest.raises(errors.Error, match="broken on purpose"):
            one.llm.wake_up(from_checkpoint=checkpoint)
        monkeypatch.undo()
        assert one.engine.get_weight_version() == "17" and not one.llm.is_sleeping()
    finally:
        one.engine.set_weight_version(version)
    assert one.finish(one.begin()) == one.expected


@pytest.mark.gpu_path
def test_a_hook_that_fails_in_the_middle_of_a_sleep_is_undone(one, monkeypatch):
    answers = one.begin(10)
    side = one.core.torpor_side
    monkeypatch.setattr(side.hooks, "release_derived", lambda: (_ for _ in ()).throw(RuntimeError("broken on purpose")))
    with pytest.raises(errors.Error, match="broken on purpose"):
        one.llm.sleep(level=1, preserve_state=True, to="disk")
    monkeypatch.undo()
    assert one.finish(answers) == one.expected
