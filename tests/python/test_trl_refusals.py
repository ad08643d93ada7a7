# SPDX-License-Identifier: Apache-2.0
"""What torpor.trl refuses, with stand-ins for the modules of TRL."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
from torpor import errors


@pytest.fixture
def trainer(monkeypatch):
    trl, generation = ModuleType("trl"), ModuleType("trl.generation.vllm_generation")
    trl.GRPOTrainer, generation.extract_logprobs = type("GRPOTrainer", (), {}), None
    for name, module in (
        ("trl", trl),
        ("trl.generation", ModuleType("trl.generation")),
        (generation.__name__, generation),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "torpor.trl", raising=False)
    made = importlib.import_module("torpor.trl").PartialRolloutGRPOTrainer
    monkeypatch.delitem(sys.modules, "torpor.trl")
    return made.__new__(made)


def test_evaluation_draws_no_rollouts_that_would_be_trained_on(trainer):
    trainer.model, trainer.num_generations = SimpleNamespace(training=False), 2
    with pytest.raises(errors.Unsupported, match="evaluation"):
        trainer._generate_and_score_completions([{"prompt": "once"}] * 2)


@pytest.mark.parametrize(
    ("regex", "options"), [("a+", {}), (None, {"structured_outputs": {"regex": "a+"}}), (None, {"stop": ["."]})]
)
def test_structured_outputs_are_refused_wherever_they_are_asked_for(trainer, regex, options):
    trainer.vllm_generation = SimpleNamespace(
        mode="colocate", enable_sleep_mode=True, structured_outputs_regex=regex, generation_kwargs=options,
        _llm_weights_sleeping=False, sync_weights=None,
    )  # fmt: skip
    trainer.use_vllm, trainer.accelerator = True, SimpleNamespace(num_processes=1)
    trainer.args = SimpleNamespace(eval_strategy="no")
    trainer.tools = trainer.environment_factories = trainer.rollout_func = None
    trainer._metrics, trainer._tokenize_prompts = {}, None
    if options.get("stop"):
        trainer._refuse_what_is_not_offered()
        return
    with pytest.raises(errors.Unsupported, match="with structured outputs"):
        trainer._refuse_what_is_not_offered()
