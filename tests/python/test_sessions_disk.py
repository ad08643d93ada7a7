# SPDX-License-Identifier: Apache-2.0
"""Hibernated requests on disk: they come back as those in host memory do, to one engine of those that may have them."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from inspector import look
from conftest import long_on_gpu_path
from requests_of_tests import run
from test_sessions import (  # noqa: F401  the fixtures are used by name
    idle,
    interrupted,
    nothing_is_left,
    one,
    same,
    scramble,
    tokens_of,
    unfinished,
)

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreEventType
from vllm.v1.request import RequestStatus

from torpor import _core, errors
from torpor.vllm import session_calls, sessions

pytestmark = [pytest.mark.gpu_path, pytest.mark.cpu]

NAMES = ["greedy", "two", "stops", "schema", "long-seeded"]


def images_in(one) -> list[str]:  # noqa: F811
    place = one.directory / "images"
    return sorted(os.listdir(place)) if place.exists() else []


def used(one) -> int:  # noqa: F811
    """Bytes of host memory of images."""
    [ledger] = one.llm.torpor.ledger()
    return ledger.arena_used_bytes - sum(tag.backup_host_bytes for tag in ledger.tags.values())


def other_engine() -> _core.RequestImages:
    """What another engine has for the images of others."""
    return _core.RequestImages(None)


@pytest.mark.core
@pytest.mark.parametrize("steps", [1, 9])
def test_all_requests_go_to_disk_and_come_back(one, steps):  # noqa: F811
    expected = one.expected
    answers = one.begin(steps)
    left = one.llm.torpor.hibernate(unfinished(one), to="disk")
    answers |= run(one.engine)
    assert Path(left.path) == one.directory / "images" / left.id and images_in(one) == [left.id]
    assert used(one) == 0 and left.bytes > 0 and not one.core.scheduler.requests
    assert one.llm.torpor.hibernated() == [left]
    scramble(one)
    resumed = one.llm.torpor.resume(left.id)
    assert resumed.requests == left.requests and not resumed.recomputed
    assert images_in(one) == [] and used(one) > 0
    same(one.finish(answers), expected)
    idle(one)


def test_some_go_while_the_others_run_and_come_back_by_the_path(one):  # noqa: F811
    expected = one.expected
    answers = one.begin(6)
    left = one.llm.torpor.hibernate(NAMES, "by-path", to="disk")
    answers |= run(one.engine)
    assert set(unfinished(one)) == set(NAMES)
    scramble(one)
    assert one.llm.torpor.resume(Path(left.path)).id == "by-path"
    same(one.finish(answers), expected)
    idle(one)


def test_an_image_in_host_memory_goes_to_disk_later(one):  # noqa: F811
    expected = one.expected
    answers = one.begin(5, ["greedy", "seeded"])
    left = one.llm.torpor.hibernate("greedy", "mine")
    assert left.path == "" and used(one) > 0
    stored = one.llm.torpor.hibernate("greedy", "mine", to="disk")
    assert stored.path.endswith("/images/mine") and used(one) == 0
    assert one.llm.torpor.hibernate("greedy", "mine", to="disk") == stored
    assert one.llm.torpor.hibernate("greedy", "mine") == stored
    one.llm.torpor.resume("mine")
    same(one.finish(answers), {name: expected[name] for name in ("greedy", "seeded")})
    idle(one)


def test_a_sleep_keeps_what_is_on_disk(one):  # noqa: F811
    expected = one.expected
    answers = one.begin(6)
    left = one.llm.torpor.hibernate(NAMES, to="disk")
    one.llm.sleep(level=1, preserve_state=True)
    with pytest.raises(errors.WrongState, match="asleep"):
        one.llm.torpor.resume(left.id)
    answers |= run(one.engine, 1)
    assert one.llm.wake_up()
    one.llm.torpor.resume(left.id)
    same(one.finish(answers), expected)
    idle(one)


@long_on_gpu_path
def test_kv_of_other_weights_is_computed_again(one):  # noqa: F811
    expected = one.expected
    answers = one.begin(6)
    left = one.llm.torpor.hibernate(unfinished(one), "old", to="disk")
    answers |= run(one.engine)
    one.llm.reset_prefix_cache()
    assert one.llm.torpor.resume(left.id).recomputed
    same(one.finish(answers), expected)
    answers = one.begin(6)
    one.llm.torpor.hibernate(unfinished(one), "old")
    one.llm.reset_prefix_cache()
    with pytest.raises(errors.NotFound):  # they are away; the image itself cannot be named by them any more
        one.llm.torpor.hibernate(["nobody"], "old", to="disk")
    with pytest.raises(errors.WrongState, match="the weights have changed since the image old was made"):
        one.core.torpor_side.store_image({"image": "old", "outputs": {}})
    one.llm.torpor.resume("old")
    same(one.finish(answers), expected)
    idle(one)


def test_a_call_may_be_repeated_by_the_path_and_an_id_may_have_any_character(one):  # noqa: F811
    expected = one.expected
    answers = one.begin(5, ["greedy", "seeded"])
    one.llm.torpor.hibernate("seeded", "a/b")
    left = one.llm.torpor.hibernate("greedy", to="disk")
    assert one.llm.torpor.resume("a/b").requests == ("seeded",)
    first = one.llm.torpor.resume(left.path)
    assert one.llm.torpor.resume(left.path) == one.llm.torpor.resume(left.id) == first
    same(one.finish(answers), {name: expected[name] for name in ("greedy", "seeded")})
    idle(one)


def test_a_fork_meanwhile_does_not_keep_an_image_from_the_disk(one, monkeypatch):  # noqa: F811
    expected = one.expected
    answers = one.begin(4, ["greedy", "seeded"])
    stock, parent = session_calls._stored, one.engine.output_processor.external_req_ids["seeded"][0]
    fork = {"request": parent, "name": "seeded", "children": ["c"], "at": None, "seeds": [None], "action": "x"}

    async def stored(side, *arguments):
        one.llm.torpor.call("fork", fork | {"call": "other", "timeout": None})
        return await stock(side, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(session_calls, "_stored", stored)
        left = one.llm.torpor.hibernate("greedy", to="disk")
    assert images_in(one) == [left.id]
    one.llm.torpor.call("end_fork", {"call": "other", "keep": False})
    one.llm.torpor.resume(left.id)
    same(one.finish(answers), {name: expected[name] for name in ("greedy", "seeded")})
    idle(one)


def test_who_cancels_a_call_ends_the_hold_of_no_other(one, monkeypatch):  # noqa: F811
    one.begin(4, ["greedy"])
    left = one.llm.torpor.hibernate("greedy", to="disk")
    copy = one.directory / "images" / "copied"
    shutil.copytree(left.path, copy)
    one.engine.abort_request(["greedy"])
    stock = session_calls._take

    async def take(side, *arguments):
        await side.call("end_portable", {"keep": False, "call": "of another task"})
        return await stock(side, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(session_calls, "_take", take)
        assert one.llm.torpor.resume(copy).requests == ("greedy",)
    assert images_in(one) == [] and unfinished(one) == ["greedy"]
    run(one.engine)
    idle(one)


# --- the lifetime of an image -----------------------------------------------------------------------------------------


def test_an_engine_that_ends_leaves_its_images_and_a_sleep_that_aborts_does_not(one):  # noqa: F811
    one.begin(5, ["greedy"])
    left = one.llm.torpor.hibernate("greedy", to="disk")
    one.core.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)  # as vLLM at the end of its process
    assert images_in(one) == [left.id] and one.llm.torpor.hibernated() == []
    one.engine.abort_request(["greedy"])
    assert images_in(one) == [left.id]
    one.llm.torpor.resume(left.path)
    assert unfinished(one) == ["greedy"]
    for _ in range(6):  # it has its KV, and runs
        one.engine.step()
    one.llm.torpor.hibernate("greedy", to="disk")
    one.llm.sleep(level=1)
    assert images_in(one) == [] and one.llm.torpor.hibernated() == []
    one.llm.wake_up()
    one.engine.abort_request(unfinished(one))
    idle(one)


def test_a_pause_that_aborts_leaves_no_image(one):  # noqa: F811
    one.begin(5, ["greedy"])
    one.llm.torpor.hibernate("greedy", to="disk")
    one.core.pause_scheduler("abort")
    one.core.resume_scheduler()
    assert images_in(one) == [] and one.llm.torpor.hibernated() == []
    one.engine.abort_request(unfinished(one))
    idle(one)


@pytest.mark.parametrize("kind", [RequestOutputKind.FINAL_ONLY, RequestOutputKind.CUMULATIVE])
def test_a_choice_that_was_aborted_meanwhile_is_missed_by_nobody(one, kind):  # noqa: F811
    params = SamplingParams(n=2, seed=3, temperature=1.0, max_tokens=9, ignore_eos=True, output_kind=kind)
    processor = one.engine.output_processor
    parents = {*processor.parent_requests}  # vLLM keeps some whose choices were aborted one by one
    one.engine.add_request("both", "Write a poem:", params)
    run(one.engine, 4)
    left = one.llm.torpor.hibernate("both", to="disk")
    first = next(each for each in processor.request_states if each.startswith("0_"))
    one.engine.engine_core.abort_requests(processor.abort_requests([first], internal=True))
    copy = one.directory / "images" / "copied"
    shutil.copytree(left.path, copy)
    one.engine.abort_request(["both"])
    one.llm.torpor.resume(copy)
    outputs = [output for output in _steps(one, 30) if output.finished]
    assert [each.request_id for each in outputs] == ["both"]
    ended = {choice.index: (len(choice.token_ids), choice.finish_reason) for choice in outputs[0].outputs}
    assert ended[1] == (9, "length") and ended.get(0, (0, "abort")) == (0, "abort")
    assert {*processor.parent_requests} == parents
    idle(one)


@pytest.mark.parametrize("steps", [0, 5])
def test_a_request_that_comes_back_is_queued_in_vllms_metrics_if_it_never_ran(one, monkeypatch, steps):  # noqa: F811
    """Otherwise its time in the queue would be less than none: it was scheduled before. The front end hears of the
    queue with the first token alone."""
    one.begin(steps, ["greedy"])
    left = one.llm.torpor.hibernate("greedy", to="disk")
    with monkeypatch.context() as counted:
        counted.setattr(one.core.scheduler, "log_stats", True)
        one.llm.torpor.resume(left.id)
    [request] = one.core.scheduler.requests.values()
    assert [event.type for event in request.events] == ([] if steps else [EngineCoreEventType.QUEUED])
    run(one.engine)
    idle(one)


def _steps(one, count: int) -> list:  # noqa: F811
    return [output for _ in range(count) for output in one.engine.step()]


@pytest.mark.parametrize("file", ["MANIFEST", "STATE", "chunks-r0", "refs-r0"])
def test_an_image_without_a_file_is_damaged_and_stays(one, file):  # noqa: F811
    one.begin(5, ["greedy"])
    left = one.llm.torpor.hibernate("greedy", to="disk")
    part = Path(left.path) / "g-000001" / file
    bytes_of = part.read_bytes()
    part.unlink()
    for image in (left.id, left.path):
        with pytest.raises(errors.Damaged):
            one.llm.torpor.resume(image)
    assert one.llm.torpor.hibernated() == [left] and images_in(one) == [left.id]
    part.write_bytes(bytes_of)
    part.chmod(0o600)
    one.llm.torpor.resume(left.id)
    run(one.engine)
    idle(one)


def test_an_abort_removes_the_image_with_its_last_request(one):  # noqa: F811
    one.begin(5, ["greedy", "seeded", "two"])
    left = one.llm.torpor.hibernate(["greedy", "seeded", "two"], to="disk")
    one.engine.abort_request(["seeded"])
    [image] = one.llm.torpor.hibernated()
    assert image.requests == ("greedy", "two") and images_in(one) == [left.id]
    # Who takes it has not that one.
    held = other_engine()
    opened = held.open(left.path)
    ids = [item["id"] for item in opened["state"]["scheduler"]["requests"]]
    [ended] = opened["ended"]
    assert ids[ended].startswith("seeded") and len(ids) == 4
    held.put_back(left.id)
    one.engine.abort_request(["two", "greedy"])
    assert images_in(one) == []
    with pytest.raises(errors.NotFound, match=left.id):
        one.llm.torpor.resume(left.id)
    idle(one)


def test_what_stays_of_one_that_was_aborted_in_part_comes_back(one):  # noqa: F811
    expected = one.expected
    answers = one.begin(5, ["greedy", "seeded", "two"])
    left = one.llm.torpor.hibernate(["greedy", "seeded", "two"], to="disk")
    one.engine.abort_request(["seeded"])
    scramble(one)
    assert one.llm.torpor.resume(left.id).requests == ("greedy", "two")
    answers.pop("seeded", None)
    same(one.finish(answers), {name: expected[name] for name in ("greedy", "two")})
    idle(one)


@pytest.mark.parametrize(("file", "what"), [("chunks-r0", "block"), ("STATE", "section"), ("MANIFEST", "MANIFEST")])
def test_damage_is_refused_by_name_and_the_image_stays(one, file, what):  # noqa: F811
    one.begin(9, ["prefix-a", "greedy"])
    left = one.llm.torpor.hibernate(["prefix-a", "greedy"], to="disk")
    path = Path(left.path) / "g-000001" / file
    content = bytearray(path.read_bytes())
    place = 3 * 4096 + 77 if file == "chunks-r0" else len(content) // 2
    content[place] ^= 0x40
    path.write_bytes(content)
    for _ in range(2):
        with pytest.raises(errors.Damaged, match=what):
            one.llm.torpor.resume(left.id)
        assert one.llm.torpor.hibernated() == [left] and images_in(one) == [left.id] and used(one) == 0
        assert not one.core.scheduler.requests
    one.engine.abort_request(["prefix-a", "greedy"])
    assert images_in(one) == []
    idle(one)


def test_where_nothing_can_be_written_the_requests_run_on(one):  # noqa: F811
    expected = one.expected
    answers = one.begin(5, ["greedy", "seeded"])
    for name in ("../out", ".hidden", "a/b"):
        with pytest.raises(errors.InvalidArgument, match="the id"):
            one.llm.torpor.hibernate("greedy", name, to="disk")
    with pytest.raises(errors.InvalidArgument, match="to is 'tape'"):
        one.llm.torpor.hibernate("greedy", to="tape")
    assert images_in(one) == [] and one.llm.torpor.hibernated() == []
    (one.directory / "images" / "there" / "g-000001").mkdir(parents=True, mode=0o700)
    os.chmod(one.directory / "images" / "there", 0o700)
    with pytest.raises(errors.WrongState, match=r"there is an image at .*/images/there already"):
        one.llm.torpor.hibernate("greedy", "there", to="disk")
    shutil.rmtree(one.directory / "images" / "there")
    assert one.llm.torpor.hibernated() == []
    same(one.finish(answers), {name: expected[name] for name in ("greedy", "seeded")})
    idle(one)


def test_an_interrupted_call_undoes_what_it_did(one, monkeypatch):  # noqa: F811
    expected = one.expected
    answers = one.begin(5, ["greedy", "seeded"])
    for method in ("hibernate", "store_image"):
        with interrupted(one, monkeypatch, method):
            one.llm.torpor.hibernate("greedy", to="disk")
        assert one.llm.torpor.hibernated() == [] and images_in(one) == []
        answers |= run(one.engine, 4)
    left = one.llm.torpor.hibernate("greedy", to="disk")
    with interrupted(one, monkeypatch, "resume_image"):
        one.llm.torpor.resume(left.id)
    same(one.finish(answers), {name: expected[name] for name in ("greedy", "seeded")})
    idle(one)


def test_what_a_killed_writer_left_goes(one):  # noqa: F811
    """With the first image of an engine, and by the inspector; what is whole stays."""
    place = one.directory / "images" / "left" / "s-000001"
    place.mkdir(parents=True, mode=0o700)
    os.chmod(place.parent, 0o700)
    (place / "STATE").write_bytes(b"half")
    one.begin(5, ["greedy"])
    one.core.torpor_side.sessions.close()  # as of an engine that has not begun any
    one.llm.torpor.hibernate("greedy", "whole", to="disk")
    assert images_in(one) == ["whole"]
    one.llm.torpor.resume("whole")
    run(one.engine)
    idle(one)


# --- several engines --------------------------------------------------------------------------------------------------


def ended(answers: dict, name: str) -> tuple:
    [choice] = answers[name][1]
    return choice[3], choice[4]


def test_an_image_that_another_engine_reads_is_not_resumed_until_it_gives_it_up(one):  # noqa: F811
    expected = one.expected
    answers = one.begin(5, ["greedy"])
    left = one.llm.torpor.hibernate("greedy", to="disk")
    other = other_engine()
    other.open(left.path)
    with pytest.raises(errors.Busy, match="another engine reads the image"):
        one.llm.torpor.resume(left.id)
    assert one.llm.torpor.hibernated() == [left]
    other.put_back(left.id)
    one.llm.torpor.resume(left.id)
    same(one.finish(answers), {"greedy": expected["greedy"]})
    idle(one)


def test_what_another_engine_has_taken_ends_here(one):  # noqa: F811
    one.begin(5, ["greedy", "seeded"])
    left = one.llm.torpor.hibernate("greedy", to="disk")
    other = other_engine()
    other.open(left.path)
    other.take(left.id)
    assert images_in(one) == []
    with pytest.raises(errors.NotFound, match="another engine has taken the image"):
        one.llm.torpor.resume(left.id)
    answers = run(one.engine)
    assert ended(answers, "greedy") == ("error", "another engine has taken this request")
    assert ended(answers, "seeded")[0] == "length"
    with pytest.raises(errors.NotFound, match="another engine has taken the image"):
        one.llm.torpor.resume(left.id)
    idle(one)


def test_a_move_ends_when_the_other_engine_has_the_requests(one):  # noqa: F811
    def take(path: str) -> None:
        other = other_engine()
        other.take(other.open(path)["name"])

    def take_and_fail(path: str) -> None:
        take(path)
        raise ConnectionError("its answer was lost")

    for to in (take, take_and_fail):
        one.begin(5, ["greedy", "seeded"])
        moved = one.llm.torpor.move(["greedy"], to)
        assert moved.requests == ("greedy",) and images_in(one) == []
        assert one.llm.torpor.hibernated() == []
        answers = run(one.engine)
        assert ended(answers, "greedy") == ("error", "another engine has taken this request")
        assert ended(answers, "seeded")[0] == "length"
        idle(one)


def test_a_move_that_nobody_takes_leaves_the_requests_here(one):  # noqa: F811
    def fails(path: str) -> None:
        raise ConnectionError("nobody there")

    expected = one.expected
    for to, error, what in ((fails, ConnectionError, "nobody there"), (str, errors.WrongState, "nobody has taken")):
        answers = one.begin(5, ["greedy", "seeded"])
        with pytest.raises(error, match=what):
            one.llm.torpor.move(["greedy"], to)
        assert images_in(one) == [] and one.llm.torpor.hibernated() == []
        same(one.finish(answers), {name: expected[name] for name in ("greedy", "seeded")})
        idle(one)


def test_a_move_to_an_engine_that_still_reads_leaves_the_image(one):  # noqa: F811
    expected = one.expected
    answers = one.begin(5, ["greedy"])
    other = other_engine()
    with pytest.raises(errors.Busy, match="another engine reads the image"):
        one.llm.torpor.move(["greedy"], lambda path: other.open(path) and None)
    [left] = one.llm.torpor.hibernated()
    other.put_back(left.id)
    one.llm.torpor.resume(left.id)
    same(one.finish(answers), {"greedy": expected["greedy"]})
    idle(one)


def copy_of(one, name: str = "greedy") -> Path:  # noqa: F811
    """An image of a request that is no more here: a copy, as if another engine had made it."""
    left = one.llm.torpor.hibernate(name, to="disk")
    copy = one.directory / "images" / "copied"
    shutil.copytree(left.path, copy)
    one.engine.abort_request([name])
    return copy


@pytest.mark.core
def test_requests_of_another_engine_come_beside_those_that_run(one):  # noqa: F811
    expected = one.expected
    one.begin(6, ["two"])
    path = copy_of(one, "two")
    answers = one.begin(4, ["greedy", "schema", "long"])
    came = one.llm.torpor.resume(path)
    assert came.id == "copied" and came.requests == ("two",) and images_in(one) == []
    same(one.finish(answers), {name: expected[name] for name in ("two", "greedy", "schema", "long")})
    idle(one)


def test_they_are_refused_where_they_do_not_fit_and_stay(one, monkeypatch):  # noqa: F811
    expected = one.expected
    one.begin(6, ["greedy"])
    path = copy_of(one)
    answers = one.begin(4, ["greedy"])
    with pytest.raises(errors.WrongState, match="this engine has a request greedy of its own"):
        one.llm.torpor.resume(path)
    same(one.finish(answers), {"greedy": expected["greedy"]})
    fingerprint = one.core.torpor_side.controller.fingerprint()
    other = fingerprint | {"kv_dtype": "none", "model": "another"}
    with pytest.raises(errors.Incompatible, match="model: checkpoint has"):
        one.core.torpor_side.sessions.take(str(path), other, "a call")
    with monkeypatch.context() as patch, pytest.raises(errors.Incompatible, match="no request"):
        patch.setattr(sessions.values, "moved_request", _no_request)
        one.llm.torpor.resume(path)
    with interrupted(one, monkeypatch, "resume_image"):
        one.llm.torpor.resume(path)
    assert images_in(one) == ["copied"] and not one.engine.has_unfinished_requests() and used(one) == 0
    one.llm.torpor.resume(path)
    same(tokens_of(one.finish({})), tokens_of({"greedy": expected["greedy"]}))
    idle(one)


def _no_request(*_):
    raise errors.Incompatible("no request can be made of it")


def test_of_two_engines_that_read_one_image_one_has_it(one):  # noqa: F811
    """Also where their locks are none, as between hosts of some file systems: then the second finds nothing to take."""
    one.begin(6, ["greedy"])
    path = copy_of(one)
    first = other_engine()
    first.open(str(path))
    (path / "LOCK").unlink()
    second = other_engine()
    second.open(str(path))
    second.take("copied")
    with pytest.raises(errors.NotFound, match="there is no image at"):
        first.take("copied")
    idle(one)


def test_the_claim_that_comes_too_late_ends_what_it_admitted(one, monkeypatch):  # noqa: F811
    one.begin(6, ["greedy"])
    path = copy_of(one)
    answers = one.begin(4, ["seeded"])
    stock = one.core.torpor_side.sessions.end_portable

    def end_portable(keep: bool, lost=(), call=None) -> None:
        shutil.rmtree(path)  # another engine was faster
        stock(keep, lost, call)

    with monkeypatch.context() as patch, pytest.raises(errors.NotFound, match="there is no image at"):
        patch.setattr(one.core.torpor_side.sessions, "end_portable", end_portable)
        one.llm.torpor.resume(path)
    assert unfinished(one) == ["seeded"] and used(one) == 0
    same(one.finish(answers), {"seeded": one.expected["seeded"]})
    idle(one)


def test_who_cancels_a_call_that_takes_an_image_has_its_requests():
    """The engine core does it all the same, and the image is on disk no more."""

    async def scene() -> tuple[list[str], bool]:
        begins, ends, did = asyncio.Event(), asyncio.Event(), []

        class Side:
            engine = SimpleNamespace(output_processor=SimpleNamespace(external_req_ids={}))

            async def call(self, method: str, options: dict) -> None:
                begins.set()
                await ends.wait()
                did.append(method)

            def take(self, *_) -> None:
                did.append("take")

            def taken(self, *_) -> None:
                did.append("taken")

        summary = {"outputs": {"requests": [{"external_id": "a"}]}}
        task = asyncio.create_task(session_calls._take(Side(), summary, {"call": "a call"}))
        await begins.wait()
        task.cancel()
        await asyncio.sleep(0)
        ends.set()
        await asyncio.wait([task])
        return did, task.cancelled()

    assert asyncio.run(scene()) == (["take", "end_portable", "taken"], True)


def test_an_image_is_no_checkpoint_and_a_checkpoint_is_no_image(one):  # noqa: F811
    one.begin(6, ["greedy"])
    checkpoint = one.llm.checkpoint().checkpoint
    store = one.directory / "images" / "whole"
    store.mkdir(parents=True, mode=0o700)
    shutil.copytree(checkpoint, store / "g-000001")
    os.chmod(store, 0o700)
    with pytest.raises(errors.Incompatible, match="is a checkpoint of a whole engine"):
        one.llm.torpor.resume(store)
    assert images_in(one) == ["whole"]
    shutil.rmtree(store)
    path = copy_of(one)
    idle(one)
    for identity in ("exact", "portable"):
        with pytest.raises(errors.Incompatible, match=r"an image of hibernated requests .*resume"):
            one.llm.wake_up(from_checkpoint=path / "g-000001", identity=identity)
    shutil.rmtree(path)
    idle(one)


def test_the_inspector_lists_images_and_looks_into_one(one):  # noqa: F811
    expected = one.expected
    answers = one.begin(5, ["greedy", "two"])
    left = one.llm.torpor.hibernate(["greedy", "two"], "seen", to="disk")
    [image] = look("sessions", one.directory)["images"]
    assert image["id"] == "seen" and image["path"] == left.path and image["readable"] and image["bytes"] > 0
    assert len(image["requests"]) == 3 and all(each["output_tokens"] > 0 for each in image["requests"])
    assert sum(each["computed_tokens"] for each in image["requests"]) == left.tokens
    assert look("verify", left.path)["problems"] == []
    assert len(look("requests", left.path)["requests"]) == 3
    one.engine.abort_request(["greedy"])
    [image] = look("sessions", one.directory)["images"]
    assert len(image["requests"]) == 2
    half = one.directory / "images" / "half"
    half.mkdir(mode=0o700)
    assert look("gc", one.directory, "--dry-run")["removed"] == ["images/half"]
    assert look("gc", one.directory)["removed"] == ["images/half"] and images_in(one) == ["seen"]
    manifest = Path(left.path) / "g-000001" / "MANIFEST"
    content = manifest.read_bytes()
    manifest.write_bytes(content[:-1])
    [image] = look("sessions", one.directory)["images"]
    assert not image["readable"] and image["problem"]["code"] == "corruption"
    manifest.write_bytes(content)
    one.llm.torpor.resume("seen")
    assert look("sessions", one.directory)["images"] == []
    answers.pop("greedy", None)
    same(one.finish(answers), {"two": expected["two"]})
    idle(one)
