# SPDX-License-Identifier: Apache-2.0
"""engine_checks.py with faults planted in torpor and in its own checks: each must be told as failed."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools/gpu_check"))

import engine_checks


def plant() -> None:
    import checks

    from torpor.vllm import runner_v2

    correct = runner_v2._correct_slot

    def other_last_token(runner, slot, item, given):
        correct(runner, slot, item, given)
        runner.req_states.last_sampled_tokens[slot] = 300

    def left_asleep(one, options):
        one.begin(5)
        one.llm.sleep(level=1, preserve_state=True)
        raise RuntimeError("planted")

    runner_v2._correct_slot = other_last_token
    checks.repeats = left_asleep
    checks.generators = lambda one, options: os._exit(3)


if __name__ == "__main__":
    if "--part" in sys.argv:  # a process with an engine
        plant()
    sys.exit(engine_checks.main(sys.argv[1:], [__file__]))
