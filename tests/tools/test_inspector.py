"""The inspector on a checkpoint that a real engine wrote. Exit codes: tools/torpor/README.md."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import inspector


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


def test_info_tells_what_is_in_it(shown):
    info = as_json("info", shown["checkpoint"])
    assert info["requests"]["running"] == 8
    assert {m["tag"] for m in info["memory"]} == {"weights", "kv_cache"}
    assert info["fingerprint"]["architecture"] == "LlamaForCausalLM"
    assert sum(s["stored_bytes"] for s in info["sections"]) < 1e6
    assert as_json("info", Path(shown["checkpoint"]).parent)["path"] == info["path"]  # the latest of a directory
    assert "LlamaForCausalLM" in inspector("info", shown["checkpoint"]).stdout


def test_requests_lists_each_with_its_progress(shown):
    requests = as_json("requests", shown["checkpoint"])["requests"]
    assert len(requests) == 8
    assert sum(r["output_tokens"] for r in requests) == shown["tokens_before_sleep"]
    assert all(r["queue"] == "running" and r["blocks"] > 0 and r["computed_tokens"] == r["prompt_tokens"] + r["output_tokens"] - 1 for r in requests)
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
        (["explode", "/tmp"], 2, ""),
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
    manifest[80] ^= 1
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
