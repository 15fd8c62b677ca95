"""Real checkpoints of other people's training runs, read where they lie."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from plastiscope.checkpoints import Options, discover
from plastiscope.errors import UNREADABLE, UnreadableError

CORPUS = Path(__file__).parents[2].parent / "shared" / "corpus"
pytestmark = pytest.mark.skipif(
    not CORPUS.is_dir(), reason="the folder of real checkpoints isn't beside the repository"
)


def only_run(name, **options):
    (run,) = discover(CORPUS / name, Options(**options))
    return run


def steps(run):
    return [checkpoint.step for checkpoint in run.checkpoints]


def test_willmore():
    run = only_run("willmore-pinn")
    assert steps(run) == [1, 10, 70]
    assert {c.step_source for c in run.checkpoints} == {"stored epoch"}
    (best,) = run.skipped
    assert best.name == "best_model.pt" and "a copy of the state at epoch 2" in best.reason
    states = [c.open() for c in run.checkpoints]
    for state in states:
        buffers = {n.rsplit(".", 1)[-1] for n, i in state.tensors.items() if i.kind == "buffer"}
        assert buffers == {"running_mean", "running_var", "num_batches_tracked"}
        shapes = [i.shape for i in state.tensors.values() if len(i.shape) == 2]
        widths = [shapes[0][1]] + [shape[0] for shape in shapes]
        assert widths == [12, 128, 256, 512, 256, 128, 3]
        assert state.optimizer()["param_groups"][0]["betas"] == [0.9, 0.999]
    first, last = (sum(_norms(s)) for s in (states[0], states[-1]))
    assert last < first


def _norms(state):
    return [
        float(state.read(n).norm())
        for n, i in state.tensors.items()
        if i.kind == "weight" and len(i.shape) == 2
    ]


def test_lora_roberta():
    run = only_run("lora-roberta")
    assert steps(run) == [500, 1000, 1200]
    assert {c.step_source for c in run.checkpoints} == {"trainer_state.json"}
    assert run.skipped == ()
    for checkpoint in run.checkpoints:
        state = checkpoint.open()
        ranks = state.extras["adapter"]["ranks"]
        assert len(ranks) == 36 and set(ranks.values()) == {4}
        for name in list(ranks)[:3]:
            assert state.tensors[name].shape == (768, 768)
            assert int(torch.linalg.matrix_rank(state.read(name))) <= 4
        assert not any("lora_" in name for name in state.tensors)
        assert state.stubs == ()


def test_llama2xs():
    run = only_run("llama2xs")
    state = run.checkpoints[0].open()
    assert steps(run) == [state.extras["iter_num"]]
    assert run.checkpoints[0].step_source == "stored iter_num"
    assert state.tensors["output.weight"].alias_of == "tok_embeddings.weight"
    assert state.extras["model_args"]["dim"] == 64
    assert state.optimizer() is not None


def test_zeta():
    run = only_run("zeta")
    assert steps(run) == list(range(0, 10000, 1000))
    (found,) = run.breaks
    assert (found.checkpoint, found.tensors) == ("checkpoint_5000.pt", ())
    assert "66 tensors before, 8 from step 5000" in found.reason
    assert any("zeta.nn.modules.flow_matching.FlowConfig" in note for note in run.notes)
    assert [len(c.open().tensors) for c in run.checkpoints] == [66] * 5 + [8] * 5


def test_rl_plasticity_lab():
    run = only_run("rl-plasticity-lab")
    assert steps(run) == [1, 2, 3]
    assert [(s.name, s.unreadable) for s in run.skipped] == [("sequence_batches.pt", False)]
    assert "data" in run.skipped[0].reason


def test_mlx_lora():
    run = only_run("mlx-lora")
    assert steps(run) == [100, 200]
    (copy,) = run.skipped
    assert copy.name == "adapters.safetensors"
    assert copy.reason == "bit-identical to 0000200_adapters.safetensors: counted once"
    state = run.checkpoints[0].open()
    # x out layout: q_proj of Qwen2.5-0.5B is 896 to 896, v_proj 896 to 128.
    assert state.tensors["model.layers.20.self_attn.v_proj.weight"].shape == (128, 896)
    assert set(state.extras["adapter"]["ranks"].values()) == {8}


def test_rl_trained_agents():
    runs = {run.name: run for run in discover(CORPUS / "rl-trained-agents")}
    assert set(runs) == {"a2c", "ars", "dqn", "her", "sac"}
    for name, run in runs.items():
        (checkpoint,) = run.checkpoints
        state = checkpoint.open()
        assert checkpoint.format == "stable-baselines3 zip"
        assert checkpoint.step_source == "stored num_timesteps"
        assert not any("optim" in n for n in state.tensors)
        assert (state.optimizer() is None) is (name == "ars")
        assert state.stubs == ()
    assert "target copy left out: q_net_target (6 tensors): --prefix q_net_target" in (
        runs["dqn"].notes
    )
    assert any("critic_target (12 tensors)" in note for note in runs["sac"].notes)
    target = only_run("rl-trained-agents/dqn", prefix="q_net_target").checkpoints[0].open()
    assert len(target.tensors) == 6


def test_the_same_network_in_two_formats():
    """One network from two trainings: equal tables, and each file's own values."""
    from safetensors.torch import load_file

    folder = CORPUS / "burn" / "mnist"
    first, second = (run.checkpoints[0].open() for run in discover(folder))
    assert dict(first.tensors) == dict(second.tensors)
    for state, expected in (
        (first, torch.load(folder / "mnist.pt", map_location="cpu", weights_only=True)),
        (second, load_file(folder / "mnist.safetensors")),
    ):
        assert set(state.tensors) == set(expected)
        assert all(torch.equal(state.read(n), t) for n, t in expected.items())


