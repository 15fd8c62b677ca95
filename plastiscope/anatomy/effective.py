"""The weights in use: weight_norm and spectral_norm resolved from their stored factors.

Three key styles: `weight_g` with `weight_v`; `parametrizations.weight.original0` and `.original1`;
`weight_orig` with `weight_u` and `weight_v`, or `parametrizations.weight.original` with `0._u` and
`0._v`. `weight_v` is a matrix in weight_norm and a vector in spectral_norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from plastiscope.checkpoints.run import State

PARAMETRIZED = "parametrizations."


class Effective(Mapping[str, Tensor]):
    """A state's tensors, read lazily, every factored weight under the one name it has in use."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._factors: dict[str, tuple[str, ...]] = {}
        self._recipes: dict[str, Callable[..., Tensor]] = {}
        used: set[str] = set()
        for name in state.tensors:
            found = _factored(state, name)
            if found is not None:
                effective, factors, recipe = found
                self._factors[effective], self._recipes[effective] = factors, recipe
                used.update(factors)
        order = dict.fromkeys(self._owner(name, used) for name in state.tensors)
        self._names = [name for name in order if name is not None]

    def _owner(self, name: str, used: set[str]) -> str | None:
        if name not in used:
            return name
        return next(e for e, factors in self._factors.items() if name in factors)

    def names(self) -> tuple[str, ...]:
        """The effective tensors, in stored order."""
        return tuple(self._names)

    def factors(self, name: str) -> tuple[str, ...]:
        """The stored tensors that one is made of: itself, unless it is factored."""
        return self._factors.get(name, (name,))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an effective tensor, without reading it."""
        factors = self._factors.get(name)
        if factors is None:
            return self.state.tensors[name].shape
        shapes = [self.state.tensors[f].shape for f in factors]
        return max(shapes, key=lambda s: (torch.Size(s).numel(), len(s)))

    def read(self, name: str) -> Tensor:
        """One effective tensor, on the CPU. Rows of zeros in weight_norm's direction stay zeros."""
        if name in self._recipes:
            return self._recipes[name](*(self.state.read(f) for f in self._factors[name]))
        return self.state.read(name)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._recipes and name not in self.state.tensors:
            raise KeyError(name)
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def effective_tensors(state: State) -> Effective:
    """A lazy view of a state in which every weight is the one the network computes with."""
    return Effective(state)


Recipe = tuple[str, tuple[str, ...], Callable[..., Tensor]]


def _factored(state: State, name: str) -> Recipe | None:
    """The effective name, the factors and how they combine, when `name` is a leading factor."""
    tensors = state.tensors
    if name.endswith("_g") and name[:-2] + "_v" in tensors:
        return name[:-2], (name, name[:-2] + "_v"), normalized_weight
    if name.endswith(".original0") and PARAMETRIZED in name:
        pair = (name, name[: -len("0")] + "1")
        return (_plain(name), pair, normalized_weight) if pair[1] in tensors else None
    if name.endswith("_orig"):
        base = name[: -len("_orig")]
        vectors = (base + "_u", base + "_v")
        if all(v in tensors for v in vectors):
            return base, (name, *vectors), spectral_weight
        mask = base + "_mask"
        return (base, (name, mask), torch.mul) if mask in tensors else None
    if name.endswith(".original") and PARAMETRIZED in name:
        base = name[: -len("original")]
        vectors = (base + "0._u", base + "0._v")
        if all(v in tensors for v in vectors):
            return _plain(name), (name, *vectors), spectral_weight
    return None


def _plain(name: str) -> str:
    """`fc.parametrizations.weight.original0` is in use as `fc.weight`."""
    owner, _, rest = name.rpartition(PARAMETRIZED)
    return owner + rest.rpartition(".")[0]


def normalized_weight(g: Tensor, v: Tensor) -> Tensor:
    """weight_norm: g v / |v|, the norm over every axis along which g has size 1; 0 where v is 0."""
    axes = [a for a in range(v.ndim) if g.ndim <= a or g.shape[a] == 1] if g.ndim else []
    axes = axes or list(range(v.ndim))
    direction, exact = v.double(), g.double()
    norm = direction.square().sum(axes, keepdim=True).sqrt()
    unit = torch.where(norm > 0, direction / norm.clamp_min(torch.finfo(torch.float64).tiny), 0.0)
    return (unit * exact).to(v.dtype)


def spectral_weight(weight: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """spectral_norm: the weight divided by u^T W v.

    The output axis is the one that u and v fit (the second for transposed convolutions); where
    both fit, the one that gives the larger value, as power iteration does.
    """
    exact = weight.double()
    sigmas = [
        u.double() @ exact.movedim(axis, 0).flatten(1) @ v.double()
        for axis in range(min(weight.ndim, 2))
        if weight.shape[axis] == len(u) and weight.numel() == len(u) * len(v)
    ]
    sigma = max(sigmas, key=abs, default=torch.zeros((), dtype=torch.float64))
    return (exact / sigma).to(weight.dtype) if sigma != 0 else weight
