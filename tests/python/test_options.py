# SPDX-License-Identifier: Apache-2.0
"""What a user may set, in additional_config and in the environment: one description of each option."""

import json
import os
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from torpor.errors import InvalidArgument
from torpor.vllm import configuration, serve
from torpor.vllm.asking import asks
from torpor.vllm.options import VARIABLES, Options
from torpor.vllm.server.settings import Settings, variable
from torpor.vllm.variables import OTHERS, refuse_misspelt

_NAME = (
    r"""(?:environ(?:\.get\(|\[)|setenv\(|env=\{|name: )["']?(TORPOR_[A-Z0-9_]*[A-Z0-9])"""  # where it is read or set
)
NAMES = [option.name for option in fields(Options) if option.name != "connector"]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def given(**values) -> Options:
    return Options.of(SimpleNamespace(additional_config={"torpor": values}))


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("arena_budget_bytes", "4GiB", 4 << 30),
        ("kv_budget_bytes", "300 MiB", 300 << 20),
        ("retain_checkpoint_bytes", "17", 17),
        ("retain_checkpoints", "5", 5),
        ("copy_threads", "3", 3),
        ("compression_level", "-7", -7),
        ("encrypt", "yes", True),
        ("incremental", "0", False),
        ("console", "off", "off"),
        ("checkpoint_dir", "~/x", str(Path("~/x").expanduser())),
    ],
)
def test_the_same_text_means_the_same_in_both_places(monkeypatch, name, text, value):
    assert getattr(given(**{name: text}), name) == value
    monkeypatch.setenv(f"TORPOR_{name.upper()}", text)
    assert getattr(Options.of(SimpleNamespace(additional_config=None)), name) == value


def test_values_of_their_own_type_are_taken_and_win_over_the_environment(monkeypatch):
    monkeypatch.setenv("TORPOR_RETAIN_CHECKPOINTS", "9")
    options = given(
        retain_checkpoints=3,
        retain_checkpoint_bytes=1 << 40,
        encrypt=True,
        kv_budget_bytes=None,
        checkpoint_dir=Path("/x"),
    )
    assert (options.retain_checkpoints, options.retain_checkpoint_bytes, options.encrypt) == (3, 1 << 40, True)
    assert options.kv_budget_bytes is None and options.checkpoint_dir == "/x"


