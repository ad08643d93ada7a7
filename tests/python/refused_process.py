# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: an engine with a feature that cannot be preserved.

Prints what became of a sleep and of its requests.
"""

import json
import sys
from pathlib import Path

from conftest import InProcess

from torpor import errors

NAMES = ["greedy", "seeded", "stops"]  # shorter than a block: the connector keeps nothing of them


def main() -> None:
    model, directory = sys.argv[1:]
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    connector["kv_connector_extra_config"] = {"shared_storage_path": f"{directory}-kv"}
    one = InProcess(Path(model), Path(directory), kv_transfer_config=connector)
    expected = one.finish(one.begin(names=NAMES))
    answers = one.begin(10, NAMES)
    try:
        one.llm.sleep(level=1, preserve_state=True)
    except errors.Unsupported as problem:
        result = {"what": problem.what, "next_step": problem.next_step, "state_changed": problem.state_changed}
    result |= {"asleep": one.llm.is_sleeping(), "served_on": one.finish(answers) == expected}
    one.begin(10, NAMES)
    result["without_state"] = one.llm.sleep(level=1).changed
    one.llm.wake_up()
    result["woken"] = one.finish(one.begin(names=NAMES)) == expected
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
