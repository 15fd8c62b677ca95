"""Where the weights are, under which names, what is a buffer, what is one tensor twice."""

from __future__ import annotations

import json
import types

import pytest
import torch
from safetensors.torch import save_file, save_model

from plastiscope.checkpoints import Options, discover
from plastiscope.checkpoints.names import unwrap
from plastiscope.errors import UnreadableError


def opened(path, **options):
    return discover(path, Options(**options))[0].checkpoints[0].open()


def saved(folder, content, name="a.pt"):
    torch.save(content, folder / name)
    return opened(folder / name)


WRAPPED = {
    "plain": "{}",
    "ddp": "module.{}",
    "compiled": "_orig_mod.{}",
    "ddp of compiled": "module._orig_mod.{}",
    "compiled ddp": "_orig_mod.module.{}",
    "twice": "module.module.{}",
    "fsdp": "_fsdp_wrapped_module._checkpoint_wrapped_module.{}",
}


@pytest.mark.parametrize("pattern", WRAPPED.values(), ids=WRAPPED)
def test_wrappers_give_identical_tables(tmp_path, table, pattern):  # L14
    weights = table(
        0, **{"h.0.attn.weight": (4, 4), "h.10.attn.weight": (4, 4), "head.weight": (2, 4)}
    )
    plain = saved(tmp_path, weights, "plain.pt")
    wrapped = saved(tmp_path, {pattern.format(n): t for n, t in weights.items()}, "wrapped.pt")
    assert plain.tensors == wrapped.tensors
    assert list(wrapped.tensors) == list(weights)
    assert all(torch.equal(wrapped.read(n), t) for n, t in weights.items())


def test_wrapper_inside_the_key(tmp_path, table):  # L14
    state = saved(tmp_path, table(0, **{"h.0._orig_mod.attn.weight": (2, 2), "x.bias": (3,)}))
    assert list(state.tensors) == ["h.0.attn.weight", "x.bias"]


def test_a_real_module_called_module_survives(tmp_path, table):  # L14
    names = {"module.fc.weight": (2, 3), "fc.weight": (3, 2)}
    state = saved(tmp_path, table(0, **names))
    assert {n: i.shape for n, i in state.tensors.items()} == names
    assert set(unwrap(["a.module.b", "c.d"]).values()) == {"a.module.b", "c.d"}
    # Two names that would collapse keep their wrappers, all of them.
    both = ["_orig_mod.a.w", "a.w"]
    assert list(unwrap(both).values()) == both


def test_lightning_keeps_the_model_and_lists_the_rest(tmp_path):  # L15
    content = {
        "state_dict": {
            "net.0.weight": torch.randn(4, 3),
            "net.2.weight": torch.randn(2, 4),
            "loss.weight": torch.ones(2),
            "metric.total": torch.tensor(7),
        },
        "epoch": 1,
        "global_step": 20,
        "pytorch-lightning_version": "2.5.5",
    }
    state = saved(tmp_path, content, "epoch=1-step=20.ckpt")
    assert list(state.tensors) == ["0.weight", "2.weight"]
    assert state.stripped == "net."
    assert any("loss (1 tensors), metric (1 tensors)" in note for note in state.notes)
    picked = opened(tmp_path / "epoch=1-step=20.ckpt", prefix="loss")
    assert list(picked.tensors) == ["weight"]


def test_a_layer_called_f1_is_a_layer(tmp_path, table):
    names = {"f1.weight": (2, 2), "f2.weight": (2, 2), "acc.weight": (2, 2)}
    assert list(saved(tmp_path, table(0, **names)).tensors) == list(names)


@pytest.mark.parametrize("head", ["vit", "model", "transformer", "network"])
def test_a_models_own_prefix_stays(tmp_path, table, head):  # L15
    names = {f"{head}.layer.0.weight": (2, 2), f"{head}.layer.1.weight": (2, 2)}
    assert list(saved(tmp_path, table(0, **names)).tensors) == list(names)
    assert saved(tmp_path, {"model": table(0, **names)}).stripped == ""