def reader(name):
    (run,) = discover(CORPUS / "burn" / "reader" / name)
    state = run.checkpoints[0].open()
    return {n: state.read(n) for n in state.tensors}


DTYPES = {
    "bfloat16": torch.bfloat16,
    "bool": torch.bool,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
}


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype(name):
    path = CORPUS / "burn" / "reader" / f"{name}.pt"
    expected = torch.load(path, weights_only=True)["tensor"]
    (found,) = reader(f"{name}.pt").values()
    assert found.dtype == DTYPES[name] and torch.equal(found, expected)


def flat(tree, prefix=""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        elif isinstance(value, torch.Tensor):
            yield f"{prefix}{key}", value


@pytest.mark.parametrize(
    "name",
    [
        *("simple_legacy", "legacy_with_offsets", "legacy_shared_storage"),
        *("legacy_uncloned_views", "state_dict", "nested_dict", "mixed_types", "buffers"),
        *("parameter",),
    ],
)
def test_structures_equal_torchs_own_reading(name):
    path = CORPUS / "burn" / "reader" / f"{name}.pt"
    expected = dict(flat(torch.load(path, weights_only=True)))
    found = reader(f"{name}.pt")
    assert set(found) == set(expected)
    assert all(torch.equal(found[n], t) for n, t in expected.items())


def test_special_values():
    (values,) = reader("special_values.pt").values()
    assert bool(values.isnan().any()) and math.inf in values and -math.inf in values


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tar_float32", {"tensor": torch.float32}),
        ("tar_float64", {"tensor": torch.float64}),
        ("tar_int64", {"tensor": torch.int64}),
        ("tar_2d_tensor", {"matrix": torch.float32}),
        ("tar_weight_bias", {"weight": torch.float32, "bias": torch.float32}),
    ],
)
def test_tar_archives(name, expected):
    assert {n: t.dtype for n, t in reader(f"{name}.tar").items()} == expected


def test_tar_values():
    found = reader("tar_weight_bias.tar")
    expected = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])
    torch.testing.assert_close(found["weight"], expected)
    torch.testing.assert_close(found["bias"], torch.tensor([0.01, 0.02]))


def test_broken_and_empty_are_one_line_each():
    with pytest.raises(UnreadableError, match=r"broken.pt: text, not weights: 'abc'"):
        discover(CORPUS / "burn" / "reader" / "broken.pt")
    with pytest.raises(UnreadableError, match=r"empty.pt: no data in it"):
        discover(CORPUS / "burn" / "reader" / "empty.pt")


def test_the_reader_folder_as_a_whole():
    runs = discover(CORPUS / "burn" / "reader")
    assert len(runs) == 35 - 1
    skipped = {s.name: s.unreadable for run in runs for s in run.skipped}
    assert skipped == {"broken.pt": True, "empty.pt": True}


@pytest.mark.parametrize(
    "name",
    [
        *("tensor_bool_proto3", "tensor_float32_proto1", "tensor_float32_proto2_zip"),
        *("tensor_float32_proto4_zip", "tensor_float32_proto5", "tensor_int8_proto5_zip"),
    ],
)
def test_pickle_protocols(name):
    path = CORPUS / "gopickle" / f"{name}.pt"
    expected = torch.load(path, weights_only=False)
    state = discover(path)[0].checkpoints[0].open()
    assert torch.equal(state.read("tensor"), expected)


def test_lfs_pointers():
    with pytest.raises(UnreadableError) as raised:
        discover(CORPUS / "lfs-pointers")
    assert raised.value.status == UNREADABLE
    for size, name in ((3146230, "10000"), (3147055, "20000"), (3147883, "30000")):
        line = f"rl_model_{name}_steps.zip: Git LFS pointer, {size} bytes expected: git lfs pull"
        assert line in str(raised.value)
