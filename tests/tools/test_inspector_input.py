# SPDX-License-Identifier: Apache-2.0
"""The inspector and what users, clients and other programs put before it: paths, files and names of all kinds."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, inspector

TORPOR = ROOT / "build/release/tools/torpor/torpor"


def as_json(*words, code: int = 0) -> dict:
    done = inspector(*words, "--json")
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def store(tmp_path) -> Path:
    """Two checkpoints, which a test may damage."""
    copy = tmp_path / "store"
    shutil.copytree(ROOT / "examples/checkpoints", copy)
    for path in [copy, *copy.rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)
    return copy


def damage_a_block(checkpoint: Path) -> None:
    [place] = next(block["saved"] for block in as_json("blocks", checkpoint)["blocks"] if block["saved"])
    with open(checkpoint / place["file"], "r+b") as file:
        file.seek(place["offset"] + 7)
        file.write(b"\xa5\x5a\xa5")


@pytest.mark.parametrize("ending", ["/", "//", "/.", "/../g-000002/"])
def test_a_slash_at_the_end_of_a_path_changes_nothing(store, ending):
    damage_a_block(store / "g-000002")
    assert as_json("repair", f"{store}/g-000002{ending}")["repaired"] == f"{store}/g-000003"
    assert [entry["name"] for entry in as_json("du", f"{store}/g-000002{ending}")["checkpoints"]] == ["g-000002"]
    assert as_json("info", f"{store}/g-000002{ending}")["path"] == f"{store}/g-000002"


def test_the_directory_that_one_is_in_has_its_name(store):
    def here(*words) -> dict:
        done = subprocess.run([TORPOR, *words, "--json"], cwd=store / "g-000002", capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    damage_a_block(store / "g-000002")
    assert here("repair", ".")["repaired"] == f"{store}/g-000003"
    assert [entry["name"] for entry in here("du", ".")["checkpoints"]] == ["g-000002"]


def test_names_reach_a_terminal_as_escapes_and_json_as_they_are(store):
    named = store.with_name("a\x1b[2J\x7f\u009b31m\u2028\u202eb ü")
    store.rename(named)
    escaped = r"a\x1b[2J\x7f\u009b31m\u2028\u202eb ü"
    for words in (["info", named], ["verify", named], ["ls", named / "none"]):
        done = inspector(*words)
        assert escaped in done.stdout + done.stderr
        assert all(character.isprintable() or character == "\n" for character in done.stdout + done.stderr)
    said = inspector("info", named, "--json").stdout
    assert all(character.isprintable() or character == "\n" for character in said)
    assert json.loads(said)["path"] == f"{named}/g-000002"


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["-f", "--export", "perfetto"], "--follow goes on"),
        (["-f", "--export", "html"], "--follow goes on"),
        (["--json", "--export", "csv"], "two formats"),
    ],
)
def test_events_refuses_what_it_would_not_do(tmp_path, words, wrong):
    done = subprocess.run([TORPOR, "events", tmp_path, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and wrong in done.stdout + done.stderr


def test_gc_removes_nothing_that_torpor_did_not_make(store):
    foreign = ["images/holiday/p.jpg", "s-notes.txt", "s-old/a", "t-shirts/a", "s-000007"]
    for name in foreign:
        (store / name).parent.mkdir(parents=True, exist_ok=True)
        (store / name).write_text("mine")
    left = ["s-000008", "t-g-000001", "images/half"]
    for name in left:
        (store / name).mkdir(mode=0o700)
    (store / "images/half/LOCK").touch(mode=0o600)
    tree = as_json("tree", store / "images")
    assert tree["leftovers"] == ["half"] and tree["foreign"] == ["holiday"]
    assert as_json("gc", store)["removed"] == left
    assert not any((store / name).exists() for name in left)
    assert all((store / name).read_text() == "mine" for name in foreign)


def test_what_pull_says_of_a_damaged_part_helps(store, tmp_path):
    url = f"file://{tmp_path}/shared"
    assert inspector("push", store, url).returncode == 0
    [largest] = sorted((tmp_path / "shared/parts").rglob("*/*"), key=lambda path: path.stat().st_size)[-1:]
    content = largest.read_bytes()
    largest.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    refused = as_json("pull", url, tmp_path / "to", code=1)["error"]
    assert largest.name in refused["what"] and "remove that object and push" in refused["next_step"]
    largest.unlink()
    again = as_json("push", store, url)
    assert again["moved_bytes"] == len(content) and not again["was_there"]
    assert largest.read_bytes() == content and as_json("push", store, url)["was_there"]
    assert not as_json("pull", url, tmp_path / "to")["was_there"]
    there = inspector("pull", url, tmp_path / "to")
    assert there.returncode == 0 and "was there already" in there.stdout and "torpor verify" in there.stdout
