# SPDX-License-Identifier: Apache-2.0
"""torpor.verl under the calls of verl's trainers: verl's real server, a real AsyncLLM, weights by verl's own transfer.

verl has an environment of its own beside that of the tests (tools/devtool/trainers.py), made when first needed.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import result_of

HERE = Path(__file__).parent
pytestmark = [pytest.mark.long, pytest.mark.slow]
TOKENS = 60
ASLEEP = {"weights": "detached", "kv_cache": "detached"}


@pytest.fixture(scope="module")
def run(tiny_model, real_model, tmp_path_factory):
    sys.path.append(str(HERE.parents[1] / "tools"))
    from devtool import trainers
    from tiny_model import make_model

    python = trainers.environment("verl")
    other = make_model(tmp_path_factory.mktemp("other"), real_model, seed=8)
    words = [python, HERE / "verl_process.py", tiny_model, other]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    return result_of(
        subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=900, env=environment)
    )


def drawn(answers: list[dict]) -> list[tuple]:
    return [(answer["stop_reason"], answer["token_ids"]) for answer in answers]


def steps(answers: list[dict]) -> set[tuple]:
    return {(each["extra_fields"]["min_global_steps"], each["extra_fields"]["max_global_steps"]) for each in answers}


def close(one: list[dict], other: list[dict]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(a["log_probs"] == pytest.approx(b["log_probs"], abs=1e-3) for a, b in pairs)


def test_it_is_a_rollout_of_its_own_in_verls_registries(run):
    assert run["prefix"] == "torpor_" and run["adapter"] == "ServerAdapter"


def test_its_replica_waits_for_no_request_to_end(run):
    assert run["replica"] == ["sleep", "release_kv_cache"]


def test_half_done_rollouts_stay_while_the_trainer_has_the_memory(run):
    expected, same = drawn(run["undisturbed"]), run["same"]
    assert all(reason == "completed" and len(tokens) == TOKENS for reason, tokens in expected)
    assert same["answer"] == {"aborted_count": 0, "request_ids": []}
    assert same["asleep"] == ASLEEP and same["left"] == [0]
    assert drawn(same["answers"]) == expected and close(same["answers"], run["undisturbed"])
    assert steps(same["answers"]) == {(1, 2)}
    assert same["recomputed"] > 4 * 24  # prompts, and what had been drawn
    assert same["late_waits"] and same["late"][0]["stop_reason"] == "completed"


def test_a_pause_without_new_weights_computes_nothing_again(run):
    assert drawn(run["unchanged"]["answers"]) == drawn(run["undisturbed"])
    assert run["unchanged"]["recomputed"] == 0


def test_a_sync_from_elsewhere_frees_the_kv_cache_alone(run):
    separate = run["separate"]
    assert separate["asleep"] == ASLEEP | {"weights": "attached"}
    assert drawn(separate["answers"]) == drawn(run["undisturbed"]) and steps(separate["answers"]) == {(2, 3)}


def test_new_weights_draw_the_rest_and_nobody_finds_kv_of_the_old(run):
    other, undisturbed = run["other"], run["other_undisturbed"]
    assert drawn(undisturbed) != drawn(run["undisturbed"])
    assert steps(other["answers"]) == {(10, 11)}
    for answer, old, new in zip(other["answers"], run["undisturbed"], undisturbed, strict=True):
        assert answer["token_ids"][:12] == old["token_ids"][:12] != new["token_ids"][:12]
        assert answer["token_ids"] != old["token_ids"]
    assert [other["answers"][number]["token_ids"] for number in (0, 2)] == run["continued"]


def test_a_replica_that_leaves_ends_its_requests_and_comes_back(run):
    for leaving in run["leaving"]:
        assert leaving["answer"]["aborted_count"] == 4
        assert {answer["stop_reason"] for answer in leaving["answers"]} == {"aborted"}
        assert all(12 <= len(answer["token_ids"]) < TOKENS for answer in leaving["answers"])
        assert leaving["late"] == [leaving["late"][0] | {"stop_reason": "aborted", "token_ids": []}]
        assert leaving["asleep"] == ASLEEP and drawn(leaving["after"]) == drawn(run["undisturbed"])


def test_nobody_runs_on_half_an_update(run):
    failing = run["failing"]
    assert "no_such_argument" in failing["error"]
    assert failing["refused"].startswith("WrongState: an update of the weights has failed")
    assert drawn(failing["answers"]) == drawn(run["undisturbed"])


def test_kept_kv_is_not_computed_again_and_not_found_by_others(run):
    kept = run["kept"]
    assert drawn(kept["answers"]) == drawn(run["other_undisturbed"]) and steps(kept["answers"]) == {(11, 12)}
    assert kept["recomputed"] == run["kept_separate"]["recomputed"] == 0
    assert drawn(run["kept_separate"]["answers"]) != drawn(run["other_undisturbed"])  # weights are others again
    assert drawn(run["afterwards"]) == drawn(run["undisturbed"])


def test_what_is_not_offered_is_refused_by_name(run):
    recompute, keep, *refused = run["kv"]
    assert (recompute, keep) == ("recompute", "keep")
    assert [each.split(":")[0] for each in (*refused, run["lora"])] == ["InvalidArgument"] * 2 + ["Unsupported"]
    assert "speed" in refused[1] and "LoRA" in run["lora"]


def test_verls_own_pause_does_not_fit_this_vllm(run):
    """Why it is not called: its argument is gone from vLLM."""
    assert "wait_for_inflight_requests" in run["stock"]
