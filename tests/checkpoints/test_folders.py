"""Checkpoints that are a folder: Trainer, shards with an index, distributed, ZeRO, FSDP."""

from __future__ import annotations

import json
import pickle
import warnings

import pytest
import torch
from safetensors.torch import save_file

from plastiscope.checkpoints import Options, discover
from plastiscope.errors import UnreadableError


def trainer_folder(folder, sd, step):
    folder.mkdir(parents=True)
    save_file(sd, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "hidden_size": 8}))
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "epoch": 1.5}))
    state = {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.5}]}
    torch.save(state, folder / "optimizer.pt")
    torch.save({"cpu": torch.zeros(8, dtype=torch.uint8)}, folder / "rng_state.pth")
    torch.save({"last_epoch": 3}, folder / "scheduler.pt")


def test_trainer_run(tmp_path, table, one_run):
    for step in (50, 200, 1000):
        trainer_folder(tmp_path / f"checkpoint-{step}", table(step), step)
    run = one_run(tmp_path)
    assert [(c.name, c.step) for c in run.checkpoints] == [
        ("checkpoint-50", 50),
        ("checkpoint-200", 200),
        ("checkpoint-1000", 1000),
    ]
    assert {c.step_source for c in run.checkpoints} == {"trainer_state.json"}
    state = run.checkpoints[1].open()
    assert state.extras["config"] == {"model_type": "bert", "hidden_size": 8}
    assert state.extras["trainer_state"]["global_step"] == 200
    assert state.optimizer()["param_groups"] == [{"lr": 0.5}]
    assert torch.equal(state.read("fc2.weight"), table(200)["fc2.weight"])
    assert run.skipped == ()


def test_final_model_beside_the_steps_is_collapsed(tmp_path, table, one_run):
    for step in (10, 20):
        trainer_folder(tmp_path / f"checkpoint-{step}", table(step), step)
    save_file(table(20), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    run = one_run(tmp_path)
    assert [c.step for c in run.checkpoints] == [10, 20]
    (skipped,) = run.skipped
    assert skipped.name == "model.safetensors" and "checkpoint-20: counted once" in skipped.reason


def test_one_folder_named_directly(tmp_path, table, one_run):
    trainer_folder(tmp_path / "checkpoint-50", table(), 50)
    run = one_run(tmp_path / "checkpoint-50")
    assert [c.step for c in run.checkpoints] == [50]


def test_broken_optimizer_is_one_line_when_asked(tmp_path, table, one_run):
    trainer_folder(tmp_path / "checkpoint-50", table(), 50)
    (tmp_path / "checkpoint-50" / "optimizer.pt").write_bytes(b"")
    state = one_run(tmp_path).checkpoints[0].open()
    with pytest.raises(UnreadableError, match=r"optimizer.pt: empty file"):
        state.optimizer()


def test_models_saved_by_transformers(tmp_path, one_run):
    transformers = pytest.importorskip("transformers", reason="transformers isn't installed")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "checkpoint-1")
    model.save_pretrained(tmp_path / "checkpoint-2", max_shard_size="20KB")
    assert list((tmp_path / "checkpoint-2").glob("*-of-*.safetensors"))
    run = one_run(tmp_path)
    assert [c.step for c in run.checkpoints] == [1, 2]
    assert run.breaks == () and run.skipped == ()
    expected = model.state_dict()
    for checkpoint in run.checkpoints:
        state = checkpoint.open()
        assert set(state.tensors) == set(expected)
        assert state.tensors["lm_head.weight"].alias_of == "model.embed_tokens.weight"
        assert all(torch.equal(state.read(n), t) for n, t in expected.items())
        counted = [i for i in state.tensors.values() if i.alias_of is None and i.kind == "weight"]
        assert sum(torch.Size(i.shape).numel() for i in counted) == model.num_parameters()


SHARDS = [f"model-0000{at}-of-00003.safetensors" for at in (1, 2, 3)]


def sharded(folder, seed=0):
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    sd = {f"l{i}.weight": torch.randn(4, 4, generator=generator) for i in range(6)}
    table = {}
    for at, shard in enumerate(SHARDS):
        part = {n: sd[n] for n in list(sd)[2 * at : 2 * at + 2]}
        save_file(part, folder / shard)
        table.update(dict.fromkeys(part, shard))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return sd


def test_sharded_model(tmp_path, one_run):
    sd = sharded(tmp_path / "checkpoint-5")
    state = one_run(tmp_path).checkpoints[0].open()
    assert list(state.tensors) == list(sd)
    assert all(torch.equal(state.read(n), t) for n, t in sd.items())


def test_missing_shard_is_named(tmp_path):  # L09 (a)
    sharded(tmp_path / "checkpoint-5")
    (tmp_path / "checkpoint-5" / SHARDS[1]).unlink()
    with pytest.raises(UnreadableError, match=f"1 of 3 shards that are missing: {SHARDS[1]}"):
        discover(tmp_path)


