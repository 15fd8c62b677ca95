"""Probes from images, texts, datasets, addresses and functions."""

from __future__ import annotations

import io
import pickle
from textwrap import dedent

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from plastiscope import probe
from plastiscope.errors import UsageError
from plastiscope.models import Inputs

RGB = Inputs("image", (3, 4, 4), mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25), classes=3)
BYTES = Inputs("tokens", (8,), vocabulary=256, longest=64, causal=True)


def picture(red: int, size: tuple[int, int] = (4, 4)) -> Image.Image:
    pixels = np.zeros((size[1], size[0], 3), dtype=np.uint8)
    pixels[..., 0] = red
    return Image.fromarray(pixels)


def png(red: int) -> bytes:
    file = io.BytesIO()
    picture(red).save(file, "PNG")
    return file.getvalue()


def find(spec, inputs, run=".", size=8):
    return probe.find(run, inputs, str(spec), size, 0)


@pytest.fixture
def classes(tmp_path):
    for number, name in enumerate(("ant", "bee", "cat")):
        (tmp_path / "images" / name).mkdir(parents=True)
        for copy in range(4):
            picture(51 * number + copy).save(tmp_path / "images" / name / f"{copy}.png")
    return tmp_path / "images"


def test_folders_of_images_are_classes_in_order_of_name(classes):
    (found,) = find(classes, RGB, size=100)
    assert found.batch["labels"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    red = torch.tensor([51 * n + c for n in range(3) for c in range(4)]) / 255
    torch.testing.assert_close(found.batch["inputs"][:, 0, 2, 2], (red - 0.5) / 0.25)
    assert (found.batch["inputs"][:, 1] == -2).all()
    assert "3 folders" in found.note


def test_a_large_folder_is_drawn_evenly_and_said(classes):
    (found,) = find(classes, RGB, size=3)
    assert found.batch["labels"].tolist() == [0, 1, 2]
    assert "3 of 12 images" in found.note


def test_the_model_s_own_preprocessing(classes, tmp_path):
    run = tmp_path / "run"
    (run / "checkpoint-1").mkdir(parents=True)
    (run / "checkpoint-1" / "preprocessor_config.json").write_text(
        '{"image_mean": [0, 0, 0], "image_std": [1, 1, 1]}'
    )
    (found,) = find(classes, RGB, run)
    assert found.batch["inputs"].min() == 0
    bare = Inputs("image", (3, 4, 4))
    assert "not normalised" in find(classes, bare)[0].note


def test_the_centre_is_cropped_not_squeezed(tmp_path):
    wide = np.zeros((4, 12, 3), dtype=np.uint8)
    wide[:, 4:8] = 255
    Image.fromarray(wide).save(tmp_path / "wide.png")
    (found,) = find(tmp_path / "wide.png", Inputs("image", (1, 4, 4)))
    assert found.batch["inputs"].shape == (1, 1, 4, 4)
    assert (found.batch["inputs"] == 1).all()


def test_images_for_a_model_of_something_else(classes):
    with pytest.raises(UsageError, match="holds images, but the model takes vector"):
        find(classes, Inputs("vector", (6,)))
    (classes / "ant" / "0.png").write_bytes(b"no image")
    with pytest.raises(UsageError, match=r"0\.png isn't a readable image"):
        find(classes, RGB, size=100)


def test_text_as_bytes_with_the_next_one_as_label(tmp_path):
    text = "Xin chào, thế giới! " * 3
    (tmp_path / "vi.txt").write_text(text, encoding="utf-8")
    (found,) = find(tmp_path / "vi.txt", BYTES, size=100)
    stream = torch.tensor(list(text.encode()))
    count = (len(stream) - 1) // 8
    assert torch.equal(found.batch["inputs"].flatten(), stream[: count * 8])
    assert torch.equal(found.batch["labels"].flatten(), stream[1 : count * 8 + 1])
    assert "mask" not in found.batch and found.name == "vi"
    few = find(tmp_path / "vi.txt", BYTES, size=2)[0].batch["inputs"]
    assert torch.equal(few[1], found.batch["inputs"][count // 2])


def test_a_model_that_fills_gaps_gets_no_next_token(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefghij")
    masked = Inputs("tokens", (8,), vocabulary=256)
    assert set(find(tmp_path / "a.txt", masked)[0].batch) == {"inputs"}


def test_characters_of_nanogpt_s_meta(tmp_path):
    table = {letter: number for number, letter in enumerate("abc ")}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 4, "stoi": table}))
    (tmp_path / "a.txt").write_text("abc cab")
    inputs = Inputs("tokens", (6,), vocabulary=4, causal=True)
    (found,) = find(tmp_path / "a.txt", inputs, tmp_path)
    assert found.batch["inputs"].tolist() == [[0, 1, 2, 3, 2, 0]]
    assert found.batch["labels"].tolist() == [[1, 2, 3, 2, 0, 1]]
    (tmp_path / "b.txt").write_text("abcd")
    with pytest.raises(UsageError, match="character 'd'"):
        find(tmp_path / "b.txt", inputs, tmp_path)


def test_the_tokenizer_beside_the_checkpoint(tmp_path):
    hf = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "hello": 1, "world": 2, "again": 3}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (tmp_path / "checkpoint-1").mkdir()
    hf.PreTrainedTokenizerFast(tokenizer_object=model).save_pretrained(tmp_path / "checkpoint-1")
    (tmp_path / "a.txt").write_text("hello world again hello nobody")
    inputs = Inputs("tokens", (4,), vocabulary=4, causal=True)
    (found,) = find(tmp_path / "a.txt", inputs, tmp_path)
    assert found.batch["inputs"].tolist() == [[1, 2, 3, 1]]
    assert found.batch["labels"].tolist() == [[2, 3, 1, 0]]
    assert "tokenizer in checkpoint-1" in found.note


