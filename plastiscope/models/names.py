"""Which stored tensor fills which parameter: the same name, or the same but for one prefix."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import nn

from plastiscope.models.loading import tensors_of

WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
# torch renamed the factors of weight_norm and spectral_norm when they became parametrizations.
FACTORS = (
    ("parametrizations.weight.original0", "weight_g"),
    ("parametrizations.weight.original1", "weight_v"),
    ("parametrizations.weight.original", "weight_orig"),
    ("parametrizations.weight.0._u", "weight_u"),
    ("parametrizations.weight.0._v", "weight_v"),
)


def match(module: nn.Module, stored: Collection[str]) -> dict[str, str]:
    """The stored name of each tensor of the module, for those that have one."""
    return pair({name: spellings(name) for name in tensors_of(module)}, stored)


def pair(wanted: dict[str, tuple[str, ...]], stored: Collection[str]) -> dict[str, str]:
    """Pair names that equal one of the spellings, under the one prefix that pairs the most."""
    names = set(stored)
    best: dict[str, str] = {}
    for strip, add in _prefixes(wanted, names):
        paired = {
            name: found
            for name, forms in wanted.items()
            if (found := _find(forms, names, strip, add)) is not None
        }
        if len(paired) > len(best):
            best = paired
    return best


def spellings(name: str) -> tuple[str, ...]:
    """A module's name as it may be stored: without wrappers, with older names of its factors."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    forms = [name]
    for new, old in FACTORS:
        for here, there in ((new, old), (old, new)):
            if name == here or name.endswith("." + here):
                forms.append(name[: len(name) - len(here)] + there)
    return tuple(forms)


def _find(forms: tuple[str, ...], names: set[str], strip: str, add: str) -> str | None:
    for form in forms:
        if form.startswith(strip) and (name := add + form[len(strip) :]) in names:
            return name
    return None


def _prefixes(wanted: Iterable[str], stored: set[str]) -> list[tuple[str, str]]:
    """Prefixes to strip from the module's names and to add: none first, then either."""
    return [
        ("", ""),
        *(("", prefix) for prefix in _leading(stored)),
        *((prefix, "") for prefix in _leading(wanted)),
    ]


def _leading(names: Iterable[str]) -> list[str]:
    """First and first two components of names ("model.", "model.net."), in order of appearance."""
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        for depth in (1, 2):
            if len(parts) > depth:
                found[".".join(parts[:depth]) + "."] = None
    return list(found)
