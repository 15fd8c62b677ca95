"""Probes from files of arrays: what is taken, and what is refused before any replay."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from plastiscope import probe
from plastiscope.errors import UsageError
from plastiscope.models import Inputs

VECTOR = Inputs("vector", (6,), classes=4)
IMAGE = Inputs("image", (1, 4, 4), classes=4)
TOKENS = Inputs("tokens", (8,), vocabulary=20, longest=8, causal=True)


def save(path, **arrays):
    """The arrays in the format that the name says."""
    tensors = {name: torch.as_tensor(array) for name, array in arrays.items()}
    if path.suffix == ".npz":
        np.savez(path, **{name: tensor.numpy() for name, tensor in tensors.items()})
    elif path.suffix == ".pt":
        torch.save(tensors, path)
    elif path.suffix == ".safetensors":
        save_file(tensors, path)
    else:
        columns = {name: tensor.tolist() for name, tensor in tensors.items()}
        pq.write_table(pa.table(columns), path)
    return path


def only(spec, inputs, run="."):
    (found,) = probe.find(run, inputs, None if spec is None else str(spec), 8, 0)
    return found


@pytest.mark.parametrize("suffix", [".npz", ".pt", ".safetensors", ".parquet"])
@pytest.mark.parametrize("beside", [True, False])
def test_every_format_gives_the_same_probe(tmp_path, suffix, beside):
    images = torch.arange(48, dtype=torch.float32).reshape(3, 16)
    path = save(tmp_path / f"probe{suffix}", inputs=images, labels=torch.tensor([0, 3, 1]))
    found = only(None, IMAGE, tmp_path) if beside else only(path, IMAGE)
    assert torch.equal(found.batch["inputs"].float(), images.reshape(3, 1, 4, 4))
    assert found.batch["labels"].tolist() == [0, 3, 1]
    assert (found.name, found.synthetic, found.source) == ("probe", False, path.name)


def test_the_fingerprint_is_of_the_content(tmp_path):
    vectors = torch.randn(3, 6)
    one = only(save(tmp_path / "a.npz", x=vectors), VECTOR)
    same = only(save(tmp_path / "b.safetensors", obs=vectors), VECTOR)
    other = only(save(tmp_path / "c.npz", x=vectors + 1e-6), VECTOR)
    labelled = only(save(tmp_path / "d.npz", x=vectors, y=torch.zeros(3).long()), VECTOR)
    assert one.fingerprint == same.fingerprint
    assert len({one.fingerprint, other.fingerprint, labelled.fingerprint}) == 3


@pytest.mark.parametrize(
    ("inputs", "labels", "mask"),
    [("inputs", "labels", "mask"), ("x", "y", "mask"), ("input_ids", "targets", "attention_mask")],
)
def test_other_names(tmp_path, inputs, labels, mask):
    ids, padding = torch.randint(20, (2, 8)), torch.ones(2, 8)
    padding[1, 5:] = 0
    arrays = {inputs: ids, labels: ids.roll(-1, 1), mask: padding, "something_else": torch.ones(3)}
    batch = only(save(tmp_path / "p.npz", **arrays), TOKENS).batch
    assert set(batch) == {"inputs", "labels", "mask"}
    assert batch["mask"].tolist() == padding.long().tolist()
    assert batch["inputs"].dtype == torch.long


def test_several_sets_in_order_of_their_numbers(tmp_path):
    for task in (10, 2, 1):
        save(tmp_path / f"probe_task_{task}.npz", x=torch.full((2, 6), float(task)))
    found = probe.find(tmp_path, VECTOR, None, 8, 0)
    assert [each.name for each in found] == ["task_1", "task_2", "task_10"]
    assert [each.batch["inputs"][0, 0].item() for each in found] == [1, 2, 10]
    assert [each.name for each in probe.find(".", VECTOR, str(tmp_path), 8, 0)] == [
        "task_1",
        "task_2",
        "task_10",
    ]


def test_a_single_checkpoint_has_its_probe_beside_it(tmp_path):
    save(tmp_path / "probe.npz", x=torch.randn(2, 6))
    (tmp_path / "model.pt").write_bytes(b"")
    assert not only(None, VECTOR, tmp_path / "model.pt").synthetic


def test_batches_in_a_list_are_joined(tmp_path):
    parts = [{"obs": torch.full((2, 6), float(n)), "rewards": torch.zeros(2)} for n in range(3)]
    torch.save(parts, tmp_path / "batches.pt")
    batch = only(tmp_path / "batches.pt", VECTOR).batch
    assert batch["inputs"][:, 0].tolist() == [0, 0, 1, 1, 2, 2]


def test_what_a_pickle_would_run_isn_t_run(tmp_path):
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return (open, (str(marker), "w"))

    torch.save({"inputs": torch.zeros(2, 6), "evil": Evil()}, tmp_path / "p.pt")
    assert only(tmp_path / "p.pt", VECTOR).batch["inputs"].shape == (2, 6)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("array", "expected", "note"),
    [
        (torch.zeros(2, 4, 4), (2, 1, 4, 4), ""),
        (torch.zeros(2, 16), (2, 1, 4, 4), "read as 1x4x4 images"),
        (torch.zeros(2, 4, 4, 1), (2, 1, 4, 4), "channels moved"),
    ],
)
def test_images_in_other_layouts(tmp_path, array, expected, note):
    found = only(save(tmp_path / "p.npz", x=array), IMAGE)
    assert found.batch["inputs"].shape == expected and note in found.note


@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 5, 3), (2, 15)])
def test_channels_along_one_axis(tmp_path, shape):
    values = torch.arange(30.0).reshape(2, 3, 5)
    given = values.transpose(1, 2) if shape == (2, 5, 3) else values.reshape(shape)
    path = save(tmp_path / "p.npz", x=given.contiguous())
    assert torch.equal(only(path, Inputs("vector", (3, 5))).batch["inputs"], values)
    with pytest.raises(UsageError, match="3 channels of 4 values"):
        only(path, Inputs("vector", (3, 4)))


def test_channels_last_keeps_every_pixel_in_its_place(tmp_path):
    images = torch.randn(2, 3, 4, 5)
    inputs = Inputs("image", (3, 4, 5))
    found = only(save(tmp_path / "p.npz", x=images.permute(0, 2, 3, 1).contiguous()), inputs)
    assert torch.equal(found.batch["inputs"], images)


def test_integers_are_read_as_real_numbers_and_that_is_said(tmp_path):
    found = only(save(tmp_path / "p.npz", x=torch.arange(12).reshape(2, 6)), VECTOR)
    assert torch.equal(found.batch["inputs"], torch.arange(12.0).reshape(2, 6))
    assert "int64 values read as real numbers" in found.note


def test_bytes_are_scaled_and_normalised(tmp_path):
    path = save(tmp_path / "p.npz", x=torch.full((2, 1, 4, 4), 51, dtype=torch.uint8))
    assert only(path, IMAGE).batch["inputs"].unique().item() == pytest.approx(0.2)
    normal = Inputs("image", (1, 4, 4), mean=(0.1,), std=(0.5,))
    assert only(path, normal).batch["inputs"].unique().item() == pytest.approx(0.2)
    other = Inputs("image", (1, 4, 4), mean=(0.5,), std=(0.1,))
    assert only(path, other).batch["inputs"].unique().item() == pytest.approx(-3.0)


def test_resizable_images_of_another_size(tmp_path):
    path = save(tmp_path / "p.npz", x=torch.zeros(2, 3, 9, 7))
    assert only(path, Inputs("image", (3, 4, 4), resizable=True)).batch["inputs"].shape[2:] == (
        9,
        7,
    )
    with pytest.raises(UsageError, match=r"images of 3x4x4.*\[2, 3, 9, 7\]"):
        only(path, Inputs("image", (3, 4, 4)))


def test_labels_that_are_no_classes_are_left_out_and_said(tmp_path):
    found = only(save(tmp_path / "p.npz", x=torch.zeros(3, 6), y=torch.randn(3)), VECTOR)
    assert set(found.batch) == {"inputs"} and "no loss, no accuracy" in found.note


@pytest.mark.parametrize(
    ("inputs", "arrays", "why"),
    [
        (VECTOR, {"x": torch.zeros(3, 5)}, r"takes 6 features an input.*\[3, 5\]"),
        (VECTOR, {"x": torch.full((3, 6), torch.nan)}, "18 values that are NaN or infinite"),
        (VECTOR, {"x": torch.full((1, 6), -torch.inf)}, "6 values that are NaN or infinite"),
        (VECTOR, {"x": torch.zeros(0, 6)}, "is empty"),
        (VECTOR, {"x": torch.zeros(3, 6), "y": torch.tensor([0, 1])}, "3 inputs and labels"),
        (VECTOR, {"x": torch.zeros(2, 6), "y": torch.tensor([0, 4])}, r"label 4.*0 to 3"),
        (VECTOR, {"x": torch.zeros(2, 6), "y": torch.tensor([0, -1])}, r"label -1.*0 to 3"),
        (VECTOR, {"x": torch.zeros(2, 6), "y": torch.tensor([-100, -100])}, "every label"),
        (VECTOR, {"x": torch.zeros(2, 6), "mask": torch.ones(2, 6)}, "mask"),
        (VECTOR, {"wrong": torch.zeros(2, 6)}, "no array named inputs.*holds wrong"),
        (IMAGE, {"x": torch.zeros(2, 3, 4, 4)}, r"images of 1x4x4.*\[2, 3, 4, 4\]"),
        (IMAGE, {"x": torch.zeros(2, 1, 5, 4)}, r"images of 1x4x4.*\[2, 1, 5, 4\]"),
        (IMAGE, {"x": torch.ones(2, 1, 4, 4).long()}, r"holds torch\.int64.*images.*uint8"),
        (TOKENS, {"x": torch.tensor([[1, 20]])}, r"token id 20.*0 to 19.*another tokenizer"),
        (TOKENS, {"x": torch.tensor([[1, -1]])}, "token id -1"),
        (TOKENS, {"x": torch.zeros(1, 9).long()}, "9 tokens an input.*8 positions"),
        (TOKENS, {"x": torch.zeros(2, 8)}, r"token ids.*holds torch\.float32"),
        (TOKENS, {"x": torch.zeros(8).long()}, r"\[inputs, tokens\].*\[8\]"),
        (
            TOKENS,
            {"x": torch.zeros(2, 8).long(), "mask": torch.ones(2, 7)},
            r"mask.*\[2, 7\].*\[2, 8\]",
        ),
        (TOKENS, {"x": torch.zeros(1, 8).long(), "mask": torch.full((1, 8), 2)}, "than 0 and 1"),
        (
            TOKENS,
            {"x": torch.zeros(2, 8).long(), "mask": torch.tensor([[1] * 8, [0] * 8])},
            "all masked out",
        ),
        (TOKENS, {"x": torch.zeros(1, 8).long(), "y": torch.full((1, 8), 20)}, "label 20"),
        (TOKENS, {"x": torch.zeros(2, 8).long(), "y": torch.zeros(2, 7).long()}, "labels.*shape"),
    ],
)
def test_what_doesn_t_fit_is_refused_in_one_line(tmp_path, inputs, arrays, why):
    path = save(tmp_path / "p.npz", **arrays)
    with pytest.raises(UsageError, match=why) as error:
        only(path, inputs)
    assert "\n" not in str(error.value) and "p.npz" in str(error.value)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut off", b"version https://git-lfs.github"])
def test_files_that_can_t_be_read(tmp_path, content):
    (tmp_path / "p.npz").write_bytes(content)
    with pytest.raises(UsageError, match=r"p\.npz can't be read"):
        only(tmp_path / "p.npz", VECTOR)
    with pytest.raises(UsageError, match="no such file"):
        only(tmp_path / "absent.npz", VECTOR)


@pytest.mark.parametrize("inputs", [VECTOR, IMAGE, TOKENS])
def test_a_synthetic_probe_is_seeded_and_says_so(tmp_path, inputs):
    one, same = (probe.find(tmp_path, inputs, None, 16, 3)[0] for _ in range(2))
    other = probe.find(tmp_path, inputs, None, 16, 4)[0]
    assert one.synthetic and one.fingerprint == same.fingerprint != other.fingerprint
    assert one.batch["inputs"].shape == (16, *inputs.shape)
    assert "SYNTHETIC" in one.note and "--probe" in one.note and "\n" not in one.note
    if inputs.kind == "tokens":
        ids = one.batch["inputs"]
        assert ids.min() >= 0 and ids.max() < 20 and len(ids.unique()) > 15


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((3, 1, 8, 8), {"probe": "1x8x8"}), ((3, 8, 8), {"probe": "8x8"}), ((3, 64), {})],
)
def test_the_probe_s_shape_is_a_hint_for_the_model(tmp_path, shape, expected):
    path = save(tmp_path / "probe.npz", inputs=torch.zeros(shape))
    assert probe.hint(tmp_path, None) == expected
    assert probe.hint("elsewhere", str(path)) == expected
    assert probe.hint("elsewhere", None) == {}


def test_real_batches_beside_real_weights(tmp_path):
    from pathlib import Path

    corpus = Path(__file__).parents[2].parent / "shared" / "corpus" / "rl-plasticity-lab"
    if not corpus.is_dir():
        pytest.skip("the corpus of real checkpoints isn't beside the repository")
    found = only(corpus / "sequence_batches.pt", Inputs("vector", (8,)))
    assert found.batch["inputs"].shape[1] == 8 and found.batch["inputs"].isfinite().all()