def test_no_tokenizer_and_ids_that_are_no_bytes(tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    with pytest.raises(UsageError, match="no tokenizer lies beside the run"):
        find(tmp_path / "a.txt", Inputs("tokens", (4,), vocabulary=50257))
    with pytest.raises(UsageError, match="too short"):
        (tmp_path / "a.txt").write_text("")
        find(tmp_path / "a.txt", BYTES)
    with pytest.raises(UsageError, match="holds text, but the model takes vector"):
        find(tmp_path / "a.txt", Inputs("vector", (4,)))


def test_texts_of_a_folder_are_a_set_each(tmp_path):
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text(name * 4)
    assert [each.name for each in find(tmp_path, BYTES)] == ["a", "b"]


def arrow(path, table):
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_a_dataset_of_images(tmp_path, form):
    cells = [{"bytes": png(51 * n), "path": None} for n in range(3)]
    table = pa.table({"image": cells, "label": [2, 0, 1]})
    if form == "arrow":
        arrow(tmp_path / "test" / "data-00000-of-00001.arrow", table)
        arrow(tmp_path / "train" / "data-00000-of-00001.arrow", table.slice(0, 1))
    else:
        (tmp_path / "data").mkdir()
        pq.write_table(table, tmp_path / "data" / "test-00000-of-00001.parquet")
        pq.write_table(table.slice(0, 1), tmp_path / "data" / "train-00000-of-00001.parquet")
    (found,) = find(tmp_path, RGB)
    assert found.batch["labels"].tolist() == [2, 0, 1]
    expected = (torch.tensor([0.0, 0.2, 0.4]) - 0.5) / 0.25
    torch.testing.assert_close(found.batch["inputs"][:, 0, 0, 0], expected)


def test_a_dataset_of_texts_and_one_of_arrays(tmp_path):
    arrow(tmp_path / "t" / "data.arrow", pa.table({"text": ["abcdefghijk", "xyz"]}))
    batch = find(tmp_path / "t", BYTES)[0].batch
    assert bytes(batch["inputs"][0].tolist()) == b"abcdefgh"
    assert batch["mask"].tolist() == [[1] * 8, [1, 1] + [0] * 6]
    assert batch["labels"][1].tolist() == [121, 122] + [-100] * 6
    rows = pa.table({"features": [[float(n)] * 6 for n in range(10)], "label": list(range(10))})
    arrow(tmp_path / "a" / "data.arrow", rows)
    (found,) = find(tmp_path / "a", Inputs("vector", (6,)), size=5)
    assert found.batch["labels"].tolist() == [0, 2, 4, 6, 8] and "5 of 10 rows" in found.note


def test_an_address(tmp_path):
    np.savez(tmp_path / "p.npz", x=np.ones((2, 6), dtype=np.float32))
    address = (tmp_path / "p.npz").as_uri()
    (found,) = find(address, Inputs("vector", (6,)))
    assert found.batch["inputs"].shape == (2, 6) and found.source == address
    with pytest.raises(UsageError, match="can't be fetched") as error:
        find(f"{address}x?signature=secret", Inputs("vector", (6,)))
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "names", "first"),
    [
        ("tensor", ["probe"], 1.0),
        ("labelled", ["probe"], 2.0),
        ("named", ["probe"], 3.0),
        ("tasks", ["one", "two"], 4.0),
        ("sized", ["probe"], 8.0),
    ],
)
def test_a_function(tmp_path, name, names, first):
    (tmp_path / "mine.py").write_text(
        dedent("""
            import numpy as np, torch
            def tensor(): return torch.full((2, 6), 1.0)
            def labelled(): return np.full((2, 6), 2.0), np.array([0, 1])
            def named(): return {"x": torch.full((2, 6), 3.0), "labels": [0, 1]}
            def tasks(): return {"one": (torch.full((2, 6), 4.0),), "two": {"x": torch.ones(2, 6)}}
            def sized(inputs, size, seed=0): return torch.full((size, *inputs.shape), float(size))
            def text(): return "abc"
        """)
    )
    found = find(f"{tmp_path / 'mine.py'}:{name}", Inputs("vector", (6,)))
    assert [each.name for each in found] == names
    assert found[0].batch["inputs"][0, 0] == first
    assert ("labels" in found[0].batch) == (name in ("labelled", "named"))
    with pytest.raises(UsageError, match="not arrays of numbers"):
        find(f"{tmp_path / 'mine.py'}:text", Inputs("vector", (6,)))


def test_specs_that_lead_nowhere(tmp_path):
    for spec in ("absent", str(tmp_path), "absent.py:probe"):
        with pytest.raises(UsageError, match="--probe"):
            find(spec, RGB)
