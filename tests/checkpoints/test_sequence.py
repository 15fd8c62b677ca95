"""The order of a run, what is left out of it, and where it doesn't join."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from plastiscope.checkpoints import Options, discover
from plastiscope.errors import UnreadableError, UsageError


def walk(steps: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """A random walk of a small network's weights, as training is one."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"fc1.weight": (8, 4), "fc1.bias": (8,), "head.weight": (3, 8)}
    state = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
    states = []
    for _ in range(steps):
        state = {n: t + 0.1 * torch.randn(t.shape, generator=generator) for n, t in state.items()}
        states.append(state)
    return states


def save_named(folder, names, content=lambda at, sd: sd):
    folder.mkdir(exist_ok=True)
    for at, (name, sd) in enumerate(zip(names, walk(len(names)), strict=True)):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        torch.save(content(at, sd), path)


def order(run) -> list[tuple[str, int]]:
    return [(c.name, c.step) for c in run.checkpoints]


@pytest.mark.parametrize(
    ("names", "steps"),
    [
        (["checkpoint-1000.pt", "checkpoint-200.pt", "checkpoint-50.pt"], [50, 200, 1000]),
        (["0900000.pt", "100000.pt"], [100000, 900000]),
        (["epoch=10-step=100.ckpt", "epoch=9-step=90.ckpt"], [90, 100]),
        (["epoch=10-val_loss=0.12.ckpt", "epoch=2-val_loss=0.90.ckpt"], [2, 10]),
        (["step_1/model.pt", "step_20/model.pt", "step_3/model.pt"], [1, 3, 20]),
    ],
)
def test_numeric_order_whatever_the_padding(tmp_path, one_run, names, steps):  # L12
    save_named(tmp_path, names)
    run = one_run(tmp_path)
    assert [c.step for c in run.checkpoints] == steps
    assert {c.step_source for c in run.checkpoints} == {"name"}


def test_unnumbered_sibling_is_listed_apart(tmp_path, one_run):  # L12
    save_named(tmp_path, ["checkpoint-50.pt", "checkpoint-200.pt", "handpicked.pt"])
    run = one_run(tmp_path)
    assert [c.step for c in run.checkpoints] == [50, 200]
    assert [(s.name, s.unreadable) for s in run.skipped] == [("handpicked.pt", False)]
    assert "unnumbered" in run.skipped[0].reason


def test_two_files_of_one_step_follow_a_rule(tmp_path, one_run):  # L12
    save_named(
        tmp_path, ["epoch=1-step=10.ckpt", "epoch=1-step=10-v1.ckpt", "epoch=2-step=20.ckpt"]
    )
    run = one_run(tmp_path)
    assert [c.step for c in run.checkpoints] == [10, 20]
    assert run.checkpoints[0].name == "epoch=1-step=10.ckpt"
    assert run.skipped[0].reason == "step 10 twice: epoch=1-step=10.ckpt is used"


def test_stored_step_comes_first(tmp_path, one_run):
    names = ["a_1.pt", "a_2.pt", "a_3.pt"]
    save_named(tmp_path, names, lambda at, sd: {"model": sd, "global_step": 100 * (3 - at)})
    run = one_run(tmp_path)
    assert order(run) == [("a_3.pt", 100), ("a_2.pt", 200), ("a_1.pt", 300)]
    assert run.checkpoints[0].step_source == "stored global_step"
    assert any("disagree about the order" in note for note in run.notes)
    by_name = one_run(tmp_path, order="name")
    assert order(by_name) == [("a_1.pt", 1), ("a_2.pt", 2), ("a_3.pt", 3)]


def test_stored_value_that_never_changes_is_no_step(tmp_path, one_run):
    names = ["a_10.pt", "a_20.pt", "a_30.pt"]
    save_named(tmp_path, names, lambda at, sd: {"model": sd, "epoch": 3})
    run = one_run(tmp_path)
    assert [c.step for c in run.checkpoints] == [10, 20, 30]
    assert "stored epoch is 3 in every file: not a step" in run.notes


