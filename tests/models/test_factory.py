"""A network of the user's own code: instance, class or factory, by file or by module."""

from __future__ import annotations

import sys
from textwrap import dedent

import pytest
import torch
from torch import nn

from plastiscope.errors import UsageError
from plastiscope.models import ModelError, build, load

CODE = """
    from __future__ import annotations
    from dataclasses import dataclass
    import torch
    from torch import nn
    from neighbour import WIDTH

    @dataclass
    class Shape:
        width: int = WIDTH

    class Net(nn.Module):
        def __init__(self, width, depth: int = 1, device="cpu", **more):
            super().__init__()
            assert device == "cpu"
            self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        def forward(self, x):
            for layer in self.layers:
                x = x + torch.tanh(layer(x))
            return x, "more"

    net = Net(Shape().width)
    compiled = torch.compile(Net(Shape().width), backend="eager")

    def make():
        return Net(4, 2)

    def from_config(config):
        return Net(config.width, config["depth"])

    def nested(cfg):
        return Net(cfg.model.width, 2)

    def needs(width, unheard_of):
        return Net(width)

    def tokens(vocab_size, block_size=8):
        tables = {"table": nn.Embedding(vocab_size, 4), "pos": nn.Embedding(block_size, 4)}
        return nn.ModuleDict(tables)

    def vit():
        net = nn.Sequential(nn.Conv2d(3, 4, 2, 2), nn.Flatten(2))
        net.pos_embed = nn.Parameter(torch.zeros(1, 17, 4))
        return net

    def text():
        return "net"

    number = 3
"""


@pytest.fixture
def code(tmp_path):
    (tmp_path / "mynet.py").write_text(dedent(CODE))
    (tmp_path / "neighbour.py").write_text("WIDTH = 4\n")
    yield tmp_path / "mynet.py"
    sys.modules.pop("neighbour", None)


class Twin(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(depth))

    def forward(self, inputs):
        for layer in self.layers:
            inputs = inputs + torch.tanh(layer(inputs))
        return inputs


@pytest.mark.parametrize(
    ("name", "depth", "extras"),
    [
        ("net", 1, {}),
        ("compiled", 1, {}),
        ("make", 2, {}),
        ("Net", 1, {"config": {"width": 4, "device": "cuda"}}),
        ("Net", 2, {"hyper_parameters": {"model": {"width": 4, "depth": 2}}}),
        ("from_config", 2, {"model_args": {"width": 4, "depth": 2}}),
        ("nested", 2, {"config": {"model": {"width": 4}, "width": 9}}),
    ],
)
def test_instance_class_and_factory(code, state_of, name, depth, extras):
    model = Twin(depth)
    state = state_of(model.state_dict(), **extras)
    live = build(state, f"{code}:{name}")
    assert load(live, state).full
    inputs = torch.randn(3, 4)
    assert torch.equal(live.forward({"inputs": inputs}), model(inputs))
    assert live.inputs.kind == "vector" and live.inputs.shape == (4,)


def test_by_module_name_in_the_working_folder(code, state_of, monkeypatch):
    monkeypatch.chdir(code.parent)
    monkeypatch.delitem(sys.modules, "mynet", raising=False)
    state = state_of(Twin(2).state_dict())
    assert load(build(state, "mynet:make"), state).full
    assert str(code.parent) not in sys.path


def test_what_the_inputs_are(code, state_of):
    ids = build(state_of({}, config={"vocab_size": 11}), f"{code}:tokens").inputs
    assert (ids.kind, ids.vocabulary, ids.longest, ids.shape) == ("tokens", 11, 8, (8,))
    image = build(state_of({}), f"{code}:vit").inputs
    assert (image.kind, image.shape) == ("image", (3, 8, 8))
    said = build(state_of({}), f"{code}:vit", {"input": "3x12x12"}).inputs
    assert said.shape == (3, 12, 12)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("needs", "needs 'unheard_of'"),
        ("text", "gave a str"),
        ("number", "is a int"),
        ("absent", "has no absent"),
    ],
)
def test_what_gives_no_network(code, state_of, name, why):
    with pytest.raises((ModelError, UsageError), match=why):
        build(state_of({}, config={"width": 4}), f"{code}:{name}")


@pytest.mark.parametrize("spec", ["nothing_here.py:make", "no_such_package:make", "justaname"])
def test_specs_that_lead_nowhere(state_of, spec):
    with pytest.raises(UsageError, match=r"no such|write path"):
        build(state_of({}), spec)


def test_errors_of_the_user_s_code_keep_their_traceback(tmp_path, state_of):
    (tmp_path / "broken.py").write_text("import a_package_that_is_absent\n")
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_absent"):
        build(state_of({}), f"{tmp_path / 'broken.py'}:make")


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))

    def forward(self, inputs):
        return self.body(inputs).softmax(-1)


class Ids(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 4), nn.Linear(4, 11)

    def forward(self, ids):
        return self.head(self.table(ids))


@pytest.mark.parametrize("model", [Small(), Ids()])
def test_an_exported_program(tmp_path, state_of, model):
    ids = isinstance(model, Ids)
    example = torch.randint(11, (3, 6)) if ids else torch.randn(3, 5)
    batch = {0: torch.export.Dim("batch", min=1, max=64)}
    program = torch.export.export(model.eval(), (example,), dynamic_shapes=(batch,))
    torch.export.save(program, tmp_path / "model.pt2")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)  # the checkpoint isn't the state that was exported
    state = state_of(model.state_dict())
    live = build(state, str(tmp_path / "model.pt2"))
    assert load(live, state).full
    inputs = torch.randint(11, (8, 6)) if ids else torch.randn(8, 5)
    torch.testing.assert_close(live.forward({"inputs": inputs}), model(inputs))
    assert live.inputs.kind == ("tokens" if ids else "vector")
    assert live.inputs.vocabulary == (11 if ids else None)


def test_programs_that_can_t_be_replayed(tmp_path, state_of):
    program = torch.export.export(Small(), (torch.randn(3, 5),))
    torch.export.save(program, tmp_path / "fixed.pt2")
    with pytest.raises(ModelError, match="batches of 3 only"):
        build(state_of({}), str(tmp_path / "fixed.pt2"))
    (tmp_path / "other.pt2").write_bytes(b"not a program")
    with pytest.raises(UsageError, match=r"isn't a torch\.export program"):
        build(state_of({}), str(tmp_path / "other.pt2"))
    with pytest.raises(UsageError, match="no such file"):
        build(state_of({}), str(tmp_path / "none.pt2"))
