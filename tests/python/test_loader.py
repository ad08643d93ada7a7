# SPDX-License-Identifier: Apache-2.0
"""load_format="torpor": a new process fills its weights from a checkpoint and reads no weights of the model's own.

That it goes on with each kind of model, and with several ranks: test_features, test_other_processes, test_pipeline and
test_data_parallel start their new processes so.
"""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import result_of, without_weights
from requests_of_tests import final, run

HERE = Path(__file__).parent
NAMES = ["greedy", "seeded"]


def second(zygote, model, store, path, *further) -> dict:
    words = [HERE / "loader_process.py", "second", model, store, path, *map(json.dumps, further)]
    return result_of(zygote.run(words))


def checkpoint_without_weights(one, tmp_path: Path) -> Path:
    """A store whose only checkpoint was made while serving: none before it has weights to be linked."""
    aside, store = tmp_path / "aside", tmp_path / "bare"
    aside.mkdir(), store.mkdir()
    for each in Path(one.directory).glob("g-*"):
        each.rename(aside / each.name)
    made = Path(one.llm.checkpoint().checkpoint)
    made.rename(store / made.name)
    for each in aside.iterdir():
        each.rename(Path(one.directory) / each.name)
    return store


@pytest.mark.long
@pytest.mark.slow
def test_a_real_model_goes_on_with_the_very_next_token(zygote, real_model, tmp_path):
    store, bare = tmp_path / "store", without_weights(real_model, tmp_path / "model")
    slept = result_of(zygote.run([HERE / "loader_process.py", "first", real_model, store]))
    woken = second(zygote, bare, store, slept["path"], {})
    assert final(slept["given"] | woken["answers"]) == slept["expected"]
    assert woken["recomputed"] == 0


@pytest.mark.core
def test_weights_are_read_once_and_what_does_not_fit_is_refused_by_name(one, zygote, tiny_model, tmp_path):
    expected = json.loads(json.dumps(one.expected))
    given = json.loads(json.dumps(one.begin(7, NAMES)))
    path = one.llm.sleep(level=1, preserve_state=True, to="disk").checkpoint
    one.llm.wake_up()
    bare_store = checkpoint_without_weights(one, tmp_path)
    serving = one.llm.checkpoint().checkpoint
    run(one.engine)

    damaged = Path(shutil.copytree(path, tmp_path / "g-000001"))
    piece = next(one.runner.model.parameters()).data[300].numpy().tobytes()
    # One of its files has it; which one depends on what the engine's earlier checkpoints had already.
    [(file, chunks)] = [(each, each.read_bytes()) for each in damaged.iterdir() if piece in each.read_bytes()]
    assert chunks.count(piece) == 1
    file.write_bytes(chunks.replace(piece, bytes([piece[0] ^ 1]) + piece[1:]))
    bare, other = (without_weights(tiny_model, tmp_path / name) for name in ("model", "other"))
    config = json.loads((other / "config.json").read_text()) | {"num_hidden_layers": 3}
    (other / "config.json").write_text(json.dumps(config))

    def from_checkpoint(where, **options) -> dict:
        return options | {"model_loader_extra_config": {"checkpoint": str(where)}}

    half = (
        "import ctypes; from torpor.vllm import memory; ctypes.memset(memory.being_loaded()._weights_address, 1, 4096)"
    )
    wrong = {
        "damaged": from_checkpoint(damaged),
        "no weights in the newest": from_checkpoint(bare_store),
        "no such checkpoint": from_checkpoint(tmp_path / "nowhere"),
        "another option": {"model_loader_extra_config": {"checkpoints": path}},
        "another model": from_checkpoint(path, model=str(other)),
        "another dtype": from_checkpoint(path, dtype="bfloat16"),
        "otherwise packed": from_checkpoint(path, torpor={"cpu_linear": "plain"}),
        "more kept beside the weights": from_checkpoint(path, process="layer.scale_of_weights = 2.5"),
        "weights written to": from_checkpoint(path, process=half),
    }
    woken = second(zygote, bare, one.directory, path, wrong, serving, str(tiny_model))
    why = {
        "damaged": "weights.*digest",
        "no weights in the newest": re.escape(f"{bare_store}/g-000001 has no weights: it was written without"),
        "no such checkpoint": "nowhere",
        "another option": 'give {"checkpoint": …}',
        "another model": "another model or configuration: model_config is .* there and .* here",
        "another dtype": "another model or configuration: .*dtype is torch.float32 there and torch.bfloat16 here",
        "otherwise packed": "another model or configuration: cpu_linear is packed there and plain here",
        "more kept beside the weights": "scale_of_weights and .* more came out otherwise",
        "weights written to": "vLLM has written into the weights after they were filled",
    }
    for name, refused in woken["refused"].items():
        assert re.search(why[name], refused), (name, refused)
    assert final(given | woken["answers"]) == {name: expected[name] for name in NAMES} and woken["recomputed"] == 0
    assert woken["reloaded"] == {name: expected[name] for name in NAMES}  # from files, as ever
    # Neither the wake nor its comparison read the weights again: all that it moved were blocks.
    [loaded] = woken["loaded"].values()
    [all_moved] = woken["woken"].values()
    assert loaded > 0 and all_moved - loaded == woken["blocks"] > 0


