# SPDX-License-Identifier: Apache-2.0
"""The inspector on a checkpoint that a real engine wrote. Exit codes: tools/torpor/README.md."""

import fcntl
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from conftest import inspector

ROOT_OF_TESTS = Path(__file__).resolve().parents[1]
BINARY = ROOT_OF_TESTS.parent / "build/release/tools/torpor/torpor"


def restrict(directory: Path) -> None:
    """As torpor makes them: a clone's modes follow its umask."""
    for path in [directory, *directory.rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)


@pytest.fixture
def damaged(shown, tmp_path) -> Path:
    """The checkpoint with a bit changed in each chunk."""
    copy = tmp_path / "store" / "g-000001"
    shutil.copytree(shown["checkpoint"], copy)
    with open(copy / "chunks-r0", "r+b") as file:
        for page in range(4096, file.seek(0, 2), 4096):
            file.seek(page)
            byte = file.read(1)
            file.seek(page)
            file.write(bytes([byte[0] ^ 1]))
    return copy


def as_json(*arguments, code=0):
    done = inspector(*arguments, "--json")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def test_ls_lists_the_checkpoints_of_a_directory(shown):
    store = Path(shown["checkpoint"]).parent
    [entry] = as_json("ls", store)["checkpoints"]
    assert entry["name"] == "g-000001" and entry["readable"] and entry["bytes"] == shown["checkpoint_bytes"]
    assert "g-000001" in inspector("ls", store).stdout
    assert entry["metadata"] == {"made_by": "tools/dev demo"}
    assert "made_by=tools/dev demo" in inspector("ls", store).stdout
    assert len(entry["owner"]) == 32 and entry["owner"][:8] in inspector("ls", store).stdout


def test_info_tells_what_is_in_it(shown):
    info = as_json("info", shown["checkpoint"])
    assert info["requests"]["running"] == 8
    assert {m["tag"] for m in info["memory"]} == {"weights", "kv_cache"}
    assert info["fingerprint"]["architecture"] == "LlamaForCausalLM"
    assert sum(s["stored_bytes"] for s in info["sections"]) < 1e6
    assert as_json("info", Path(shown["checkpoint"]).parent)["path"] == info["path"]  # the latest of a directory
    assert info["metadata"] == {"made_by": "tools/dev demo"}
    said = inspector("info", shown["checkpoint"]).stdout
    assert "LlamaForCausalLM" in said and "metadata: made_by=tools/dev demo" in said


def test_requests_lists_each_with_its_progress(shown):
    requests = as_json("requests", shown["checkpoint"])["requests"]
    assert len(requests) == 8
    assert sum(r["output_tokens"] for r in requests) == shown["tokens_before_sleep"]
    assert all(
        r["queue"] == "running"
        and r["blocks"] > 0
        and r["computed_tokens"] == r["prompt_tokens"] + r["output_tokens"] - 1
        for r in requests
    )
    assert len(inspector("requests", shown["checkpoint"]).stdout.splitlines()) == 9


def test_verify_passes_a_whole_one_and_names_what_is_damaged(shown, damaged):
    assert as_json("verify", shown["checkpoint"])["whole"] is True
    found = as_json("verify", damaged, code=1)
    assert found["whole"] is False
    assert len(found["problems"]) == sum(m["chunks"] for m in as_json("info", shown["checkpoint"])["memory"])
    assert all(problem["code"] == "corruption" for problem in found["problems"])
    assert any("kv_cache block" in problem["what"] for problem in found["problems"])
    assert inspector("verify", damaged).returncode == 1


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["info", "/nowhere"], 3, "/nowhere"),
        (["verify", "/nowhere"], 3, "/nowhere"),
        (["ls", "/dev/null"], 5, "/dev/null"),
        (["explode", "/tmp"], 2, 'there is no command "explode"'),
        (["sessions", "/nowhere"], 3, "/nowhere"),
        (["info"], 2, "path"),
        ([], 2, "subcommand"),
    ],
)
def test_wrong_usage_and_missing_files_have_their_own_exit_codes(arguments, code, named):
    done = inspector(*arguments)
    assert done.returncode == code
    assert named in done.stderr


