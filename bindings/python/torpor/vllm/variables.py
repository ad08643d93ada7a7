# SPDX-License-Identifier: Apache-2.0
"""Refuses variables of the environment that were meant for torpor and have another name than torpor reads.

An engine that ignored TORPOR_ENCRYPTED would write its prompts in plain text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from difflib import get_close_matches

from torpor.errors import InvalidArgument
from torpor.vllm import connector_options

# Those that are no option of an engine and do not begin with TORPOR_SERVER_.
OTHERS = frozenset({
    "TORPOR_ADMIN_KEY", "TORPOR_ADMIN_KEY_FILE", "TORPOR_API_KEY", "TORPOR_ARENA_KEEP_BYTES", "TORPOR_BINARY",
    "TORPOR_CUDA_GATHER_BELOW_BYTES", "TORPOR_HOST_DEVICE_BYTES", "TORPOR_HOST_DEVICE_SHARED_FILE",
    "TORPOR_KEEP_BACKUPS", "TORPOR_LOG", "TORPOR_MEMORY_DEVICE", "TORPOR_PYTHON",
})  # fmt: skip
_OF_SERVER = "TORPOR_SERVER_"
_SIMILAR = 0.8  # of 1: a name that is less so is somebody else's
# Kubernetes gives these to containers for a Service whose name begins with "torpor".
_OF_SERVICE = re.compile(r".*_(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
# Names that people give to what is near torpor: where it is, a further key.
_OF_NEIGHBOURS = re.compile(r".*_(URL|HOST)|TORPOR_API_KEY_.+")


def refuse_misspelt(of_engine: frozenset[str], of_server: Iterable[str] = ()) -> None:
    """Raise InvalidArgument for a variable whose name is like one that torpor reads, or that of an option without a
    variable. Variables of the server count if its are given."""
    server = frozenset(of_server)
    known = of_engine | OTHERS | server
    plain = {_plain(name): name for name in known}
    for given in sorted(os.environ):
        if not given.startswith("TORPOR_") or given in known or _OF_SERVICE.fullmatch(given):
            continue
        if _OF_NEIGHBOURS.fullmatch(given):
            continue
        if given.startswith(_OF_SERVER) and not server:
            continue
        option = given.removeprefix("TORPOR_").lower()
        if option in connector_options.NAMES:
            raise InvalidArgument(
                f"{given}: the option {option} has no environment variable",
                f'give it in additional_config={{"torpor": {{"{option}": …}}}}',
            )
        if near := get_close_matches(_plain(given), list(plain), 1, _SIMILAR):
            raise InvalidArgument(
                f"torpor knows no environment variable {given}", f"did you mean {plain[near[0]]}? Else rename it"
            )


def _plain(name: str) -> str:
    """Return what tells names apart."""
    return name.removeprefix(_OF_SERVER).removeprefix("TORPOR_").replace("_", "")
