"""A kernel whose blocks run again in backward, for want of memory, is the same on every device."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from plastiscope.observations import observe_ntk, plan_ntk
from tests.devices import networks
from tests.devices.present import DEVICES


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", ["mean_logit", "logits"])
def test_recomputed_blocks(device: str, function: str) -> None:
    torch.manual_seed(0)
    net, x = networks.TinyViT(2).double().eval(), networks.INPUTS["vit"]()
    kernels = []
    for where in ("cpu", device):
        net.to(where)
        batch = {"inputs": x.to(where)}
        plan = plan_ntk(net, lambda given: net(given["inputs"]), batch)
        limit = plan.bytes_per_input * len(x) - 1
        found = observe_ntk(
            net, lambda given: net(given["inputs"]), batch, function=function, plan=plan,
            memory_limit=limit if where == device else 1 << 30,
        )  # fmt: skip
        kernels.append(found["network"].gram)
    assert_close(kernels[1], kernels[0])