@pytest.mark.parametrize(
    ("name", "wrong", "hint"),
    [
        ("arena_budget_bytes", "4 GB", "4GiB"),
        ("arena_budget_bytes", -1, "number of bytes"),
        ("arena_budget_bytes", None, "number of bytes"),
        ("retain_checkpoints", "many", "whole number"),
        ("retain_checkpoints", 2.5, "whole number"),
        ("retain_checkpoints", True, "whole number"),
        ("copy_threads", 0, "use 1 to 256"),
        ("encrypt", "perhaps", "1 or 0"),
        ("encrypt", 1, "true or false"),
        ("compression", "gzip", "'none' or 'bf16' or 'zstd'"),
        ("cpu_linear", "", "'packed' or 'plain'"),
        ("checkpoint_dir", 7, "use text"),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_it_was_given_by(monkeypatch, name, wrong, hint):
    with pytest.raises(InvalidArgument) as refused:
        given(**{name: wrong})
    assert refused.value.what.startswith(f"{name} is ") and hint in refused.value.next_step
    if isinstance(wrong, str):
        monkeypatch.setenv(f"TORPOR_{name.upper()}", wrong)
        with pytest.raises(InvalidArgument) as refused:
            Options.of(SimpleNamespace(additional_config=None))
        assert refused.value.what.startswith(f"TORPOR_{name.upper()} is ")


def test_an_option_that_does_not_exist_is_named():
    with pytest.raises(InvalidArgument, match="unknown torpor option speed") as refused:
        given(speed=9)
    assert refused.value.next_step.startswith("The options are ")  # none is like it
    with pytest.raises(InvalidArgument, match=r"did you mean compression\? "):
        given(compresion="zstd")


def test_a_word_of_the_server_that_does_not_exist_is_named_with_the_nearest_one(capsys):
    with pytest.raises(SystemExit):
        serve.take_options(["MODEL", "--torpor-checkpoint-dirr=/d"])
    said = capsys.readouterr().err
    assert "there is no option --torpor-checkpoint-dirr; did you mean --torpor-checkpoint-dir?" in said


def test_an_option_of_the_kv_connector_has_no_word_of_the_server(capsys):
    with pytest.raises(SystemExit):
        serve.take_options(["MODEL", "--torpor-host-bytes", "4GiB"])
    said = capsys.readouterr().err
    assert """--additional-config '{"torpor": {"offload": "eager", "host_bytes": "…"}}'""" in said


def test_a_standby_has_the_directory_of_its_owner(monkeypatch, capsys, tmp_path):
    for name in ("TORPOR_SERVER_STANDBY_OF", "TORPOR_CHECKPOINT_DIR"):
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    directory = str(tmp_path)
    assert serve.take_options(["MODEL", "--torpor-standby-of", directory]) == ["MODEL"]
    assert os.environ["TORPOR_CHECKPOINT_DIR"] == directory
    serve.take_options(["MODEL", "--torpor-standby-of", directory, "--torpor-checkpoint-dir", f"{directory}/."])
    with pytest.raises(SystemExit):
        serve.take_options(["MODEL", "--torpor-standby-of", directory, "--torpor-checkpoint-dir", "/other"])
    assert f"--torpor-standby-of {directory} and --torpor-checkpoint-dir /other differ" in capsys.readouterr().err


def test_options_in_the_file_of_vllms_config(monkeypatch, capsys, tmp_path):
    names = ("TORPOR_CHECKPOINT_DIR", "TORPOR_COMPRESSION", "TORPOR_SERVER_WAKE_ON_REQUEST", "TORPOR_INCREMENTAL")
    for name in names:
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    file = tmp_path / "config.yaml"
    arguments = ["MODEL", "--config", str(file)]

    def write(**more) -> None:
        lines = {"port": 8001, "torpor-checkpoint-dir": str(tmp_path), "torpor_compression": "zstd"} | more
        file.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in lines.items()))

    write(**{"torpor-wake-on-request": True, "torpor-incremental": False})
    assert serve.take_options([*arguments, "--torpor-compression", "none"]) == arguments
    assert [os.environ.get(name) for name in names] == [str(tmp_path), "none", "1", None]
    for wrong, why in {
        "torpor-checkpoint-dirr": "config.yaml: there is no option --torpor-checkpoint-dirr; did you mean --torpor-",
        "torpor-incremental": "config.yaml: torpor-incremental has one value: write a word or a number, not [1]",
    }.items():
        write(**{wrong: [1] if wrong.endswith("incremental") else "/d"})
        with pytest.raises(SystemExit):
            serve.take_options(arguments)
        assert why in capsys.readouterr().err
    for text in ("- a list", "{", ""):  # vLLM says what is wrong with it
        file.write_text(text)
        assert serve.take_options(arguments) == arguments
    file.unlink()
    assert serve.take_options(arguments) == arguments and serve.take_options(["--config"]) == ["--config"]


@pytest.mark.parametrize("name", NAMES)
def test_each_option_says_what_it_does(name, capsys):
    with pytest.raises(SystemExit):
        serve.take_options(["--torpor-help"])
    text = " ".join(capsys.readouterr().out.split())
    [option] = [each for each in fields(Options) if each.name == name]
    assert f"--torpor-{name.replace('_', '-')}" in text and " ".join(option.metadata["help"].split())[:40] in text


def test_a_choice_that_is_none_is_refused_before_an_engine_starts(capsys):
    with pytest.raises(SystemExit):
        serve.take_options(["--torpor-compression", "gzip"])
    assert "invalid choice: 'gzip'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("engine", "asked"),
    [
        ({"additional_config": {"torpor": {}}}, True),
        ({"additional_config": {"torpor": {"enabled": True}}}, True),
        ({"additional_config": {"torpor": {"enabled": False}}}, False),
        ({"additional_config": {}}, False),
        ({"additional_config": None}, False),
        ({"model_config": SimpleNamespace(sleep_mode_backend="torpor")}, True),
        ({"sleep_mode_backend": "torpor"}, True),
        ({"load_config": SimpleNamespace(load_format="torpor")}, True),
        ({"load_format": "auto"}, False),
        ({"parallel_config": SimpleNamespace(worker_cls="torpor.vllm.worker.a:b/C")}, True),
        ({"parallel_config": SimpleNamespace(worker_cls="vllm.v1.worker.gpu_worker.Worker")}, False),
        ({"kv_transfer_config": SimpleNamespace(kv_connector="TorporConnector")}, True),
        ({"kv_transfer_config": {"kv_connector": "TorporConnector"}}, True),
        ({"kv_transfer_config": SimpleNamespace(kv_connector="NixlConnector")}, False),
    ],
)
def test_who_asks_for_torpor(monkeypatch, engine, asked):
    assert asks(SimpleNamespace(**engine)) is asked
    monkeypatch.setenv("TORPOR_CHECKPOINT_DIR", "/x")
    assert asks(SimpleNamespace(**engine)) or engine == {"additional_config": {"torpor": {"enabled": False}}}