def test_counter_that_starts_again_in_every_epoch(tmp_path, one_run):
    moments = [(0, 100), (0, 200), (1, 100), (1, 200)]
    save_named(
        tmp_path / "stored",
        [f"{letter}.pt" for letter in "dbca"],
        lambda at, sd: {"model": sd, "epoch": moments[at][0], "iter": moments[at][1]},
    )
    run = one_run(tmp_path / "stored")
    assert order(run) == [("d.pt", 100), ("b.pt", 200), ("c.pt", 301), ("a.pt", 401)]
    assert run.checkpoints[0].step_source == "stored epoch and iter"
    save_named(tmp_path / "named", [f"epoch_{e}_iter_{i}.pt" for e, i in moments])
    steps = [c.step for c in one_run(tmp_path / "named").checkpoints]
    assert steps == [100, 200, 301, 401]


def test_seeds_are_not_moments(tmp_path):
    save_named(
        tmp_path,
        ["model_seed1.pt", "model_seed2.pt"],
        lambda at, sd: {"model": sd, "step": 1000 + at},
    )
    assert len(discover(tmp_path)) == 2


def test_iteration_stored_as_a_tensor(tmp_path, one_run):
    names = ["x.pt", "y.pt"]
    save_named(
        tmp_path, names, lambda at, sd: {"model": sd, "iter_num": torch.tensor([500 - at * 100])}
    )
    assert order(one_run(tmp_path)) == [("y.pt", 400), ("x.pt", 500)]


def test_copies_are_collapsed_and_reported(tmp_path, one_run):
    save_named(tmp_path, [f"step_{s}.pt" for s in (1, 2, 3)])
    shutil.copy(tmp_path / "step_3.pt", tmp_path / "last.pt")
    sd = torch.load(tmp_path / "step_2.pt", weights_only=True)
    torch.save({"model": sd, "metric": 0.9}, tmp_path / "best.pt")
    (tmp_path / "latest.pt").symlink_to("step_3.pt")
    (tmp_path / "final.pt").symlink_to("step_9.pt")
    run = one_run(tmp_path)
    assert [c.step for c in run.checkpoints] == [1, 2, 3]
    reasons = {s.name: s.reason for s in run.skipped}
    assert reasons == {
        "last.pt": "bit-identical to step_3.pt: counted once",
        "best.pt": "the weights of step_2.pt: counted once",
        "latest.pt": "symbolic link to step_3.pt",
        "final.pt": "dangling symbolic link to step_9.pt",
    }
    assert not any(s.unreadable for s in run.skipped)


def test_final_save_with_its_own_step_belongs_to_the_run(tmp_path, one_run):
    save_named(
        tmp_path,
        ["step_1.pt", "step_2.pt", "final.pt"],
        lambda at, sd: {"model": sd, "step": (1, 2, 7)[at]},
    )
    assert order(one_run(tmp_path)) == [("step_1.pt", 1), ("step_2.pt", 2), ("final.pt", 7)]


def test_runs_are_told_apart(tmp_path):
    save_named(tmp_path, ["actor_step_1.pt", "actor_step_2.pt", "critic_step_1.pt"])
    save_named(tmp_path / "seed_1", ["ckpt_1.pt", "ckpt_2.pt"])
    save_named(tmp_path / "seed_2", ["ckpt_1.pt"])
    runs = {run.name: [c.step for c in run.checkpoints] for run in discover(tmp_path)}
    root = tmp_path.name
    assert runs == {
        f"{root}/actor_step": [1, 2],
        f"{root}/critic_step": [1],
        "seed_1": [1, 2],
        "seed_2": [1],
    }


def test_task_is_read_from_name_or_content(tmp_path, one_run):
    save_named(
        tmp_path,
        ["task_000.pt", "task_001.pt"],
        lambda at, sd: {"model_state_dict": sd, "task": at, "step": 50 * at + 50},
    )
    run = one_run(tmp_path)
    assert [(c.step, c.task, c.step_source) for c in run.checkpoints] == [
        (50, 0, "stored step"),
        (100, 1, "stored step"),
    ]


