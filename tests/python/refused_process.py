"""A process of the tests: an engine with features that cannot be preserved.

Prints what became of a sleep and of its requests.
"""

import json
import sys
from pathlib import Path

from conftest import InProcess

from torpor import errors

FEATURES = {
    "enable_lora": True,
    "max_lora_rank": 8,
    "kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"},
}
NAMES = ["greedy", "seeded", "prefix-a", "stops"]  # vLLM's LoRA on the CPU does not give a prompt's log probabilities


def main() -> None:
    model, directory = sys.argv[1:]
    one = InProcess(Path(model), Path(directory), **FEATURES)
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
