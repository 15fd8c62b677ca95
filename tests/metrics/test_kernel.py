"""The layer-wise kernel equals dense per-input gradients on every kind of network."""

import numpy as np
import pytest
import torch
from networks import KINDS, network
from torch import nn
from torch.testing import assert_close

from plastiscope.errors import UsageError
from plastiscope.metrics import Place, measure
from plastiscope.observations import Kernel, OutputSums, observe_ntk, plan_ntk

PLACE = Place("network", None, "ntk")


def dense(module, forward, batch, function):
    """Slow and obvious: one backward pass for each input and output, everything stored."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    rows = []
    for i in range(len(batch["inputs"])):
        single = {key: value[i : i + 1] for key, value in batch.items()}
        out = forward(single)[0]
        if function == "mean_logit":
            scalars = [out.mean()]
        elif function == "loss":
            labels = single["labels"].reshape(-1)
            scalars = [nn.functional.cross_entropy(out.reshape(-1, out.shape[-1]), labels)]
        else:
            scalars = list(out if out.ndim == 1 else out.mean(0))
        for f in scalars:
            found = torch.autograd.grad(f, parameters, retain_graph=True, allow_unused=True)
            flat = [
                torch.zeros_like(p) if g is None else g
                for p, g in zip(parameters, found, strict=True)
            ]
            rows.append(torch.cat([g.flatten() for g in flat]))
    jacobian = torch.stack(rows)
    return jacobian @ jacobian.mT


@pytest.mark.parametrize("function", ["mean_logit", "loss", "logits"])
@pytest.mark.parametrize("kind", KINDS)
def test_kernel_equals_the_dense_one(kind, function):
    module, forward, batch = network(kind)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    found = observe_ntk(module, forward, batch, function=function)["network"]
    expected = dense(module, forward, batch, function)
    scale = float(expected.diagonal().max())
    assert_close(torch.as_tensor(found.gram), expected, rtol=1e-9, atol=1e-11 * scale)
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert all(p.grad is None for p in module.parameters())
    assert not any(part._forward_hooks or part.training for part in module.modules())


@pytest.mark.parametrize("kind", ["timm vit", "gpt2", "cnn"])
def test_recomputed_blocks_change_nothing(kind):
    """R15: under a small limit activations are made again in backward."""
    module, forward, batch = network(kind)
    plan = plan_ntk(module, forward, batch)
    free = observe_ntk(module, forward, batch, plan=plan)["network"]
    limit = 60_000
    assert plan.bytes_per_input * len(batch["inputs"]) > limit or kind == "cnn"
    tight = observe_ntk(module, forward, batch, plan=plan, memory_limit=limit)["network"]
    np.testing.assert_allclose(tight.gram, free.gram, rtol=1e-10)
    assert "forward" not in vars(module)


@pytest.mark.parametrize("kind", ["timm vit", "gpt2"])
def test_outputs_at_once_equal_a_copy_of_each_input_for_each(kind):
    """R15: under a small limit the backward passes' gradients aren't held until the last one."""
    module, forward, batch = network(kind)
    plan = plan_ntk(module, forward, batch)
    held = plan.bytes_per_input * len(batch["inputs"])
    options = {"function": "logits", "plan": plan}
    free = observe_ntk(module, forward, batch, **options)["network"]
    tight = observe_ntk(module, forward, batch, memory_limit=2 * held, **options)["network"]
    assert free.outputs > 1
    np.testing.assert_allclose(tight.gram, free.gram, rtol=1e-9, atol=1e-12 * free.gram.max())


@pytest.mark.parametrize("work", [1 << 8, 1 << 12])
def test_chunks_change_nothing(work, monkeypatch):
    """R15."""
    module, forward, batch = network("timm vit")
    whole = observe_ntk(module, forward, batch)["network"].gram
    monkeypatch.setattr("plastiscope.observations.factors.WORK_BYTES", work)
    np.testing.assert_allclose(observe_ntk(module, forward, batch)["network"].gram, whole, 1e-10)


def test_limit_that_cannot_be_kept_is_refused_with_the_need():
    """R15."""
    module, forward, batch = network("home-made")
    plan = plan_ntk(module, forward, batch)
    assert "attention.qkv" in plan.looped
    need = 5 * 3 * 12 * 12 * 8 / 1e6
    with pytest.raises(UsageError, match=f"attention.qkv for 5 inputs need {need:.1f} MB"):
        observe_ntk(module, forward, batch, plan=plan, memory_limit=1000)


def test_train_mode_is_refused():
    """R11, N16: per-input gradients aren't defined through batch statistics."""
    module, forward, batch = network("mlp")
    module.train()
    with pytest.raises(UsageError, match="eval"):
        observe_ntk(module, forward, batch)