def test_a_damaged_manifest_is_listed_with_its_problem_and_refused(damaged):
    manifest = bytearray((damaged / "MANIFEST").read_bytes())
    manifest[200] ^= 1
    (damaged / "MANIFEST").write_bytes(manifest)
    [entry] = as_json("ls", damaged.parent)["checkpoints"]
    assert not entry["readable"] and "digest" in entry["problem"]["what"]
    assert inspector("info", damaged).returncode == 1


def test_help_and_version_need_nothing():
    assert inspector("--help").returncode == 0
    assert inspector("--version").stdout.strip()


def test_piped_output_has_no_escape_sequences(shown):
    for verb in ("ls", "info", "requests", "verify"):
        path = Path(shown["checkpoint"]).parent if verb == "ls" else shown["checkpoint"]
        assert "\x1b" not in inspector(verb, path).stdout


def copied(shown, tmp_path) -> Path:
    copy = tmp_path / "store" / "g-000001"
    shutil.copytree(shown["checkpoint"], copy)
    return copy


def test_verify_recomputes_what_the_engine_hashed(shown):
    found = as_json("verify", shown["checkpoint"])
    assert found["checked"]["hashes"] > 0 and found["hashes_not_checked"] is None
    assert found["checked"]["chunks"] == sum(m["chunks"] for m in as_json("info", shown["checkpoint"])["memory"])


def test_show_blocks_prefix_and_tree_agree_about_a_request(shown):
    request = as_json("requests", shown["checkpoint"])["requests"][0]
    whole = as_json("show", shown["checkpoint"], request["id"])
    assert (
        len(whole["prompt_token_ids"]) == request["prompt_tokens"]
        and len(whole["output_token_ids"]) == request["output_tokens"]
    )
    held = [b["id"] for b in as_json("blocks", shown["checkpoint"])["blocks"] if request["id"] in b["requests"]]
    assert sorted(whole["blocks_by_group"][0]) == held
    [run] = [r for r in as_json("prefix", shown["checkpoint"])["tree"] if request["id"] in r["requests"]]
    assert run["cached"] and run["hit_tokens"] == run["to_token"] <= request["computed_tokens"]
    assert request["id"] in inspector("tree", shown["checkpoint"]).stdout
    assert inspector("show", shown["checkpoint"], "nobody").returncode == 3


def test_text_is_what_the_engine_said(shown):
    import os

    tokenizer = Path(os.environ["TORPOR_TEST_MODEL"]) / "tokenizer.json"
    texts = [r["prompt_text"] for r in as_json("requests", shown["checkpoint"], "--text", tokenizer)["requests"]]
    assert all("<|im_start|>user\n" in text for text in texts)
    assert inspector("requests", shown["checkpoint"], "--text", "/dev/null").returncode == 2


def test_diff_tells_what_differs_by_exit_code(shown, tmp_path):
    assert as_json("diff", shown["checkpoint"], copied(shown, tmp_path))["equal"] is True
    old = tmp_path / "old" / "g-000001"
    shutil.copytree(ROOT_OF_TESTS / "golden/v4-unsealed/g-000001", old)
    restrict(tmp_path)
    difference = as_json("diff", shown["checkpoint"], old, code=6)
    assert difference["requests"]["removed"] and difference["requests"]["added"]


def test_cat_and_extract_give_the_bytes(shown, tmp_path):
    info = as_json("info", shown["checkpoint"])
    assert as_json("cat", shown["checkpoint"], "queues")["bytes"] == next(
        s["bytes"] for s in info["sections"] if s["name"] == "queues"
    )
    assert inspector("cat", shown["checkpoint"], "nothing").returncode == 3
    weights = tmp_path / "weights"
    extracted = as_json("extract", shown["checkpoint"], "weights", "-o", weights)
    assert (
        weights.stat().st_size
        == extracted["bytes"]
        == next(m["bytes"] for m in info["memory"] if m["tag"] == "weights")
    )
    assert inspector("extract", shown["checkpoint"], "weights", "-o", weights).returncode == 5  # it is there already


