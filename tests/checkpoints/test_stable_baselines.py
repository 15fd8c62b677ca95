"""Reinforcement-learning zips: the policy's tensors only, its pickles never decoded."""

from __future__ import annotations

import io
import json
import zipfile

import numpy as np
import torch

from plastiscope.checkpoints import discover


def torch_bytes(content) -> bytes:
    out = io.BytesIO()
    torch.save(content, out)
    return out.getvalue()


def policy_zip(path, sd, data: str):
    optimizer = {"state": {0: {"step": torch.tensor(4.0)}}, "param_groups": [{"lr": 3e-4}]}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", data)
        archive.writestr("policy.pth", torch_bytes(sd))
        archive.writestr("policy.optimizer.pth", torch_bytes(optimizer))
        archive.writestr("pytorch_variables.pth", torch_bytes({"log_ent_coef": torch.zeros(1)}))
        archive.writestr("_stable_baselines3_version", "2.3.0")


def test_policy_only_and_the_optimizer_apart(tmp_path, table, one_run):  # L05
    garbage = {"clip_range": {":type:": "function", ":serialized:": "gASV!!garbage"}}
    data = json.dumps({**garbage, "num_timesteps": 10000})
    policy_zip(tmp_path / "rl_model_10000_steps.zip", table(1), data)
    policy_zip(tmp_path / "rl_model_9000_steps.zip", table(2), "{not json")
    run = one_run(tmp_path)
    assert [c.step for c in run.checkpoints] == [9000, 10000]
    for checkpoint, seed in zip(run.checkpoints, (2, 1), strict=True):
        state = checkpoint.open()
        assert set(state.tensors) == set(table())
        assert all(torch.equal(state.read(n), t) for n, t in table(seed).items())
        assert state.optimizer()["param_groups"] == [{"lr": 3e-4}]
        assert state.stubs == ()


def test_a_torch_file_is_a_zip_too(tmp_path, table, tensors):  # L05
    torch.save(table(), tmp_path / "policy.zip")
    assert set(tensors(tmp_path / "policy.zip")) == set(table())
    assert discover(tmp_path / "policy.zip")[0].checkpoints[0].format == "torch zip"


def test_stable_baselines_2(tmp_path, tensors):
    arrays = {"model/pi_fc0/w:0": np.ones((4, 8)), "model/pi_fc0/b:0": np.zeros(8)}
    inner = io.BytesIO()
    np.savez(inner, **arrays)
    path = tmp_path / "ppo2.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", json.dumps({"gamma": 0.99}))
        archive.writestr("parameter_list", json.dumps(list(arrays)))
        archive.writestr("parameters", inner.getvalue())
    found = tensors(path)
    assert {n: tuple(t.shape) for n, t in found.items()} == {
        "model.pi_fc0.w": (4, 8),
        "model.pi_fc0.b": (8,),
    }
    assert torch.equal(found["model.pi_fc0.w"], torch.ones(4, 8).double())
