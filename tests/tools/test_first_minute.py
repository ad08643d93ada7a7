# SPDX-License-Identifier: Apache-2.0
"""What tools/dev says before it installs anything: help, wrong options, the steps and how long each takes here."""

import json
import os
import re
import subprocess

import pytest
from conftest import ROOT
from devtool import commands, durations, setup
from devtool.durations import Durations, Step, about

MODES = ("server", "offload", "console", "remote", "sessions", "standby", "features", "gpu-path")


@pytest.fixture
def nothing_there(tmp_path, monkeypatch):
    """A machine with system packages, and nothing else yet."""
    monkeypatch.setattr(setup, "missing_packages", lambda *_: [])
    for name, folder in (("CACHE", "cache"), ("BUILT", "built"), ("PORTABLE", "portable"), ("SITE", "site")):
        monkeypatch.setattr(setup, name, tmp_path / folder)
    return tmp_path


def dev(tmp_path, *words) -> subprocess.CompletedProcess:
    """With a cache that has nothing, and a path without apt-get and compilers."""
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": str(tmp_path / "bin"), "HOME": str(tmp_path)}
    (tmp_path / "bin").mkdir(exist_ok=True)
    (tmp_path / "bin/python3").symlink_to(os.path.realpath("/usr/bin/python3"))
    command = [tmp_path / "bin/python3", ROOT / "tools/dev", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)


def test_help_of_the_demo_needs_nothing_that_is_to_be_installed(tmp_path):
    done = dev(tmp_path, "demo", "--help")
    assert done.returncode == 0 and all(f"--{mode}" in done.stdout for mode in MODES)
    assert not (tmp_path / "cache").exists()


def test_a_wrong_option_of_the_demo_is_refused_before_anything_is_installed(tmp_path):
    done = dev(tmp_path, "demo", "--freeze-after", "0")
    assert done.returncode == 2 and "--freeze-after is 0; use 1 or more" in done.stderr
    assert not (tmp_path / "cache").exists()


def test_the_demo_says_first_what_it_will_do_and_how_long_each_step_takes(tmp_path):
    (tmp_path / "cache").touch()  # nothing can be installed below a file
    done = dev(tmp_path, "demo", "--sessions")
    assert done.returncode != 0
    lines = done.stderr.splitlines()
    assert "a chat leaves its engine" in lines[0] and "First it installs what is missing" in lines[0]
    lines_of = dict(re.split(" {2,}", line.strip()) for line in lines[1:6])
    assert [*lines_of][-1] == "the demo" and lines_of["the demo"] == "not known yet"
    assert lines_of["torch, vLLM and what they need (0.8 GB)"] == "about 3 min"
    assert (
        lines_of.get("torpor, compiled") == "about 2 min" or lines_of["torpor"] == "there"
    )  # by what this checkout has built
    assert lines[6].startswith("  in all about ") and "two idle cores" in lines[6]


def test_steps_are_those_that_are_to_be_done(nothing_there):
    parts = {step.text.split(",")[0].split(":")[0]: step.parts for step in setup.steps(portable=True)}
    assert parts["system packages"] == () and parts["torch"][0] == "venv"
    assert parts["the model"] == ("model-download", "model")
    assert parts["torpor"] == ("torpor-build", "torpor-install")
    wheels = setup.PORTABLE / setup.sources_digest()
    wheels.mkdir(parents=True)
    (wheels / "torpor-0.1.0-cp311-manylinux.whl").touch()
    (setup.environment_folder()).mkdir(parents=True)
    (setup.environment_folder() / "complete").touch()
    assert [step.parts for step in setup.steps(portable=True)][1::2] == [(), ("torpor-install",)]
    assert setup.steps(portable=False)[-1].parts == ("torpor-build", "torpor-install")
    setup.SITE.mkdir()
    (setup.SITE / "torpor-sources").write_text(f"portable {setup.sources_digest()}")
    assert setup.steps(portable=True)[-1].parts == ()


def test_each_step_that_setup_takes_has_a_duration_before_it_ran_here(nothing_there):
    known = Durations(nothing_there / "none.json")
    for step in setup.steps():
        assert not step.parts or known.expected(step.parts) is not None, step.text


def test_what_a_step_took_is_said_the_next_time(tmp_path):
    file = tmp_path / "cache/durations.json"
    known = Durations(file)
    steps = [Step("system packages"), Step("torpor, compiled", ("torpor-build",)), Step("the demo", ("demo",))]
    lines_of = known.plan(steps)
    assert lines_of[0].endswith("there") and "as on two idle cores" in lines_of[-1]
    known.remember("torpor-build", 400.04)
    assert known.plan(steps)[1].endswith("about 7 min") and "two idle cores" in known.plan(steps)[-1]
    known.remember("demo", 21.0)
    lines_of = known.plan(steps)
    assert lines_of[2] == "  the demo          about 20 s" and lines_of[-1].startswith(
        "  in all about 7 min, as the last time"
    )
    assert json.loads(file.read_text()) == {"torpor-build": 400.0, "demo": 21.0}


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"demo": "long", "torch": -1}', '{"demo": Infinity, "torch": NaN}', "null"]
)
def test_durations_that_cannot_be_read_are_forgotten(tmp_path, content):
    (tmp_path / "durations.json").write_text(content)
    known = Durations(tmp_path / "durations.json")
    assert known.known() == {} and known.expected(["demo"]) == durations.TYPICAL["demo"]
    known.remember("demo", 3)
    assert known.known() == {"demo": 3}


def test_each_kind_of_demo_has_a_duration_of_its_own():
    names = [commands._demo_name([f"--{mode}"], None) for mode in MODES]
    assert names == [f"demo-{mode}" for mode in MODES] and commands._demo_name(["--to", "host"], None) == "demo"
    options = (ROOT / "tools/demo/demo_options.py").read_text()
    assert {*re.findall(r'"--([\w-]+)",\s+action="store_true"', options)} == {*MODES, "json"}


def test_what_is_not_known_is_not_made_up(tmp_path):
    known = Durations(tmp_path / "durations.json")
    lines_of = known.plan([Step("the model", ("model",)), Step("the demo", ("demo-remote",))])
    assert lines_of[1].endswith("not known yet") and lines_of[2].startswith(
        "  in all about 20 s and what is not known yet"
    )


def test_durations_are_rounded_as_people_say_them():
    said = {0.2: "1 s", 4.4: "4 s", 14: "about 10 s", 88: "about 90 s", 91: "about 2 min", 270: "about 4 min"}
    assert {seconds: about(seconds) for seconds in said} == said