def test_replaced_head_breaks_the_head_only(tmp_path, one_run):  # L21
    for step in range(6):
        classes = 100 if step < 3 else 10
        sd = {**walk(6)[step], "head.weight": torch.randn(classes, 8)}
        torch.save(sd, tmp_path / f"step_{step}.pt")
    (found,) = one_run(tmp_path).breaks
    assert found.checkpoint == "step_3.pt" and found.tensors == ("head.weight",)
    assert found.reason == "head replaced: head.weight [100, 8] -> [10, 8]"


def test_renamed_head_breaks_the_head_only(tmp_path, one_run):  # L21
    for step, sd in enumerate(walk(4)):
        if step >= 2:
            sd["classifier.weight"] = sd.pop("head.weight")
        torch.save(sd, tmp_path / f"step_{step}.pt")
    (found,) = one_run(tmp_path).breaks
    assert found.checkpoint == "step_2.pt"
    assert set(found.tensors) == {"head.weight", "classifier.weight"}
    assert found.reason.startswith("head replaced")


def test_renamed_layers_join_with_a_map(tmp_path, one_run):  # L21
    for step, sd in enumerate(walk(4)):
        if step >= 2:
            sd["classifier.weight"] = sd.pop("head.weight")
        torch.save(sd, tmp_path / f"step_{step}.pt")
    run = one_run(tmp_path, rename=(("head.", "classifier."),))
    assert run.breaks == ()
    assert "classifier.weight" in run.checkpoints[0].open().tensors
    with pytest.raises(UsageError, match="gives two tensors the name"):
        one_run(tmp_path, rename=(("fc1.weight", "x"), ("fc1.bias", "x")))


def test_optimizers_results_and_unfinished_saves_are_no_runs(tmp_path, one_run):
    save_named(tmp_path, ["step_1.pt", "step_2.pt"])
    moments = {"state": {0: {"exp_avg": torch.randn(8, 4)}}, "param_groups": [{"lr": 1.0}]}
    torch.save(moments, tmp_path / "state_1.pt")
    torch.save({"losses": torch.randn(9), "accs": torch.randn(9)}, tmp_path / "curves.pt")
    torch.save(walk(1)[0], tmp_path / "step_3.pt.tmp")
    save_named(tmp_path / "tmp-checkpoint-3", ["model.pt"])
    run = one_run(tmp_path)
    assert [c.step for c in run.checkpoints] == [1, 2]
    assert {s.name: s.reason for s in run.skipped} == {
        "state_1.pt": "an optimizer's state, not a checkpoint",
        "curves.pt": "no layers in it: taken for data",
        "step_3.pt.tmp": "temporary, of an unfinished save",
        "tmp-checkpoint-3": "temporary, of an unfinished save",
    }
    assert not any(s.unreadable for s in run.skipped)


def test_vocabulary_position_and_architecture_changes(tmp_path, one_run):
    def changed(folder, name, before, after):
        folder.mkdir()
        for step, sd in enumerate(walk(3)):
            sd[name] = torch.randn(before if step < 2 else after)
            torch.save(sd, folder / f"step_{step}.pt")
        (found,) = one_run(folder).breaks
        assert found.tensors == (name,) and found.checkpoint == "step_2.pt"
        return found.reason

    vocabulary = changed(tmp_path / "a", "wte.weight", (50, 4), (60, 4))
    assert vocabulary == "vocabulary changed: wte.weight [50, 4] -> [60, 4]"
    assert changed(tmp_path / "b", "pos_embed", (1, 50, 4), (1, 65, 4)).startswith("position table")
    assert changed(tmp_path / "c", "mid.weight", (4, 4), (5, 5)).startswith("architecture changed")