@pytest.mark.parametrize(
    "key",
    ["state_dict", "model", "model_state_dict", "network", "net", "module", "params", "policy"],
)
def test_weights_under_the_usual_keys(tmp_path, table, key):  # L15
    model = torch.nn.Linear(4, 8)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    content = {key: table(), "optimizer": optimizer.state_dict(), "iter": 5, "lr": 0.1}
    state = saved(tmp_path, content)
    assert list(state.tensors) == list(table())
    assert state.extras["iter"] == 5 and state.extras["lr"] == 0.1
    kept = state.optimizer()
    assert kept is not None and kept["param_groups"][0]["lr"] == 1e-3
    assert torch.equal(kept["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


def test_dicts_of_known_trainers(tmp_path, table):
    sd = table()
    nano = {
        "model": sd,
        "optimizer": {"state": {}, "param_groups": []},
        "model_args": {"n": 2},
        "iter_num": torch.tensor([500]),
        "best_val_loss": torch.tensor(1.5),
        "config": {"a": 1},
    }
    kuangliu = {"net": {f"module.{k}": v for k, v in sd.items()}, "acc": 93.1, "epoch": 12}
    rsl = {
        "model_state_dict": sd,
        "optimizer_state_dict": {"state": {}, "param_groups": []},
        "iter": 100,
        "infos": None,
    }
    tianshou = {f"actor.{k}": v for k, v in sd.items()} | {f"critic.{k}": v for k, v in sd.items()}
    for name, content in {"nano": nano, "kuangliu": kuangliu, "rsl": rsl}.items():
        state = saved(tmp_path, content, f"{name}.pt")
        assert list(state.tensors) == list(sd), name
    assert opened(tmp_path / "nano.pt").extras["iter_num"] == 500
    assert opened(tmp_path / "nano.pt").extras["model_args"] == {"n": 2}
    assert len(saved(tmp_path, tianshou, "tianshou.pt").tensors) == 8
    apart = {"actor": sd, "critic": sd, "actor_optimizer": {"state": {}, "param_groups": []}}
    state = saved(tmp_path, apart, "apart.pt")
    assert {n.split(".")[0] for n in state.tensors} == {"actor", "critic"}
    listed = [sd, {"state": {}, "param_groups": []}]
    assert list(saved(tmp_path, listed, "listed.pt").tensors) == list(sd)


def test_ema_branch_is_named_and_never_mixed(tmp_path, table):  # L18
    for step in range(3):
        content = {"model": table(step), "ema": table(step + 100), "step": step}
        torch.save(content, tmp_path / f"step_{step}.pt")
    torch.save({"model": table(3), "step": 3}, tmp_path / "step_3.pt")
    (run,) = discover(tmp_path)
    states = [c.open() for c in run.checkpoints]
    assert [s.branch for s in states] == ["raw"] * 4
    for step, state in enumerate(states):
        assert torch.equal(state.read("fc1.weight"), table(step)["fc1.weight"])
    (averaged,) = discover(tmp_path, Options(weights="ema"))
    assert [c.step for c in averaged.checkpoints] == [0, 1, 2]
    assert averaged.skipped[0].name == "step_3.pt" and averaged.skipped[0].unreadable
    assert "no EMA weights" in averaged.skipped[0].reason
    state = averaged.checkpoints[1].open()
    assert state.branch == "ema"
    assert torch.equal(state.read("fc1.weight"), table(101)["fc1.weight"])
    with pytest.raises(UnreadableError, match=r"step_3.pt: no EMA weights"):
        discover(tmp_path, Options(weights="ema", strict=True))


def ema_layouts(sd, averaged):
    flat = {f"ema_{name.replace('.', '_')}": t for name, t in averaged.items()}
    lit = {f"model_ema.{name.replace('.', '')}": t for name, t in averaged.items()}
    return {
        "nested": {"model": sd, "model_ema": {"module": averaged, "decay": 0.9}},
        "list": {"model": sd, "ema": {"decay": 0.9, "shadow_params": list(averaged.values())}},
        "flattened": {"state_dict": {**sd, **flat}},
        "lit": {"state_dict": {**sd, **lit, "model_ema.decay": torch.tensor(0.9)}},
        "callback": {"state_dict": sd, "callbacks": {"EMACallback": {"ema": averaged}}},
    }


@pytest.mark.parametrize("layout", ["nested", "list", "flattened", "lit", "callback"])
def test_ema_layouts(tmp_path, table, layout):  # L18
    content = ema_layouts(table(1), table(2))[layout]
    torch.save(content, tmp_path / "a.pt")
    for branch, seed in (("raw", 1), ("ema", 2)):
        state = opened(tmp_path / "a.pt", weights=branch)
        assert set(state.tensors) == set(table()), branch
        assert all(torch.equal(state.read(n), t) for n, t in table(seed).items()), branch


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10, 4)
        self.body = torch.nn.Linear(4, 4)
        self.lm_head = torch.nn.Linear(4, 10, bias=False)
        self.lm_head.weight = self.embed.weight


def test_tied_head_is_counted_once(tmp_path):  # L17
    model = Tied()
    values = model.embed.weight.detach().clone()
    torch.save(model.state_dict(), tmp_path / "a.bin")
    save_model(model, str(tmp_path / "b.safetensors"))
    separate = {n: t.clone() for n, t in model.state_dict().items()}
    torch.save(separate, tmp_path / "d.pt")
    save_file(separate, tmp_path / "d.safetensors")
    for name in ("a.bin", "b.safetensors", "d.pt", "d.safetensors"):
        state = opened(tmp_path / name)
        assert state.tensors["lm_head.weight"].alias_of == "embed.weight", name
        assert state.tensors["embed.weight"].alias_of is None, name
        assert torch.equal(state.read("lm_head.weight"), values), name
        owned = [i for i in state.tensors.values() if i.alias_of is None]
        assert sum(torch.Size(i.shape).numel() for i in owned) == 60, name


def test_only_the_head_is_stored(tmp_path):  # L17 (c)
    values = torch.randn(10, 4)
    state = saved(tmp_path, {"lm_head.weight": values, "body.weight": torch.randn(4, 4)})
    assert state.tensors["lm_head.weight"].alias_of is None
    assert torch.equal(state.read("lm_head.weight"), values)


def test_absent_head_is_tied_by_the_config_only(tmp_path):  # L17 (b)
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    save_file({"model.embed_tokens.weight": torch.randn(10, 4)}, folder / "model.safetensors")
    config = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    state = opened(folder)
    assert state.tensors["lm_head.weight"].alias_of == "model.embed_tokens.weight"
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert "lm_head.weight" not in opened(folder).tensors


def test_equal_values_elsewhere_are_no_tie(tmp_path):
    zeros = {"a.weight": torch.zeros(4, 4), "b.weight": torch.zeros(4, 4)}
    state = saved(tmp_path, zeros)
    assert all(i.alias_of is None for i in state.tensors.values())


BUFFERS = {
    "h.0.attn.bias": torch.ones(1, 1, 16, 16, dtype=torch.uint8),
    "h.1.attn.bias": torch.ones(1, 1, 16, 16),
    "h.0.attn.masked_bias": torch.tensor(-1e4),
    "bn.num_batches_tracked": torch.tensor(3),
    "bn.running_mean": torch.zeros(4),
    "bn.running_var": torch.ones(4),
    "layers.0.attn.relative_position_index": torch.zeros(4, 4, dtype=torch.int64),
    "layers.0.attn.relative_coords_table": torch.zeros(1, 3, 3, 2),
    "layers.1.attn_mask": torch.zeros(4, 9, 9),
    "rotary_emb.inv_freq": torch.ones(8),
    "embeddings.position_ids": torch.arange(8)[None],
    "freqs_cos": torch.ones(8, 4),
    "sn.weight_u": torch.ones(4),
    "sn.weight_v": torch.ones(3),
    "pn.parametrizations.weight.0._u": torch.ones(4),
    "attn.tril": torch.ones(5, 5).tril(),
}
WEIGHTS = {
    "h.0.attn.c_attn.bias": torch.ones(12),
    "h.0.attn.c_attn.weight": torch.ones(4, 12),
    "sn.weight_orig": torch.ones(4, 3),
    "wn.weight_v": torch.ones(4, 3),
    "wn.weight_g": torch.ones(4, 1),
    "pn.parametrizations.weight.original": torch.ones(4, 3),
    "relative_position_bias_table": torch.ones(9, 2),
    "square.bias": torch.ones(4, 4),
}


def test_buffers_by_name_type_and_shape(tmp_path):  # L32
    state = saved(tmp_path, {**BUFFERS, **WEIGHTS})
    kinds = {n: i.kind for n, i in state.tensors.items()}
    assert {n for n, kind in kinds.items() if kind == "buffer"} == set(BUFFERS)
    assert {n for n, kind in kinds.items() if kind == "weight"} == set(WEIGHTS)
    weights = [state.read(n) for n, kind in kinds.items() if kind == "weight"]
    assert float(torch.cat([w.flatten() for w in weights]).abs().mean()) == 1.0


def test_placeholders_of_zero3(tmp_path):  # L22
    empty = {"a.weight": torch.empty(0), "b.weight": torch.empty(0)}
    torch.save(empty, tmp_path / "pytorch_model.bin")
    with pytest.raises(UnreadableError, match=r"placeholder weights \(ZeRO-3\)"):
        discover(tmp_path / "pytorch_model.bin")


def test_flat_parameters_are_refused(tmp_path):  # L23
    torch.save(
        {"blocks.0._fsdp_wrapped_module._flat_param": torch.randn(1000), "x.w": torch.ones(2)},
        tmp_path / "a.pt",
    )
    with pytest.raises(UnreadableError, match="sharded local state"):
        discover(tmp_path / "a.pt")


def test_other_entries_are_extras(tmp_path, table):
    content = {
        "state_dict": table(),
        "args": types.SimpleNamespace(lr=0.1),
        "history": [1, 2],
        "rng": torch.zeros(16, dtype=torch.uint8),
        "note": "hello",
    }
    state = saved(tmp_path, content)
    assert state.extras["args"] == {"lr": 0.1}
    assert state.extras["history"] == [1, 2]
    assert state.extras["rng"] == "tensor [16] uint8"
    assert list(state.tensors) == list(table())


def test_prefix_picks_and_unknown_prefix_lists(tmp_path, table):
    content = {"generator": table(1), "discriminator": table(2)}
    torch.save(content, tmp_path / "gan.pt")
    state = opened(tmp_path / "gan.pt", prefix="discriminator")
    assert torch.equal(state.read("fc1.weight"), table(2)["fc1.weight"])
    assert set(state.tensors) == set(table())
    with pytest.raises(UnreadableError, match="known: discriminator, generator"):
        discover(tmp_path / "gan.pt", Options(prefix="encoder"))


def test_target_copies_are_left_out_and_named(tmp_path, table):
    sd = table()
    content = {f"{k}.{n}": t for k in ("critic", "critic_target") for n, t in sd.items()}
    state = saved(tmp_path, content)
    assert {n.split(".")[0] for n in state.tensors} == {"critic"}
    assert "target copy left out: critic_target (4 tensors): --prefix critic_target" in state.notes


def test_packed_integers(tmp_path):
    values = torch.randn(6, 8)
    scale = values.abs().amax(1)
    packed = (values / scale[:, None] * 127).round().to(torch.int8)
    content = {
        "a.weight": packed,
        "a.SCB": scale,
        "b.weight": torch.randint(0, 255, (24, 1), dtype=torch.uint8),
        "b.weight.absmax": torch.ones(2),
    }
    state = saved(tmp_path, content)
    torch.testing.assert_close(state.read("a.weight"), values, atol=0.02, rtol=0)
    assert state.tensors["a.weight"].kind == "weight" and "a.SCB" not in state.tensors
    assert state.tensors["b.weight"].kind == "buffer"
    assert state.tensors["b.weight.absmax"].kind == "buffer"
    assert any("packed integers of [24, 1], layout unknown" in note for note in state.notes)


def test_gptq_against_an_oracle(tmp_path):
    generator = torch.Generator().manual_seed(0)
    rows, columns, groups = 16, 8, 2
    codes = torch.randint(0, 16, (rows, columns), generator=generator)
    zeros = torch.randint(1, 16, (groups, columns), generator=generator)
    scales = torch.rand(groups, columns, generator=generator)
    group = torch.arange(rows) // (rows // groups)
    packed = torch.zeros(rows // 8, columns, dtype=torch.int64)
    for row in range(rows):
        packed[row // 8] |= codes[row] << (4 * (row % 8))
    stored_zeros = torch.zeros(groups, columns // 8, dtype=torch.int64)
    for column in range(columns):
        stored_zeros[:, column // 8] |= (zeros[:, column] - 1) << (4 * (column % 8))
    wrapped = lambda t: torch.where(t >= 2**31, t - 2**32, t).to(torch.int32)  # noqa: E731
    content = {
        "l.qweight": wrapped(packed),
        "l.qzeros": wrapped(stored_zeros),
        "l.scales": scales,
        "l.g_idx": group.to(torch.int32),
    }
    expected = ((codes - zeros[group]).float() * scales[group]).T
    state = saved(tmp_path, content)
    assert list(state.tensors) == ["l.weight"]
    torch.testing.assert_close(state.read("l.weight"), expected)


def test_block_scaled_fp8(tmp_path):
    values = torch.randn(200, 130).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 2)
    state = saved(tmp_path, {"w.weight": values, "w.weight_scale_inv": scale})
    expected = values.float().clone()
    for i in range(2):
        for j in range(2):
            expected[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)] *= scale[i, j]
    torch.testing.assert_close(state.read("w.weight"), expected)