def test_fits_says_by_field(shown, tmp_path):
    import os

    alike = as_json("fits", shown["checkpoint"], "--model", os.environ["TORPOR_TEST_MODEL"], code=9)
    assert alike["fits"] is True and "dtype" in [field["field"] for field in alike["not_known_here"]]
    assert "not known here" in inspector("fits", shown["checkpoint"]).stdout.splitlines()[-1]
    engine = tmp_path / "engine.json"
    engine.write_text(inspector("info", shown["checkpoint"], "--json").stdout)
    assert as_json("fits", shown["checkpoint"], "--like", engine)["not_known_here"] == []
    wrong = as_json("fits", shown["checkpoint"], "--field", "dtype=torch.int3", code=6)
    assert [c["field"] for c in wrong["checks"] if not c["fits"]] == ["dtype"]
    assert inspector("fits", shown["checkpoint"], "--memory", "1KB").returncode == 6


def test_fits_wants_room_for_the_requests_and_no_certain_number_of_blocks(shown):
    blocks = as_json("blocks", shown["checkpoint"])
    fewest = 1 + sum(bool(block["requests"]) for block in blocks["blocks"])
    assert fewest < blocks["num_blocks"]
    for here, code in ((fewest, 9), (blocks["num_blocks"] + 7, 9), (fewest - 1, 6)):
        found = as_json("fits", shown["checkpoint"], "--field", f"kv_num_blocks={here}", code=code)
        [check] = [check for check in found["checks"] if check["field"] == "kv_num_blocks"]
        assert check["fits"] == (code == 9) and check["checkpoint"] == f"{blocks['num_blocks']}, needs {fewest}"


def test_repair_drops_what_is_damaged_and_the_rest_is_whole(shown, tmp_path):
    copy = copied(shown, tmp_path)
    request = as_json("requests", copy)["requests"][0]["id"]
    block = next(b for b in as_json("blocks", copy)["blocks"] if request in b["requests"])
    with open(copy / block["saved"][0]["file"], "r+b") as file:
        file.seek(block["saved"][0]["offset"] + 7)
        file.write(b"\xa5\x5a")
    assert as_json("repair", copy, "--dry-run", code=1)["repaired"] is None
    repaired = as_json("repair", copy)
    assert [d["id"] for d in repaired["dropped_requests"]] == block["requests"] and str(block["id"]) in repaired[
        "dropped_requests"
    ][0]["why"]
    assert as_json("verify", repaired["repaired"])["whole"] is True
    assert len(as_json("requests", repaired["repaired"])["requests"]) == shown["requests"] - len(block["requests"])
    assert as_json("verify", copy, code=1)["whole"] is False  # left as it was


def test_gc_and_rm_keep_what_is_needed(shown, tmp_path):
    copy = copied(shown, tmp_path)
    (copy.parent / "s-000009").mkdir(mode=0o700)
    assert as_json("gc", copy.parent, "--dry-run")["removed"] == ["s-000009"] and (copy.parent / "s-000009").exists()
    assert as_json("gc", copy.parent, "--keep", "1", "--max-age", "1s")["left"] == ["g-000001"]
    assert not (copy.parent / "s-000009").exists()
    assert inspector("rm", copy.parent).returncode == 2
    assert as_json("rm", copy)["removed"] == "g-000001" and not copy.exists()
    assert inspector("rm", copy).returncode == 3


def test_what_others_may_write_to_is_refused(shown, tmp_path):
    copy = copied(shown, tmp_path)
    copy.chmod(0o777)
    done = inspector("info", copy)
    assert done.returncode == 5 and "chmod go-w" in done.stderr