def test_another_network_breaks_everything(tmp_path, one_run):
    for step, sd in enumerate(walk(4)):
        kept = sd if step < 2 else {"other.weight": torch.randn(4, 4)}
        torch.save(kept, tmp_path / f"step_{step}.pt")
    (found,) = one_run(tmp_path).breaks
    assert (found.checkpoint, found.tensors) == ("step_2.pt", ())
    assert found.reason == "another network: 3 tensors before, 1 from step 2"


def test_partial_last_save(tmp_path, one_run):
    for step, sd in enumerate(walk(3)):
        if step == 2:
            del sd["head.weight"]
        torch.save(sd, tmp_path / f"step_{step}.pt")
    (found,) = one_run(tmp_path).breaks
    assert found.reason == "partial save: 1 of 3 tensors are missing"


def test_wrong_era_copies_and_jumps(tmp_path, one_run):
    good, other = walk(6), walk(6, seed=9)
    for step, sd in enumerate(good):
        kept = good[0] if step == 3 else sd
        torch.save(kept, tmp_path / f"step_{step}.pt")
    breaks = one_run(tmp_path).breaks
    assert [b.checkpoint for b in breaks] == ["step_3.pt", "step_4.pt"]
    assert breaks[0].reason == "weights identical to step 0 (step_0.pt)"
    torch.save(other[3], tmp_path / "step_3.pt")
    breaks = one_run(tmp_path).breaks
    assert [b.checkpoint for b in breaks] == ["step_3.pt", "step_4.pt"]
    assert breaks[0].reason == "weights jump at step 3 and back: a file of another run?"
    # The negative control: an undisturbed walk has no breaks.
    torch.save(good[3], tmp_path / "step_3.pt")
    assert one_run(tmp_path).breaks == ()


def test_frozen_neighbours_are_a_note(tmp_path, one_run):
    sd = walk(1)[0]
    for step in (1, 2):
        torch.save({"model": sd, "step": step}, tmp_path / f"step_{step}.pt")
    run = one_run(tmp_path)
    assert run.breaks == () and "step_2.pt: weights identical to step_1.pt" in run.notes


def test_optimizer_reset_is_reported(tmp_path, one_run):
    for step, sd in enumerate(walk(4)):
        counter = torch.tensor(float((10, 20, 5, 15)[step]))
        state = {"state": {0: {"step": counter}}, "param_groups": [{"params": [0]}]}
        torch.save({"model": sd, "optimizer": state}, tmp_path / f"step_{step}.pt")
    notes = [n for n in one_run(tmp_path).notes if "optimizer" in n]
    assert notes == ["optimizer reset before step_2.pt: its own step goes from 20 to 5"]


def test_tied_then_untied_is_reported(tmp_path, one_run):  # L17 (e)
    shared = torch.randn(10, 4)
    torch.save({"embed.weight": shared, "lm_head.weight": shared}, tmp_path / "step_0.pt")
    torch.save({"embed.weight": shared, "lm_head.weight": shared + 1}, tmp_path / "step_1.pt")
    run = one_run(tmp_path)
    assert "lm_head.weight: tied before, its own tensor from step_1.pt" in run.notes


def test_selection(tmp_path, one_run):
    save_named(tmp_path, [f"step_{s}.pt" for s in range(0, 100, 10)])
    steps = lambda **o: [c.step for c in one_run(tmp_path, **o).checkpoints]  # noqa: E731
    assert steps(steps={10, 50}) == [10, 50]
    assert steps(steps=range(20, 60)) == [20, 30, 40, 50]
    assert steps(every=4) == [0, 40, 80, 90]
    assert steps(include=("step_1*",)) == [10]
    assert steps(exclude=("step_[1-8]0.pt",)) == [0, 90]
    with pytest.raises(UsageError, match="the steps are 0, 10, 20"):
        discover(tmp_path, Options(steps={5}))


def test_break_moves_to_the_next_selected(tmp_path, one_run):
    for step, sd in enumerate(walk(6)):
        sd["head.weight"] = torch.randn(3 if step < 3 else 5, 8)
        torch.save(sd, tmp_path / f"step_{step}.pt")
    run = one_run(tmp_path, steps={0, 5})
    assert [b.checkpoint for b in run.breaks] == ["step_5.pt"]


