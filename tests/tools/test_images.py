# SPDX-License-Identifier: Apache-2.0
"""`torpor tree` and `torpor diff` of images of hibernated requests: those of examples/sessions."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from conftest import ROOT, inspector

from torpor import read_checkpoint
from torpor._core import digest

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


def rewrite(image: Path, section: str, before: bytes, after: bytes, renamed: str = "image") -> None:
    """Write STATE and MANIFEST anew with digests that fit (checkpoint/FORMAT.md), with other bytes in one section.
    `renamed`: the name of the section `image`; with another one it is no image."""
    state, manifest = image / "g-000001/STATE", image / "g-000001/MANIFEST"
    header, body = manifest.read_bytes()[:128], manifest.read_bytes()[128:]
    at = 16
    at += 8 + number(body, at)  # creator
    fields, at = number(body, at), at + 8
    for _ in range(2 * fields):
        at += 8 + number(body, at)
    first, count, at = at, number(body, at), at + 8
    made, content = b"", b""
    contents = dict(read_checkpoint(str(image)).encode())
    for _ in range(count):
        name = body[at + 8 : at + 8 + number(body, at)].decode()
        at += 8 + len(name)
        required, at = body[at : at + 1], at + 1 + 24 + 1 + 16 + 16
        new = contents[name]
        if name == section:
            assert new.count(before) == 1
            new = new.replace(before, after)
        word = (renamed if name == "image" else name).encode()
        made += len(word).to_bytes(8, "little") + word + required
        made += b"".join(each.to_bytes(8, "little") for each in (len(content), len(new), len(new)))
        made += bytes(1) + bytes.fromhex(digest(new)) + bytes(16)
        content += new
    body = body[:first] + count.to_bytes(8, "little") + made + body[at:]
    header = header[:16] + len(body).to_bytes(8, "little") + header[24:96]
    seal = hashlib.blake2b(header + bytes(32) + body, digest_size=32).digest()
    state.write_bytes(content)
    manifest.write_bytes(header + seal + body)


def number(content: bytes, at: int) -> int:
    return int.from_bytes(content[at : at + 8], "little")


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


def test_images_whose_samplers_differ_are_not_equal(copy):
    one_rank = bytes([2, 0, 0, 0, 1]) + bytes(7 + 4)  # the section's version, how many there are, its number
    rows, generator, others = bytes(8), b"x", bytes(9)
    before = one_rank + rows + bytes(8) + others
    rewrite(copy / "best", "samplers", before, before)
    assert as_json("diff", IMAGES / "best", copy / "best")["equal"]
    rewrite(copy / "best", "samplers", before, one_rank + rows + b"\1" + bytes(7) + generator + others)
    found = as_json("diff", IMAGES / "best", copy / "best", code=6)
    assert not found["equal"] and not found["same_samplers"] and found["same_queues"] and found["problems"] == []
    assert all(each["fields"] == [] and each["equal_blocks"] == each["blocks"][0] for each in found["pairs"])
    assert "samplers: changed" in inspector("diff", IMAGES / "best", copy / "best").stdout


@pytest.mark.parametrize("whole", [False, True])
def test_what_says_wrongly_from_whom_a_request_was_forked_is_named_beside_the_rest(copy, whole):
    last = b"\x02" + (18).to_bytes(8, "little")  # the token of the second request's last fork
    rewrite(copy / "best", "requests", b"at" + last, b"au" + last, "imago" if whole else "image")
    tree = as_json("tree", copy / "best/g-000001", code=1)
    text = inspector("tree", copy / "best/g-000001").stdout
    if whole:
        [requests] = [each for each in tree["children"] if each["name"] == "requests"]
        assert [each["name"].rpartition("-")[0] for each in requests["children"]] == ["plan-a-1", "plan-a-1-b-0"]
        [problem] = tree["problems"]
    else:
        [image] = tree["images"]
        assert names(image["requests"]) == ["plan-a-1", "plan-a-1-b-0"]
        assert [len(each["forked"]) for each in image["requests"]] == [1, 0]
        [problem] = image["problems"]
        found = as_json("diff", IMAGES / "best", copy / "best", code=6)
        assert found["problems"] == [problem] and not found["equal"] and len(found["pairs"]) == 2
    assert problem["code"] == "corruption" and "torpor_forked is no list of forks" in problem["what"]
    assert "is no list of forks" in text and "plan-a-1-b-0" in text


def test_a_damaged_image_is_not_repaired_and_verify_does_not_advise_it(copy):
    before = sorted(path.name for path in (copy / "best").rglob("*"))
    state = copy / "best/g-000001/STATE"
    flip(state, state.stat().st_size // 2)
    verified = inspector("verify", copy / "best")
    assert verified.returncode == 1 and "remove the image's directory" in verified.stdout
    assert "torpor repair" not in verified.stdout
    refused = inspector("repair", copy / "best")
    assert refused.returncode != 0 and "is an image of hibernated requests" in refused.stderr
    assert "send its requests again" in refused.stderr
    assert sorted(path.name for path in (copy / "best").rglob("*")) == before


def test_diff_of_an_image_and_a_checkpoint_or_nothing():
    found = as_json("diff", IMAGES / "best", ROOT / "examples/checkpoints/g-000001", code=6)
    assert found["kinds"] == ["image", "checkpoint"] and found["pairs"] == [] and len(found["removed"]) == 2
    assert len(found["added"]) == 4 and found["fingerprint"]
    assert inspector("diff", IMAGES / "best", IMAGES / "none").returncode == 3
    assert inspector("tree", ROOT / "examples/nowhere/images").returncode == 3
    assert sum(path.stat().st_size for path in IMAGES.rglob("*") if path.is_file()) <= 100_000
