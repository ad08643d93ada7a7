# SPDX-License-Identifier: Apache-2.0
"""Errors are torpor's by name and by code, and the builtins that they resemble."""

import copy
import errno

import pytest

from torpor import _core, errors

BUILTINS = {
    "failed_precondition": RuntimeError,
    "not_found": LookupError,
    "resource_exhausted": MemoryError,
    "unauthenticated": PermissionError,
    "unsupported": NotImplementedError,
    "timeout": TimeoutError,
    "io": OSError,
    "device": RuntimeError,
}


@pytest.mark.parametrize("cls", errors.Error.__subclasses__(), ids=lambda cls: cls.code)
def test_an_error_is_what_it_resembles_and_stays_whole_over_a_process_border(cls):
    error = cls("what", "do this", native=errno.ENOSPC, state_changed=True)
    assert isinstance(error, BUILTINS.get(cls.code, errors.Error)) and str(error) == "what (do this)"
    for again in (errors.from_dict(error.to_dict()), copy.deepcopy(error)):
        assert type(again) is cls and str(again) == str(error) and again.to_dict() == error.to_dict()
        assert (again.what, again.next_step, again.native, again.state_changed) == ("what", "do this", 28, True)
    if isinstance(error, errors.FileError):
        assert error.errno == errno.ENOSPC


def test_errors_of_the_core_are_these(tmp_path):
    with pytest.raises(LookupError) as missing:
        _core.SleepController(object(), {"directory": str(tmp_path), "key_file": "/nowhere"})
    assert isinstance(missing.value, errors.Error)
