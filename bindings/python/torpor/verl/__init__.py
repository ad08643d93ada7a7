# SPDX-License-Identifier: Apache-2.0
"""verl's vLLM rollout, of which half-done requests stay over sleep and weight sync: `rollout.name=torpor`.

    VERL_USE_EXTERNAL_MODULES=torpor.verl python -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=torpor …

verl imports this module in each of its processes. It registers names only; the classes are in torpor.verl.server.
"""

from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplicaRegistry

__all__ = ["NAME"]

NAME = "torpor"  # of the rollout, in verl's configuration


def _replica() -> type:
    from torpor.verl.server import TorporReplica  # it imports vLLM

    return TorporReplica


RolloutReplicaRegistry.register(NAME, _replica)
base._ROLLOUT_REGISTRY[NAME, "async"] = base._ROLLOUT_REGISTRY["vllm", "async"]