@pytest.mark.parametrize(
    ("given_name", "meant"),
    [
        ("TORPOR_ENCRYPTED", "did you mean TORPOR_ENCRYPT?"),
        ("TORPOR_KEYFILE", "did you mean TORPOR_KEY_FILE?"),
        ("TORPOR_CHECKPOINTS_DIR", "did you mean TORPOR_CHECKPOINT_DIR?"),
        ("TORPOR_OFFLOAD", 'additional_config={"torpor": {"offload"'),
    ],
)
def test_a_variable_with_nearly_the_name_of_another_is_not_ignored(monkeypatch, given_name, meant):
    monkeypatch.setenv(given_name, "1")
    with pytest.raises(InvalidArgument, match=given_name) as refused:
        configuration.finish(SimpleNamespace(additional_config={"torpor": {}}))
    assert meant in str(refused.value)
    with pytest.raises(InvalidArgument, match=given_name):
        Settings.from_environment()
    given()  # of an engine that runs: a program may set others meanwhile


@pytest.mark.parametrize(
    ("given_name", "meant"),
    [
        ("TORPOR_ON_DISCONNECT", "TORPOR_SERVER_ON_DISCONNECT"),
        ("TORPOR_SERVER_ENCRYPT", "TORPOR_ENCRYPT"),
        ("TORPOR_SERVER_ADMIN_KEY", "TORPOR_ADMIN_KEY"),
    ],
)
def test_a_server_does_not_ignore_one_with_the_wrong_beginning(monkeypatch, given_name, meant):
    monkeypatch.setenv(given_name, "1")
    with pytest.raises(InvalidArgument, match=given_name) as refused:
        Settings.from_environment()
    assert f"did you mean {meant}?" in str(refused.value)


@pytest.mark.parametrize("service", ["TORPOR", "TORPOR_ENCRYPT", "TORPOR_SERVER", "TORPOR_KEY_FILE"])
def test_variables_of_others_stop_no_engine(monkeypatch, service):
    port = f"{service}_PORT"
    of_kubernetes = [f"{service}_SERVICE_HOST", f"{service}_SERVICE_PORT", f"{service}_SERVICE_PORT_HTTP", port]
    of_kubernetes += [f"{port}_8000_TCP{end}" for end in ("", "_PROTO", "_PORT", "_ADDR")]
    known = {*VARIABLES, *OTHERS, *map(variable, fields(Settings))}
    assert not known & set(of_kubernetes)
    of_neighbours = ("TORPOR_CONSOLE_URL", "TORPOR_API_KEY_FILE", "TORPOR_API_KEY_2")
    others = ("TORPOR_VERSION", "TORPOR_HOME", "TORPOR_MODEL", "TORPOR_NAMESPACE", *OTHERS)
    for name in (*of_kubernetes, *of_neighbours, *others):
        monkeypatch.setenv(name, "1")
    refuse_misspelt(VARIABLES)
    monkeypatch.delenv("TORPOR_ADMIN_KEY_FILE")
    Settings.from_environment()


def test_every_variable_that_a_page_or_a_test_has_is_known():
    root = Path(__file__).parents[2]
    page = (root / "docs/reference/environment.md").read_text()
    of_page = set(re.findall(r"^(?:- |### )`(TORPOR_[A-Z0-9_]*[A-Z0-9])`", page, re.MULTILINE))
    assert of_page == {*VARIABLES, *OTHERS, *map(variable, fields(Settings))}
    files = [*root.glob("tests/**/*.py"), *root.glob("tools/*/*.py"), *root.glob("deploy/**/*.y*ml")]
    named = {name for each in files if each != Path(__file__) for name in re.findall(_NAME, each.read_text())}
    for name in named - of_page:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv(name, "1")
            refuse_misspelt(VARIABLES, map(variable, fields(Settings)))