def test_old_shard_outside_the_index_is_ignored(tmp_path, one_run):  # L09 (b)
    sd = sharded(tmp_path / "checkpoint-5")
    old = "model-00004-of-00004.safetensors"
    save_file({"old.weight": torch.ones(2)}, tmp_path / "checkpoint-5" / old)
    run = one_run(tmp_path)
    assert list(run.checkpoints[0].open().tensors) == list(sd)
    assert f"not in the index, ignored: {old}" in run.notes


def test_stale_index_is_refused(tmp_path):  # L09 (c)
    sharded(tmp_path / "checkpoint-5")
    save_file({"l2.weight": torch.ones(2)}, tmp_path / "checkpoint-5" / SHARDS[1])
    with pytest.raises(UnreadableError, match=rf"stale: {SHARDS[1]} holds no tensor l3.weight"):
        discover(tmp_path)


def test_index_without_shards(tmp_path):  # L09 (d)
    sharded(tmp_path / "checkpoint-5")
    for shard in SHARDS:
        (tmp_path / "checkpoint-5" / shard).unlink()
    with pytest.raises(UnreadableError, match="3 of 3 shards that are missing"):
        discover(tmp_path)


def test_pointer_among_real_shards(tmp_path):  # L08
    sharded(tmp_path / "checkpoint-5")
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 99\n"
    (tmp_path / "checkpoint-5" / SHARDS[2]).write_bytes(pointer)
    with pytest.raises(UnreadableError, match=rf"{SHARDS[2]}: Git LFS pointer, 99 bytes expected"):
        discover(tmp_path)


def test_shards_without_an_index(tmp_path):
    sd = sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    state = discover(tmp_path)[0].checkpoints[0].open()
    assert all(torch.equal(state.read(n), t) for n, t in sd.items())
    (tmp_path / SHARDS[0]).unlink()
    with pytest.raises(UnreadableError, match="1 of 3 shards are missing"):
        discover(tmp_path)


def distributed(folder, step):
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch.distributed.checkpoint as dcp

        content = {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": step}
        dcp.save(content, checkpoint_id=str(folder))
    return model.state_dict()


def test_distributed_checkpoints(tmp_path, one_run):  # L24
    expected = {step: distributed(tmp_path / f"step-{step}", step) for step in (3, 12)}
    run = one_run(tmp_path)
    assert [(c.step, c.format) for c in run.checkpoints] == [
        (3, "distributed checkpoint"),
        (12, "distributed checkpoint"),
    ]
    for checkpoint in run.checkpoints:
        state = checkpoint.open()
        sd = expected[checkpoint.step]
        assert set(state.tensors) == set(sd)
        assert all(torch.equal(state.read(n), t) for n, t in sd.items())
    assert any("the optimizer's" in note for note in run.notes)


def test_chunks_of_several_processes_are_joined(tmp_path):  # L24
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    folder = tmp_path / "step-9"
    folder.mkdir()
    values = torch.arange(35.0).reshape(5, 7)
    chunks, places = [], {}
    for rank, (row, rows) in enumerate(((0, 3), (3, 2))):
        offset, extent = torch.Size([row, 0]), torch.Size([rows, 7])
        torch.save(values[row : row + rows].clone(), folder / f"__{rank}_0.distcp")
        size = (folder / f"__{rank}_0.distcp").stat().st_size
        chunks.append(ChunkStorageMetadata(offset, extent))
        places[MetadataIndex("a.weight", offset)] = _StorageInfo(f"__{rank}_0.distcp", 0, size)
    table = TensorStorageMetadata(TensorProperties(), values.shape, chunks)
    metadata = Metadata({"a.weight": table}, storage_data=places)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    state = discover(tmp_path)[0].checkpoints[0].open()
    assert torch.equal(state.read("a.weight"), values)
    (folder / "__1_0.distcp").unlink()
    with pytest.raises(UnreadableError, match=r"incomplete: __1_0.distcp is missing"):
        discover(tmp_path)


def test_incomplete_distributed_folder_is_skipped(tmp_path, one_run):  # L24
    for step in (3, 12):
        distributed(tmp_path / f"step-{step}", step)
    (tmp_path / "step-12" / ".metadata").unlink()
    (tmp_path / "latest").symlink_to("step-99")
    run = one_run(tmp_path)
    assert [c.step for c in run.checkpoints] == [3]
    reasons = {s.name: (s.reason, s.unreadable) for s in run.skipped}
    assert reasons["step-12"][0].startswith("incomplete distributed checkpoint: no .metadata")
    assert reasons["latest"] == ("dangling symbolic link to step-99", False)
    shard = tmp_path / "step-3" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:500])
    with pytest.raises(
        UnreadableError, match=r"truncated: __0_0.distcp ends before its last chunk"
    ):
        discover(tmp_path)


