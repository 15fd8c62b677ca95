"""The tangent kernel against a plain backward pass and against torch.func."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import torch
from torch import Tensor, nn

from tests.benchmarks.harness import WHOLE, Comparison, Target, compare

Forward = Callable[[dict[str, Tensor]], Tensor]
PARTS, CHUNK = 12, 2


def _tiny(inputs: int = 16) -> tuple[nn.Module, Forward, dict[str, Tensor]]:
    return _vit("vit_tiny_patch16_224", 64, inputs)


def _base(inputs: int = 64) -> tuple[nn.Module, Forward, dict[str, Tensor]]:
    return _vit("vit_base_patch16_224", 224, inputs)


def _vit(name: str, size: int, inputs: int) -> tuple[nn.Module, Forward, dict[str, Tensor]]:
    import timm

    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, num_classes=10, img_size=size).eval()
    batch = {"inputs": torch.randn(inputs, 3, size, size)}
    return model, lambda b: model(b["inputs"]), batch


def plan_of(make: str) -> object:
    from plastiscope.observations import plan_ntk

    return plan_ntk(*globals()[make]())


def _planned_elsewhere(make: str) -> object:
    """A plan is made once a run: in another process, so that its memory isn't counted here."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(plan_of, make).result()


def ours_tiny() -> Callable[[], object]:
    from plastiscope.observations import observe_ntk

    plan = _planned_elsewhere("_tiny")
    model, forward, batch = _tiny()
    return lambda: observe_ntk(model, forward, batch, plan=plan)


def ours_tiny_with_plan() -> Callable[[], object]:
    from plastiscope.observations import observe_ntk

    model, forward, batch = _tiny()
    return lambda: observe_ntk(model, forward, batch)


def plain_tiny() -> Callable[[], object]:
    model, forward, batch = _tiny()
    parameters = list(model.parameters())
    return lambda: torch.autograd.grad(forward(batch).mean(1).sum(), parameters)


def ours_logits() -> Callable[[], object]:
    """The kernel of 160 gradients.

    What holds it: 29 GFLOP in ten backward passes, at 90 GFLOP/s a core, and 24 GFLOP in the
    kernel's sums, whose inner sizes are the 17 tokens and the 10 classes: these run at 25 to 50
    GFLOP/s, in 0.5 of the 1.4 s that one core takes.
    """
    from plastiscope.observations import observe_ntk

    plan = _planned_elsewhere("_tiny")
    model, forward, batch = _tiny()
    return lambda: observe_ntk(model, forward, batch, function="logits", plan=plan)


def jacrev_logits() -> Callable[[], object]:
    model, _, batch = _tiny()
    parameters = dict(model.named_parameters())

    def logits(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, p, (x[None],))[0]

    def kernel() -> Tensor:
        rows = torch.func.vmap(torch.func.jacrev(logits), (None, 0))(parameters, batch["inputs"])
        with torch.no_grad():
            flat = [g.flatten(2).flatten(0, 1) for g in rows.values()]
            return torch.stack([g @ g.mT for g in flat]).sum(0)

    return kernel


def ours_base() -> Callable[[], object]:
    from plastiscope.observations import observe_ntk

    plan = _planned_elsewhere("_base")
    model, forward, batch = _base()
    return lambda: observe_ntk(model, forward, batch, plan=plan, memory_limit=2 << 30)


def func_base() -> Callable[[], object]:
    """torch.func's work under 4 GB: the gradients of 64 inputs, a block of parameters at a time.

    The gradients of a block (1.8 GB) leave room for the activations of 2 inputs. Chunks of inputs
    instead of parameters would need each gradient again for every pair of chunks.
    """
    model, _, batch = _base()
    names = dict.fromkeys(_group(name) for name, _ in model.named_parameters())
    parts = [_part(model, batch, name) for name in names]
    return lambda: torch.stack([part() for part in parts]).sum(0)


def func_base_sample() -> Callable[[], object]:
    """One of 12 parts of it. A block in the middle stands for the mean: backward goes half the way.
    What isn't in a block is left out."""
    model, _, batch = _base()
    return _part(model, batch, "blocks.6")


def _group(name: str) -> str:
    return ".".join(name.split(".")[:2]) if name.startswith("blocks.") else ""


def _part(model: nn.Module, batch: dict[str, Tensor], group: str) -> Callable[[], Tensor]:
    """The kernel of one block's parameters, or of those outside of blocks."""
    chosen = {n: p.detach() for n, p in model.named_parameters() if _group(n) == group}
    rest = {n: p for n, p in model.named_parameters() if n not in chosen}

    def value(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, {**rest, **p}, (x[None],)).mean()

    gradient = torch.func.vmap(torch.func.grad(value), (None, 0))
    inputs = batch["inputs"]

    def part() -> Tensor:
        held = {n: p.new_empty(len(inputs), p.numel()) for n, p in chosen.items()}
        for first in range(0, len(inputs), CHUNK):
            some = slice(first, first + CHUNK)
            for n, g in gradient(chosen, inputs[some]).items():
                held[n][some] = g.detach().flatten(1)
        return torch.stack([g @ g.mT for g in held.values()]).sum(0)

    return part


def comparisons() -> Iterator[Comparison]:
    me = __name__
    tiny = "NTK, mean_logit, 16 inputs, ViT-Tiny at 64 px, all parameters"
    plain = "one forward and backward pass"
    yield compare(me, tiny, "ours_tiny", plain, "plain_tiny", Target(speed=1 / 1.5, memory=1.2))
    yield compare(
        me, f"{tiny}, plan included", "ours_tiny_with_plan", plain, "plain_tiny", Target()
    )
    yield compare(
        me,
        "NTK, logits, 10 classes, ViT-Tiny, 16 inputs",
        "ours_logits",
        "torch.func vmap(jacrev)",
        "jacrev_logits",
        Target(speed=5.0, memory=1 / 4),
    )
    yield compare(
        me,
        "NTK, mean_logit, 64 inputs, ViT-B/16 at 224 px",
        "ours_base",
        "torch.func vmap(grad) in its largest chunks under 4 GB",
        "func_base" if WHOLE else "func_base_sample",
        Target(speed=1.0, bytes=4e9),
        parts=1 if WHOLE else PARTS,
    )