def test_man_page_and_completion_name_every_verb():
    verbs = [
        "ls",
        "info",
        "tree",
        "requests",
        "show",
        "blocks",
        "prefix",
        "du",
        "verify",
        "diff",
        "cat",
        "extract",
        "fits",
        "repair",
        "gc",
        "rm",
    ]
    page = inspector("man").stdout
    assert all(f".SS {verb}\n" in page for verb in verbs)
    for shell in ("bash", "zsh", "fish"):
        script = inspector("completion", shell).stdout
        assert all(verb in script for verb in verbs)
    assert inspector("completion", "csh").returncode == 2


def test_a_key_is_asked_for_and_checked(shown, tmp_path):
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    assert inspector("info", shown["checkpoint"], "--key-file", key).returncode == 7  # it was written without one
    key.chmod(0o644)
    assert inspector("info", shown["checkpoint"], "--key-file", key).returncode == 2


def test_what_is_typed_wins_over_the_environment_of_any_verb(shown, tmp_path, monkeypatch):
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    monkeypatch.setenv("TORPOR_KEY_FILE", str(key))
    assert inspector("info", shown["checkpoint"]).returncode == 7  # that key is used
    for verb in ("info", "verify", "repair"):
        assert "typed" in inspector(verb, shown["checkpoint"], "--key-file", tmp_path / "typed").stderr
    monkeypatch.delenv("TORPOR_KEY_FILE")
    monkeypatch.setenv("TORPOR_PYTHON", str(tmp_path / "python"))  # of `pair` alone
    assert inspector("extract", shown["checkpoint"], "weights", "-o", tmp_path / "weights").returncode == 0
    assert (tmp_path / "weights").exists() and not (tmp_path / "python").exists()


def test_a_dry_run_is_refused_where_the_removal_would_be(shown, tmp_path):
    copy = copied(shown, tmp_path)
    for verb, path, lock in (("rm", copy, copy / "ASLEEP"), ("gc", copy.parent, copy.parent / "LOCK")):
        with lock.open("w") as held:
            lock.chmod(0o600)
            fcntl.lockf(held, fcntl.LOCK_EX)
            assert inspector(verb, path, "-n").returncode == inspector(verb, path).returncode == 8, verb
        assert inspector(verb, path, "-n").returncode == 0
    assert copy.exists()


def test_lines_of_calls_end_with_the_first_failure(tmp_path):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        mock = subprocess.Popen([BINARY, "mock", directory], stdout=subprocess.PIPE)
        try:
            mock.stdout.readline()
            session = [BINARY, "live", "--engine", directory]
            for lines, code in (("stops", 0), ("stops\nnothing\nstops", 2), ("breakpoint.remove breakpoint=99", 3)):
                done = subprocess.run(session, input=lines, capture_output=True, text=True, timeout=600)
                assert done.returncode == code, (lines, done.stdout, done.stderr)
        finally:
            mock.kill()
            mock.communicate()


def test_a_session_takes_its_lines_as_the_documentation_has_them():
    text = (ROOT_OF_TESTS.parent / "docs/console.md").read_text()
    block = text.split("# a line a call, over one connection\n")[1].split("\n```")[0]
    assert len(block.splitlines()) == 7 and " # " in block
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        mock = subprocess.Popen([BINARY, "mock", directory], stdout=subprocess.PIPE)
        try:
            mock.stdout.readline()
            session = [BINARY, "live", "--engine", directory]
            lines = block.replace("timeout=60", "timeout=0") + "\n# nothing else\nstops"
            done = subprocess.run(session, input=lines, capture_output=True, text=True, timeout=600)
        finally:
            mock.kill()
            mock.communicate()
    assert done.stderr == ""
    answers = [answer for answer in map(json.loads, done.stdout.splitlines()) if "id" in answer]
    # Candidate 17 may not be there.
    failed = {answer["id"] for answer in answers if "error" in answer}
    assert {answer["id"] for answer in answers} == set(range(1, 9)) and failed <= {6}
    assert (done.returncode == 0) == (not failed)
    assert [answer["result"].keys() for answer in answers if answer["id"] == 8] == [{"stops"}]