@pytest.fixture
def process_group(tmp_path):
    """A process group of one, over a file."""
    import torch.distributed as dist

    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_distributed_tensors_in_an_ordinary_file(tmp_path, process_group):
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    values = torch.arange(12.0).reshape(4, 3)
    mesh = init_device_mesh("cpu", (1,))
    torch.save({"w.weight": distribute_tensor(values, mesh, [Shard(0)])}, tmp_path / "a.pt")
    state = discover(tmp_path / "a.pt")[0].checkpoints[0].open()
    # One process holds all of it; a part of it would be no data.
    assert torch.equal(state.read("w.weight"), values)


def zero_folder(folder, sd, stage, processes=2, tied=None):
    """The files of DeepSpeed's engine for one group of parameters, after its own layout."""
    folder.mkdir(parents=True)
    shapes = {n: t.shape for n, t in sd.items()}
    if stage == 3:
        parts = [[] for _ in range(processes)]
        for tensor in sd.values():
            share = -(-tensor.numel() // processes)
            flat = torch.nn.functional.pad(
                tensor.flatten(), (0, share * processes - tensor.numel())
            )
            for rank in range(processes):
                parts[rank].append(flat[rank * share : (rank + 1) * share])
        flats = [[torch.cat(part)] for part in parts]
    else:
        flat = torch.cat([t.flatten() for t in sd.values()])
        align = 2 * processes
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % align))
        flats = [[part.clone()] for part in flat.chunk(processes)]
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    placeholder = {n: torch.empty(0) if stage == 3 else t.half() for n, t in sd.items()}
    placeholder["bn.running_mean"] = torch.full((3,), 7.0)
    model = {
        "module": placeholder,
        "buffer_names": ["bn.running_mean"],
        "param_shapes": [shapes],
        "shared_params": tied or {},
        "ds_version": "0.16",
        "global_steps": 40,
    }
    names = [f"zero_pp_rank_{r}_" if stage == 3 else "" for r in range(processes)]
    for name in dict.fromkeys(names):
        torch.save(model, folder / f"{name}mp_rank_00_model_states.pt")
    for rank in range(processes):
        state = {"zero_stage": stage, "partition_count": processes, key: flats[rank]}
        torch.save(
            {"optimizer_state_dict": state},
            folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_zero_is_rebuilt_in_fp32(tmp_path, table, one_run, stage, processes):  # L22
    sd = table(0, **{"a.weight": (5, 7), "a.bias": (5,), "b.weight": (3, 5)})
    tied = {"head.weight": "a.weight"}
    zero_folder(tmp_path / "global_step40", sd, stage, processes, tied)
    (tmp_path / "latest").write_text("global_step40")
    run = one_run(tmp_path)
    (checkpoint,) = run.checkpoints
    assert (checkpoint.step, checkpoint.format) == (40, "deepspeed zero")
    state = checkpoint.open()
    for name, tensor in sd.items():
        assert torch.equal(state.read(name), tensor), name
    assert torch.equal(state.read("head.weight"), sd["a.weight"])
    assert torch.equal(state.read("bn.running_mean"), torch.full((3,), 7.0))
    assert any(f"{processes} shards of ZeRO stage {stage}" in note for note in run.notes)


def test_incomplete_zero_folder(tmp_path, table):
    zero_folder(tmp_path / "global_step40", table(), 2, 2)
    (tmp_path / "global_step40" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(UnreadableError, match="incomplete ZeRO folder: 1 of 2 shards"):
        discover(tmp_path)


def test_model_parallel_zero_names_the_converter(tmp_path, table):
    zero_folder(tmp_path / "global_step40", table(), 2, 2)
    one = tmp_path / "global_step40" / "mp_rank_00_model_states.pt"
    (tmp_path / "global_step40" / "mp_rank_01_model_states.pt").write_bytes(one.read_bytes())
    with pytest.raises(UnreadableError, match=r"zero_to_fp32\.py"):
        discover(tmp_path)


def test_trainer_folder_with_zero_inside(tmp_path, table, one_run):  # L22
    folder = tmp_path / "checkpoint-40"
    zero_folder(folder / "global_step40", table(), 3)
    torch.save({n: torch.empty(0) for n in table()}, folder / "pytorch_model.bin")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 40}))
    (checkpoint,) = one_run(tmp_path).checkpoints
    assert checkpoint.name == "checkpoint-40" and checkpoint.step == 40
    state = checkpoint.open()
    assert torch.equal(state.read("fc1.weight"), table()["fc1.weight"])


def test_strict_stops_at_the_first_unreadable(tmp_path, table):
    trainer_folder(tmp_path / "checkpoint-1", table(), 1)
    trainer_folder(tmp_path / "checkpoint-2", table(), 2)
    (tmp_path / "checkpoint-2" / "model.safetensors").write_bytes(b"")
    (run,) = discover(tmp_path)
    assert [s.name for s in run.skipped] == ["checkpoint-2"]
    with pytest.raises(UnreadableError, match="checkpoint-2: empty file"):
        discover(tmp_path, Options(strict=True))