def test_outputs_that_mix_inputs_are_refused():
    module = nn.Linear(3, 2).eval()
    batch = {"inputs": torch.randn(4, 3)}
    with pytest.raises(UsageError, match="depends on the other inputs"):
        observe_ntk(module, lambda b: module(b["inputs"] - b["inputs"][0]), batch)


def test_plan_of_a_zero_initialised_network_serves_a_trained_one():
    """At step 0 the zero projection hides everything before it from the gradient."""
    module, forward, batch = network("mlp")
    trained = module[3].weight.detach().clone()
    with torch.no_grad():
        module[3].weight.zero_()
    plan = plan_ntk(module, forward, batch)
    assert not module[3].weight.any()
    with torch.no_grad():
        module[3].weight.copy_(trained)
    found = observe_ntk(module, forward, batch, plan=plan)["network"]
    expected = dense(module, forward, batch, "mean_logit")
    assert_close(torch.as_tensor(found.gram), expected, rtol=1e-9, atol=1e-12)


def test_layers_are_given_back_after_an_error():
    module, _, batch = network("mlp")
    before = nn.functional.linear

    def fails(given):
        module(given["inputs"])
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        observe_ntk(module, fails, batch)
    assert nn.functional.linear is before


def test_components_add_up_to_the_network():
    module, forward, batch = network("timm vit")
    components = {name: name.split(".")[0] for name, _ in module.named_parameters()}
    del components["cls_token"]
    found = observe_ntk(module, forward, batch, components=components)
    parts = [k.gram for key, k in found.items() if key != "network"]
    np.testing.assert_allclose(sum(parts), found["network"].gram, rtol=1e-12)
    assert found.keys() == {*components.values(), "network", "other"}
    only_head = dense(
        module.head, lambda b: module.head(b["inputs"]), _head_inputs(module, batch), "mean_logit"
    )
    np.testing.assert_allclose(found["head"].gram, only_head.numpy(), rtol=1e-9)


def _head_inputs(module, batch):
    with torch.no_grad():
        return {
            "inputs": module.forward_head(module.forward_features(batch["inputs"]), pre_logits=True)
        }


def test_padding_does_not_count():
    module, forward, batch = network("gpt2")
    mask = torch.ones(5, 6, dtype=torch.long)
    mask[:, 4:] = 0
    padded = observe_ntk(module, forward, {"inputs": batch["inputs"], "mask": mask})["network"]
    short = observe_ntk(module, forward, {"inputs": batch["inputs"][:, :4]})["network"]
    np.testing.assert_allclose(padded.gram, short.gram, rtol=1e-9)


def test_wide_outputs_are_projected_by_seed():
    module = nn.Linear(5, 40).eval()
    batch = {"inputs": torch.randn(3, 5)}
    one, same, other = (
        observe_ntk(module, lambda b: module(b["inputs"]), batch, function="logits", seed=seed)
        for seed in (0, 0, 1)
    )
    assert one["network"].gram.shape == (48, 48)
    np.testing.assert_array_equal(one["network"].gram, same["network"].gram)
    assert not np.allclose(one["network"].gram, other["network"].gram)


def rows(kernel, only=None):
    return {
        (r.metric, r.index): r
        for r in measure(kernel, PLACE, only)
        if "against=previous" not in r.parameters
    }


def kernel(gram, **options):
    settings = {"function": "mean_logit", "outputs": 1, "eps": 1.2e-7, **options}
    return Kernel(np.asarray(gram, dtype=float), **settings)


def test_closed_forms():
    found = rows(kernel(np.diag([3.0, 1.0])))
    assert found["ntk_trace", None].value == 4
    assert found["ntk_condition_number", None].value == pytest.approx(3)
    assert found["ntk_effective_rank", None].value == pytest.approx(np.exp(0.5623351446))
    assert found["ntk_offdiagonal", None].value == 0
    assert found["ntk_spectrum", 0].value == 3 and found["ntk_spectrum", 1].value == 1
    ones = rows(kernel(np.ones((4, 4))))
    assert ones["ntk_offdiagonal", None].value == pytest.approx(3)
    assert ones["ntk_srank", None].value == 1 and ones["ntk_srank", None].maximum == 4
    assert found["ntk_trace", None].parameters == "f=mean_logit, n=2, mode=eval"


