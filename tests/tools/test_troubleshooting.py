# SPDX-License-Identifier: Apache-2.0
"""docs/troubleshooting.md shows texts as they are printed: each is in the sources, and some are provoked here."""

import functools
import os
import re
import shutil
from types import SimpleNamespace

import pytest
from conftest import ROOT, inspector

from torpor import errors
from torpor.vllm import connector_options
from torpor.vllm.options import Options
from torpor.vllm.server.settings import Settings

PAGE = (ROOT / "docs/troubleshooting.md").read_text()
SHOWN = [text.replace("\n", " ").strip() for text in re.findall(r"^```\n(.*?)^```$", PAGE, flags=re.M | re.S)]
# What stands for something else in a text.
NAMES = r"\b(?:PATH|FIELD|THEIRS|OURS|ID|VERSION|STATE|REASON|NAME|N)\b"
PLACES = ("base", "allocator", "checkpoint", "engine", "scheduler_state", "bindings/python/torpor")


@functools.cache
def sources() -> str:
    """All text of the library, the pieces of each literal put together."""
    paths = (path for place in PLACES for path in sorted((ROOT / place).rglob("*")) if path.suffix in (".cpp", ".py"))
    text = "\n".join(path.read_text() for path in paths)
    return re.sub(r'"\s*\n\s*f?"', "", text)


def pieces(text: str) -> list[str]:
    """Return the parts of a text that stand in one literal: without names, and without what joins an error's parts."""
    parts = re.split(rf"{NAMES}|\(|\) \(|\)$|^request |: |, this engine has ", text)
    return [part.strip(" ;:,?") for part in parts if len(part.strip(" ;:,?")) > 5]


def pattern(text: str) -> str:
    return re.sub(NAMES, "(?:.+)", re.escape(text))


@pytest.mark.parametrize("text", SHOWN)
def test_each_text_is_one_that_the_code_prints(text):
    found = pieces(text)
    assert found, text
    assert [part for part in found if part not in sources() and part not in KNOWN] == []


# Values, and what is put together of several words.
KNOWN = {"weights, kv_cache", "torpor is for vLLM 0.31, 0.32, 0.33, this is", "umask 077"}


def test_a_text_that_nothing_prints_is_found():
    found = pieces("port N is occupied (end what listens there)")
    assert [part for part in found if part not in sources()] == ["is occupied"]


def is_shown(printed: str) -> bool:
    """Return whether the page has the text, or its beginning."""
    return any(re.search(pattern(text), printed) for text in SHOWN)


@pytest.fixture
def checkpoints(tmp_path):
    copy = shutil.copytree(ROOT / "examples/checkpoints", tmp_path / "checkpoints")
    copy.chmod(0o700)
    return copy


def printed_by(*arguments) -> str:
    done = inspector(*arguments)
    assert done.returncode != 0
    return done.stderr.strip()


def key_file(path, mode: int = 0o600):
    path.write_bytes(os.urandom(32))
    path.chmod(mode)
    return path


def test_texts_about_keys_and_modes_are_those_that_are_printed(checkpoints, tmp_path):
    assert is_shown(printed_by("info", checkpoints, "--key-file", key_file(tmp_path / "open", 0o644)))
    assert is_shown(printed_by("info", checkpoints, "--key-file", key_file(tmp_path / "other")))
    empty = tmp_path / "empty"
    empty.mkdir(0o700)
    assert is_shown(printed_by("info", empty))
    checkpoints.chmod(0o777)
    assert is_shown(printed_by("info", checkpoints))
    wide = tmp_path / "wide"
    wide.mkdir()
    shutil.copytree(ROOT / "examples/checkpoints", wide / "inner")
    wide.chmod(0o777)
    assert is_shown(printed_by("info", wide / "inner"))
    assert not is_shown(printed_by("info", tmp_path / "nowhere"))


@pytest.mark.parametrize(
    "call",
    [
        lambda: Options.of(SimpleNamespace(additional_config={"torpor": {"checkpoint_dirr": "/x"}})),
        lambda: connector_options.ConnectorOptions.of({"offload": "eager"}),
        lambda: Settings(response_log="off", on_disconnect="continue"),
    ],
)
def test_texts_about_options_are_those_that_are_printed(call):
    with pytest.raises(errors.InvalidArgument) as raised:
        call()
    assert is_shown(str(raised.value))


def test_every_entry_says_what_to_do():
    for entry in re.split(r"^### ", PAGE, flags=re.M)[1:]:
        assert "**What to do.**" in entry or "\n## " in entry, entry.splitlines()[0]
    for heading in re.findall(r"^- \[.*\]\(#(.*)\)$", PAGE, flags=re.M):
        assert heading in {line[3:].lower().replace(" ", "-") for line in PAGE.splitlines() if line.startswith("## ")}