def test_order_by_time(tmp_path, one_run):
    save_named(tmp_path, ["c.pt", "a.pt", "b.pt"])
    for at, name in enumerate(["c.pt", "a.pt", "b.pt"]):
        os.utime(tmp_path / name, (1000 + at, 1000 + at))
    assert len(discover(tmp_path)) == 3
    assert order(one_run(tmp_path, order="time")) == [("c.pt", 0), ("a.pt", 1), ("b.pt", 2)]
    assert order(one_run(tmp_path, order="name")) == [("a.pt", 0), ("b.pt", 1), ("c.pt", 2)]


def test_order_by_content_makes_a_folder_one_run(tmp_path, one_run):
    save_named(
        tmp_path,
        ["warmup_1.pt", "warmup_2.pt", "main_1.pt"],
        lambda at, sd: {"model": sd, "global_step": 10 * (at + 1)},
    )
    assert len(discover(tmp_path)) == 2
    assert [s for _, s in order(one_run(tmp_path, order="content"))] == [10, 20, 30]


def test_side_files_and_probes_are_no_checkpoints(tmp_path, one_run):
    save_named(tmp_path, ["step_1.pt", "step_2.pt"])
    torch.save({"inputs": torch.randn(4, 2), "labels": torch.zeros(4)}, tmp_path / "probe.pt")
    torch.save({"x": torch.randn(4, 2), "y": torch.zeros(4)}, tmp_path / "eval_set.pt")
    torch.save([{"obs": torch.randn(4, 2)}] * 3, tmp_path / "sequence_batches.pt")
    for name in ("rng_state.pth", "scheduler.pt", "training_args.bin", "optimizer.pt"):
        torch.save({"state": {}, "param_groups": []}, tmp_path / name)
    for name in ("results.csv", "README.md", "events.out.tfevents.1", "trainer_state.json"):
        (tmp_path / name).write_text("{}")
    run = one_run(tmp_path)
    assert [c.step for c in run.checkpoints] == [1, 2]
    assert {s.name for s in run.skipped} <= {"eval_set.pt", "sequence_batches.pt"}
    assert all("data" in s.reason and not s.unreadable for s in run.skipped)


def test_all_unreadable_lists_every_reason(tmp_path):
    (tmp_path / "step_1.pt").write_bytes(b"")
    (tmp_path / "step_2.pt").write_bytes(b"\x00" * 100)
    with pytest.raises(UnreadableError, match=r"step_1.pt: empty file.*step_2.pt: nothing but"):
        discover(tmp_path)


def test_paths_as_people_write_them(tmp_path, one_run, monkeypatch):
    save_named(tmp_path / "run", ["step_1.pt", "step_2.pt"])
    monkeypatch.chdir(tmp_path / "run")
    for path in (".", "../run", "../run/", str(tmp_path / "run") + "/", f"file://{tmp_path}/run"):
        run = one_run(path)
        assert (run.name, [c.step for c in run.checkpoints]) == ("run", [1, 2]), path


def test_step_folders_with_one_checkpoint_somewhere_below(tmp_path, one_run):
    for step, sd in enumerate(walk(3)):
        folder = tmp_path / f"step_{step}" / "checkpoint" / "weights"
        folder.mkdir(parents=True)
        torch.save(sd, folder / "model.pt")
    run = one_run(tmp_path)
    assert order(run)[2] == ("step_2/checkpoint/weights/model.pt", 2)


def test_fingerprint_tells_how_it_was_read(tmp_path, one_run):
    torch.save({"model": walk(1)[0], "ema": walk(1, seed=3)[0]}, tmp_path / "step_1.pt")
    prints = {
        one_run(tmp_path, **options).checkpoints[0].fingerprint
        for options in ({}, {"weights": "ema"}, {"prefix": "fc1"})
    }
    assert len(prints) == 3