def test_rank_five_jacobian_has_five_eigenvalues_and_no_condition():
    """N16: rounding must not make eigenvalues negative, nor a condition number of rounding."""
    j = np.random.default_rng(0).standard_normal((20, 5)).astype(np.float32)
    found = rows(kernel(j @ j.T))
    spectrum = [found["ntk_spectrum", i].value for i in range(20)]
    assert min(spectrum) >= 0 and sum(v > 1e-5 * spectrum[0] for v in spectrum) == 5
    row = found["ntk_condition_number", None]
    assert row.value is None and row.status == "unresolved"
    assert found["ntk_effective_rank", None].value <= 5.001


def test_alignment_and_drift():
    labels = np.array([0, 0, 1, 1])
    same = (labels[:, None] == labels).astype(float)
    aligned = kernel(same + 0.0, labels=labels, first=same * 3, previous=np.eye(4))
    found = rows(aligned)
    assert found["ntk_alignment", None].value == pytest.approx(1)
    assert found["ntk_drift", None].value == pytest.approx(0, abs=1e-12)
    (turned,) = [
        r for r in measure(aligned, PLACE, frozenset({"ntk_drift"})) if "previous" in r.parameters
    ]
    centering = np.eye(4) - 0.25
    a, b = centering @ same @ centering, centering
    expected = 1 - (a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b)
    assert turned.value == pytest.approx(expected)
    assert ("ntk_alignment", None) not in rows(kernel(np.eye(3)))
    logits = kernel(np.kron(same, np.eye(2)), labels=labels, outputs=2, function="logits")
    assert rows(logits)["ntk_alignment", None].value == pytest.approx(1)


def test_a_kernel_that_is_the_same_for_all_inputs_has_no_alignment():
    """A bias before the logits: centring leaves rounding, which aligns with anything."""
    labels, generator = np.array([0, 0, 1, 1]), np.random.default_rng(0)
    for noise, status in ((0.0, "undefined"), (1e-7, "undefined"), (1e-3, "ok")):
        gram = 3.0 + noise * generator.standard_normal((4, 4))
        found = rows(kernel(gram + gram.T, labels=labels, first=np.eye(4)))
        assert found["ntk_alignment", None].status == status
        assert found["ntk_drift", None].status == status


def test_bad_kernels_have_reasons():
    bad = np.eye(3)
    bad[0, 0] = np.nan
    for (metric, _), row in rows(kernel(bad, function="loss")).items():
        assert row.value is None and row.status in ("non_finite",), metric
    zero = rows(kernel(np.zeros((3, 3))))
    assert zero["ntk_effective_rank", None].value == 0
    assert zero["ntk_effective_rank", None].status == "zero_matrix"


def test_gradient_norm_and_fisher_rank():
    module, forward, batch = network("mlp", inputs=7)
    found = rows(observe_ntk(module, forward, batch, function="loss")["network"])
    loss = nn.functional.cross_entropy(forward(batch), batch["labels"])
    gradients = torch.autograd.grad(loss, list(module.parameters()))
    expected = float(torch.cat([g.flatten() for g in gradients]).norm())
    assert found["gradient_norm", None].value == pytest.approx(expected, rel=1e-9)
    lam = torch.linalg.svdvals(dense(module, forward, batch, "loss"))
    p = lam / lam.sum()
    rank = float(torch.exp(-(p * p.log()).nan_to_num().sum()))
    assert found["fisher_effective_rank", None].value == pytest.approx(rank, rel=1e-6)
    assert ("gradient_norm", None) not in rows(observe_ntk(module, forward, batch)["network"])


