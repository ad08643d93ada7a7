# SPDX-License-Identifier: Apache-2.0
"""`torpor tree` and `torpor diff` of images of hibernated requests: those of examples/sessions."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import ROOT, inspector

IMAGES = ROOT / "examples/sessions/images"


def as_json(*words, code: int = 0) -> dict:
    done = inspector(*words, "--json")
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def copy(tmp_path) -> Path:
    """The images, which this test may damage."""
    images = tmp_path / "store/images"
    shutil.copytree(IMAGES, images)
    for path in [images.parent, *images.parent.rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)
    return images


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def names(requests: list[dict]) -> list[str]:
    """Ids without the digits that vLLM adds to a name."""
    return [each["id"].rpartition("-")[0] for each in requests]


def test_the_tree_of_a_directory_has_requests_tokens_bytes_and_digests():
    tree = as_json("tree", IMAGES)
    best, others = tree["images"]
    assert (best["id"], others["id"]) == ("best", "others")
    assert names(others["requests"]) == ["plan", "plan-a-0"] and names(best["requests"]) == ["plan-a-1", "plan-a-1-b-0"]
    for image in (best, others):
        files = [path for path in (IMAGES / image["id"]).rglob("*") if path.is_file() and path.name != "MANIFEST"]
        size = sum(path.stat().st_size for path in files)
        assert image["bytes"] == size and image["tier"] == "disk" and image["kv_bytes"] <= image["bytes"]
        assert image["digests"] == "whole" and image["problems"] == image["foreign"] == []
        # Both requests of an image share one block, which the image has once.
        assert [(each["blocks"], each["shared_blocks"]) for each in image["requests"]] == [(2, 1), (2, 1)]
        assert image["kv_bytes"] == 3 * image["requests"][0]["bytes"] / 2
        assert all(each["digests"] == "whole" and not each["ended"] for each in image["requests"])
    assert tree["bytes_by_tier"] == {"disk": best["bytes"] + others["bytes"]}
    assert as_json("requests", IMAGES / "best")["requests"][0]["output_tokens"] == best["requests"][0]["output_tokens"]
    assert as_json("tree", IMAGES, "--quick")["images"][0]["digests"] == "not read"


def test_the_forks_are_a_tree_over_all_images():
    [root] = as_json("tree", IMAGES)["forks"]
    assert root["request"].startswith("plan-") and root["image"] == "others" and root["at"] is None
    first, second = root["children"]
    assert (first["image"], first["at"], first["seed"], first["children"]) == ("others", 10, 1, [])
    assert (second["image"], second["at"], second["seed"]) == ("best", 10, 2)
    [last] = second["children"]
    assert (last["image"], last["at"], last["seed"]) == ("best", 18, 3)
    # One image alone: the first request is in none, but known.
    [alone] = as_json("tree", IMAGES / "best")["forks"]
    assert alone["request"] == root["request"] and alone["image"] is None and alone["children"] == [second]
    text = inspector("tree", IMAGES / "best/g-000001").stdout
    assert "in no image here" in text and "at output token 18, seed 3, image best" in text


def test_damaged_and_foreign_files_are_named(copy):
    (copy / "best/g-000001/notes.txt").touch(mode=0o600)
    (copy / "letter.txt").touch(mode=0o600)
    (copy / "half").mkdir(mode=0o700)
    tree = as_json("tree", copy)
    assert tree["foreign"] == ["letter.txt"] and tree["leftovers"] == ["half"]
    assert tree["images"][0]["foreign"] == ["g-000001/notes.txt"] and tree["images"][1]["foreign"] == []
    chunks = copy / "others/g-000001/chunks-r0"
    flip(chunks, 4096 + 17)  # in the first block, which both requests have
    tree = as_json("tree", copy, code=1)
    best, others = tree["images"]
    assert best["digests"] == "whole" and others["digests"] == "damaged"
    assert [each["digests"] for each in others["requests"]] == ["damaged", "damaged"]
    assert any("chunks-r0" in each["what"] or "block 0" in each["what"] for each in others["problems"])
    assert as_json("tree", copy, "--quick")["images"][1]["digests"] == "not read"
    assert as_json("tree", copy / "others", code=1)["images"] == [others]
    flip(chunks, 4096 + 17)
    flip(chunks, len(chunks.read_bytes()) - 8192 + 17)  # in the last one, which one request has
    assert [each["digests"] for each in as_json("tree", copy, code=1)["images"][1]["requests"]] == ["whole", "damaged"]


def test_an_image_that_cannot_be_read_is_named_beside_the_others(copy):
    flip(copy / "best/g-000001/MANIFEST", 200)
    tree = as_json("tree", copy, code=1)
    best, others = tree["images"]
    assert not best["readable"] and "digest" in best["problems"][0]["what"] and others["digests"] == "whole"
    assert "not readable" in inspector("tree", copy).stdout
    done = inspector("tree", copy / "best")
    assert done.returncode == 1 and "best" in done.stderr
    shutil.copytree(ROOT / "examples/checkpoints/g-000001", copy / "engine/g-000001")
    (copy / "engine").chmod(0o700)
    shutil.rmtree(copy / "best")
    tree = as_json("tree", copy, code=4)
    assert "a checkpoint of a whole engine" in tree["images"][0]["problems"][0]["what"]


@pytest.mark.parametrize(("file", "code"), [("STATE", 1), ("refs-r0", 1), ("chunks-r0", 1)])
def test_a_file_that_is_missing_is_named(copy, file, code):
    (copy / "best/g-000001" / file).unlink()
    tree = as_json("tree", copy, code=code)
    assert any(file in each["what"] for each in tree["images"][0]["problems"]), tree["images"][0]["problems"]


def test_a_request_that_has_ended_since_is_marked(copy):
    (copy / "best/g-000001/ended-000001").touch(mode=0o600)
    best = as_json("tree", copy)["images"][0]
    assert [each["ended"] for each in best["requests"]] == [False, True] and best["foreign"] == []
    assert "ended since" in inspector("tree", copy).stdout


def test_diff_pairs_requests_by_id_and_by_forks(copy):
    found = as_json("diff", IMAGES / "others", IMAGES / "best", code=6)
    assert not found["equal"] and found["kinds"] == ["image", "image"] and found["fingerprint"] == []
    assert found["removed"] == found["added"] == []
    pairs = {(each["a"].rpartition("-")[0], each["b"].rpartition("-")[0]): each for each in found["pairs"]}
    assert {names: each["by"] for names, each in pairs.items()} == {
        ("plan", "plan-a-1"): "fork", ("plan", "plan-a-1-b-0"): "fork", ("plan-a-0", "plan-a-1"): "siblings"
    }  # fmt: skip
    child = pairs["plan", "plan-a-1"]
    prompt = as_json("requests", IMAGES / "others")["requests"][0]["prompt_tokens"]
    assert child["common_tokens"] >= prompt + 10 and child["equal_blocks"] == 1 and child["blocks"] == [2, 2]
    assert child["seeds"] == [0, 2] and {"tokens", "sampling"} <= set(child["fields"])
    text = inspector("diff", IMAGES / "others", IMAGES / "best")
    assert text.returncode == 6 and "siblings" in text.stdout and "fork" in text.stdout
    same = as_json("diff", IMAGES / "best", copy / "best")
    assert same["equal"] and [each["by"] for each in same["pairs"]] == ["id", "id"]
    assert inspector("diff", IMAGES / "best", copy / "best").stdout == "equal\n"


def test_diff_of_an_image_and_a_checkpoint_or_nothing():
    found = as_json("diff", IMAGES / "best", ROOT / "examples/checkpoints/g-000001", code=6)
    assert found["kinds"] == ["image", "checkpoint"] and found["pairs"] == [] and len(found["removed"]) == 2
    assert len(found["added"]) == 4 and found["fingerprint"]
    assert inspector("diff", IMAGES / "best", IMAGES / "none").returncode == 3
    assert inspector("tree", ROOT / "examples/nowhere/images").returncode == 3
    assert sum(path.stat().st_size for path in IMAGES.rglob("*") if path.is_file()) <= 100_000