def test_a_layout_from_a_file_is_looked_at_before_it_is_believed():
    import torch

    from torpor.errors import Damaged, Incompatible
    from torpor.vllm import weights_layout

    model = torch.nn.Linear(4, 3, bias=False)
    place = [64, "torch.float32", [3, 4], [4, 1]]

    def offsets(**changed) -> dict:
        layout = {"bytes": 128, "parameters": {"weight": place}, "beside": {"scale": "00"}} | changed
        return weights_layout.offsets_of(model, weights_layout.parse(json.dumps(layout)))

    assert offsets() == {model.weight.data_ptr(): 64}
    for broken in (
        {"bytes": -1}, {"bytes": "128"}, {"beside": []}, {"beside": {"a": 1}}, {"parameters": {"weight": 64}},
        {"parameters": {"weight": [64.5, *place[1:]]}}, {"parameters": {"weight": [64, 1, [3, 4], [4, 1]]}},
        {"parameters": {"weight": [64, "torch.float32", [3, 4]]}}, {"parameters": {"weight": [*place[:3], [None]]}},
    ):  # fmt: skip
        with pytest.raises(Damaged, match="does not say how its weights lie"):
            offsets(**broken)
    with pytest.raises(Damaged):
        weights_layout.parse("{")
    for elsewhere in (-1, -64, 66, 81, 84, 1 << 60):  # before, between elements, over the end
        with pytest.raises(Incompatible, match="weight lies outside of the region there"):
            offsets(parameters={"weight": [elsewhere, *place[1:]]})
    with pytest.raises(Incompatible, match="weight is not there"):
        offsets(parameters={})
    with pytest.raises(Incompatible, match=r"weight is \['torch.float16'.* there and \['torch.float32'.* here"):
        offsets(parameters={"weight": [64, "torch.float16", *place[2:]]})


def test_what_has_not_been_shown_is_refused(monkeypatch):
    from vllm.config.load import LoadConfig

    from torpor.errors import Unsupported
    from torpor.vllm import memory
    from torpor.vllm.loader import TorporLoader

    loader = TorporLoader(LoadConfig(load_format="torpor"))
    model = SimpleNamespace(quantization="fp8")
    with pytest.raises(Unsupported, match="the memory of torpor, which does not hold this engine's"):
        loader.load_model(None, model)
    monkeypatch.setattr(memory, "_being_loaded", SimpleNamespace(filled_from=None))
    with pytest.raises(Unsupported, match='load_format="torpor" with the quantization fp8'):
        loader.load_model(None, model)