def test_the_gradient_norm_is_that_of_the_loss_that_the_table_reports():
    """Texts of unequal lengths: a label counts as much in a short one, whole and by component."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=13, n_positions=8, n_embd=8, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0,
    )  # fmt: skip
    module = transformers.GPT2LMHeadModel(config).eval().double()
    ids = torch.randint(0, 13, (6, 8))
    labels = torch.randint(0, 13, (6, 8))
    mask = torch.ones(6, 8, dtype=torch.long)
    for i, length in enumerate((8, 1, 3, 7, 2, 0)):
        labels[i, length:], mask[i, max(length, 1) :] = -100, 0
    batch = {"inputs": ids, "labels": labels, "mask": mask}

    def forward(given):
        return module(given["inputs"], attention_mask=given["mask"]).logits

    owners = {n: n.split(".")[2] if ".h." in n else "rest" for n, _ in module.named_parameters()}
    found = observe_ntk(module, forward, batch, function="loss", components=owners)
    sums = OutputSums(2)
    sums.add(forward(batch), labels)
    logits = forward(batch).log_softmax(-1)
    terms = [-logits[i, t, labels[i, t]] for i in range(6) for t in range(8) if labels[i, t] >= 0]
    loss = torch.stack(terms).mean()
    assert loss.item() == pytest.approx(float(sums.finish().loss[0]), rel=1e-12)
    named = dict(module.named_parameters())
    gradients = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
    norms = {}
    for group, one in found.items():
        own = [g.flatten() for n, g in gradients.items() if group in ("network", owners[n])]
        (row,) = measure(one, PLACE, frozenset({"gradient_norm"}))
        assert row.value == pytest.approx(float(torch.cat(own).norm()), rel=1e-9), group
        assert (row.parameters, row.version) == ("n=6", 2)
        norms[group] = row.value
    assert norms.keys() == {"network", "0", "1", "rest"}
    of_inputs = np.sqrt(found["network"].gram.sum()) / 6  # what the mean over inputs would give
    assert abs(of_inputs / norms["network"] - 1) > 0.05


def test_the_gradient_norm_without_labels_has_a_reason():
    bare = kernel(np.eye(3), function="loss", counts=np.zeros(3, dtype=int))
    row = rows(bare)["gradient_norm", None]
    assert (row.value, row.status) == (None, "no_labels")


def test_float32_networks_agree_to_their_precision():
    module, forward, batch = network("timm vit", dtype=torch.float32)
    found = observe_ntk(module, forward, batch)["network"]
    exact, forward64, batch64 = network("timm vit")
    exact.load_state_dict(module.state_dict())
    batch64 = {key: v.double() if v.is_floating_point() else v for key, v in batch.items()}
    expected = dense(exact, forward64, batch64, "mean_logit").numpy()
    np.testing.assert_allclose(found.gram, expected, rtol=1e-5, atol=1e-6 * expected.max())


@pytest.mark.parametrize("transposed", [False, True])
def test_a_linear_layers_output_may_be_rewritten_in_place(transposed):
    torch.manual_seed(0)
    rewriting = nn.ReLU(inplace=True)
    module = nn.Sequential(nn.Linear(5, 7), rewriting, nn.Linear(7, 3)).double().eval()
    x = torch.randn(4, 3, 5, dtype=torch.float64)
    batch = {"inputs": x.new_zeros(4, 5, 3).transpose(1, 2).copy_(x) if transposed else x}

    def forward(given):
        return module(given["inputs"]).flatten(1)

    found = observe_ntk(module, forward, batch)["network"]
    rewriting.inplace = False
    expected = dense(module, forward, batch, "mean_logit").numpy()
    np.testing.assert_allclose(found.gram, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_rounding_leaves_of_a_bias_that_cancels_has_no_rank(dtype):
    """A bias of the keys adds the same to every score of a query: the softmax takes it off."""
    import transformers

    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 4}
    more = {"intermediate_size": 32, "image_size": 8, "patch_size": 2, "num_channels": 1}
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**size, **more))
    model = model.eval().to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.5)
    batch = {"inputs": torch.randn(12, 1, 8, 8, dtype=dtype)}
    names = {name: name for name, _ in model.named_parameters()}
    found = observe_ntk(model, lambda b: model(b["inputs"]).logits, batch, components=names)
    lost = {name for name, one in found.items() if one.status != "ok"}
    assert lost == {n for n in names if n.endswith(("k_proj.bias", "key.bias"))} and len(lost) == 2
    for name in lost:
        assert {r.status for r in measure(found[name], PLACE)} == {"unresolved"}
        assert not any(r.value is not None for r in measure(found[name], PLACE))
