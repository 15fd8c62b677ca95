"""The kernel where rows aren't inputs: experts, and tables that are cut to a length."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from plastiscope.observations import observe_ntk

WIDTH, TOKENS, VOCABULARY = 6, 4, 11


class Experts(nn.Module):
    """Each token goes to one of the experts; the last one's score is never the highest."""

    def __init__(self, count):
        super().__init__()
        self.router = nn.Linear(WIDTH, count)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        with torch.no_grad():
            self.router.bias[-1] = -1e3
        self.sent = [0] * count

    def forward(self, x):
        flat = x.flatten(0, 1)
        score, chosen = self.router(flat).softmax(-1).max(-1)
        y = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            self.sent[number] = len(rows)
            if len(rows):
                y = y.index_add(0, rows, expert(flat[rows]).tanh() * score[rows, None])
        return y.reshape(x.shape)


class Net(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(TOKENS + 1, WIDTH))
        self.mixture = Experts(count)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.table(ids) + self.positions[: ids.shape[1]]
        return self.head(x + self.mixture(x))


def network(seed, inputs, count=3):
    torch.manual_seed(seed)
    module = Net(count).double().eval()
    return module, torch.randint(0, VOCABULARY, (inputs, TOKENS))


def dense(module, ids):
    """The Gram of each parameter, input by input."""
    named = dict(module.named_parameters())
    rows = [
        torch.autograd.grad(
            module(ids[i : i + 1]).mean(), list(named.values()), materialize_grads=True
        )
        for i in range(len(ids))
    ]
    flat = [torch.stack([g.flatten() for g in column]) for column in zip(*rows, strict=True)]
    return {name: g @ g.mT for name, g in zip(named, flat, strict=True)}


def kernels(module, ids):
    names = {name: name for name, _ in module.named_parameters()}
    return observe_ntk(module, lambda b: module(b["inputs"]), {"inputs": ids}, components=names)


@pytest.mark.parametrize("inputs", [2, 4, 9])
def test_experts_and_cut_tables_equal_the_dense_kernel(inputs):
    divisible = 0
    for seed in range(6):
        module, ids = network(seed, inputs)
        module(ids)
        divisible += any(n and n % inputs == 0 for n in module.mixture.sent)
        found, expected = kernels(module, ids), dense(module, ids)
        for name, gram in expected.items():
            assert_close(torch.as_tensor(found[name].gram), gram, rtol=1e-9, atol=1e-13)
        assert_close(torch.as_tensor(found["network"].gram), sum(expected.values()))
    # Rows that divide by the number of inputs, without being as many of each, did occur.
    assert divisible > 0 or inputs == 9


def test_an_expert_without_tokens_has_a_kernel_of_zeros():
    module, ids = network(0, 4)
    kernel = kernels(module, ids)["mixture.experts.2.weight"]
    assert kernel.gram.shape == (4, 4) and not kernel.gram.any()
    assert kernel.status == "zero_matrix"


def test_an_expert_that_the_first_inputs_never_reached():
    module, ids = network(1, 8, count=2)
    with torch.no_grad():
        # The first expert serves all but the inputs that start with token 0.
        module.mixture.router.weight.zero_()
        module.mixture.router.bias.copy_(torch.tensor([1.0, 0.0]))
        module.mixture.router.weight[1, 0] = 1.0
        module.table.weight[:, 0], module.positions[:, 0] = -9.0, 0.0
        module.table.weight[0, 0] = 9.0
    ids = ids.clamp(min=1)
    ids[5:, 0] = 0
    found, expected = kernels(module, ids), dense(module, ids)
    name = "mixture.experts.1.weight"
    assert float(expected[name].diagonal()[5:].min()) > 0
    for name, gram in expected.items():
        assert_close(torch.as_tensor(found[name].gram), gram, rtol=1e-9, atol=1e-13)
