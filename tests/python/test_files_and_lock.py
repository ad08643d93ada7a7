# SPDX-License-Identifier: Apache-2.0
"""No binding calls a file with the interpreter's lock held: the module checks it here (bindings/module_files.h)."""

import os

import pytest
from test_values import busy_scheduler

from torpor import _core, errors

assert "TORPOR_CHECK_FILE_CALLS" in os.environ  # conftest.py; the engine tests run with it too


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(bytes(range(32)))
    path.chmod(0o600)
    return str(path)


def request(request_id: str) -> dict:
    return busy_scheduler(0, 1)["scheduler"]["requests"][0] | {"id": request_id}


def answers(tmp_path, **options) -> _core.DeliveryLog:
    return _core.DeliveryLog({"directory": str(tmp_path / "answers"), "engine": {"model": "a"}} | options)


def answer(request_id: str) -> dict:
    return {"request": request(request_id), "response": request_id, "tenant": "", "choice": 0, "front": {}}


def test_answers(tmp_path, key_file):
    for key in ({}, {"key_file": key_file, "encrypt": True}):
        directory = tmp_path / str(len(key))
        directory.mkdir()
        log = answers(directory, **key)
        log.start(answer("a"))
        log.step([{"id": "a", "at": 0, "tokens": [1], "text": "x"}])
        log.sync()
        assert log.part("a")["text"] == "x" and log.position("a")["call"] == 0
        del log  # the files are closed
        assert answers(directory, **key).part("a")["text"] == "x"


def test_a_log_that_begins_anew_while_it_is_written(tmp_path):
    log = answers(tmp_path, file_bytes=1000)
    log.start(answer("a"))
    for at in range(8):
        log.step([{"id": "a", "at": at, "tokens": [1], "text": "x" * (1 << 20)}])
    log.sync()
    del log
    assert len(answers(tmp_path).part("a")["text"]) == 8 << 20


def test_checkpoints(tmp_path, key_file):
    with pytest.raises(errors.NotFound):
        _core.list_checkpoints(str(tmp_path / "none"))
    (tmp_path / "store").mkdir(mode=0o700)
    assert _core.list_checkpoints(str(tmp_path / "store"), key_file) == []
    with pytest.raises(errors.NotFound):
        _core.read_checkpoint(str(tmp_path / "store"), key_file)


def test_memory_of_a_rank(key_file):
    memory = _core.RankMemory({"key_file": key_file})
    memory.free(memory.allocate("weights", "w", 1 << 20))
    assert memory.states() == {}
