"""One architecture of a run: its live model, its anatomy and its probe, or why there are none."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from . import models, probe
from .anatomy import Proof, effective_tensors, from_names, trace, verify
from .anatomy.parts import CANONICAL, PROJECTIONS, Anatomy, Component, is_expert, plain_name
from .checkpoints import State
from .config import Settings
from .errors import UsageError, unknown
from .models.live import Batch, Live
from .models.outputs import unmasked
from .models.zoo import OWN
from .weigh import Read, cover

ASSUMPTIONS = tuple(key for key in OWN if key != "probe")
"""What `--assume` may correct in a network that is rebuilt from its checkpoint alone."""


def label(each: probe.Probe) -> str:
    """A probe as it stands in every row: its name and fingerprint."""
    return f"{each.name}@{each.fingerprint[:12]}"


def signature(state: State) -> str:
    """A name for the architecture: the tensors' names and shapes."""
    text = "\n".join(f"{n} {i.shape}" for n, i in state.tensors.items())
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def is_part(component: Component) -> bool:
    """Whether a component has an output of its own: a bias or a table of positions has none."""
    named = component.name in CANONICAL or is_expert(component.name)
    return component.features is not None or named or component.is_unseen


def counted_entries(state: State) -> int:
    """Entries of the weights of a state: no buffers, tied tensors once."""
    infos = [i for i in state.tensors.values() if i.kind == "weight" and i.alias_of is None]
    return sum(math.prod(i.shape) for i in infos)


@dataclass(frozen=True)
class Network:
    """What is known of one architecture.

    Without a live model, `anatomy` comes from the names alone and `missing` says why, and which
    option supplies it. `announcements` are lines for the user. `second` is the data set whose
    inputs the sensitivity pairs with the probes'.
    """

    anatomy: Anatomy
    live: Live | None
    probes: tuple[probe.Probe, ...]
    missing: str | None
    announcements: tuple[str, ...]
    device: torch.device
    allow_partial: bool
    proofs: tuple[Proof, ...] = ()
    second: probe.Probe | None = None

    @property
    def assumptions(self) -> tuple[str, ...]:
        return self.live.assumptions if self.live else ()

    def facts(self) -> dict[str, Any]:
        return {
            "anatomy": self.anatomy.source,
            "model": self.live.source if self.live else None,
            "assumptions": list(self.assumptions),
            "missing": self.missing,
            "announcements": list(self.announcements),
            "proofs": [
                {"block": p.block, "ok": p.ok, "error": p.error if p.ok else None, "why": p.reason}
                for p in self.proofs
            ],
        }

    def stored_name(self, name: str) -> str:
        """The checkpoint's name for a tensor of the anatomy."""
        return self.live.stored.get(name, name) if self.live else name

    def reader(self, state: State) -> Read:
        """Reads an effective tensor of the state by the anatomy's name; KeyError if it has none."""
        effective = effective_tensors(state)
        merged = {t: m for m in (self.live.merges if self.live else ()) for t in m.targets}

        def read(name: str) -> torch.Tensor:
            if name in merged:
                parts = {source: effective.read(source) for source in merged[name].sources}
                return merged[name].convert(parts)[name]
            return effective.read(self.stored_name(name))

        return read

    def counted_name(self, state: State, name: str) -> str:
        """The stored name under which a tensor counts: of a tied one, the other end's."""
        stored = self.stored_name(name)
        info = state.tensors.get(stored)
        return info.alias_of if info is not None and info.alias_of else stored

    def observed(self) -> tuple[int, int]:
        """How many components are seen in a replay, of those that have an output."""
        parts = [c for c in self.anatomy.components if is_part(c)]
        seen = [c for c in parts if self.is_observed(c)]
        return (len(seen) if self.live else 0), len(parts)

    def is_observed(self, component: Component) -> bool:
        """Whether a replay sees the component's output, by itself or at the attention."""
        at_attention = component.name in PROJECTIONS and component.block in self.anatomy.attention
        seen = component.features is not None or at_attention or self._of_expert(component)
        return self.live is not None and seen

    def _of_expert(self, component: Component) -> bool:
        """Whether it is an expert's part that the routing shows."""
        site = self.anatomy.experts.get(component.block or 0)
        if site is None or not is_expert(component.name):
            return False
        return plain_name(component.name) in {*site.whole, "activation"}

    def on_device(self, batch: Batch) -> Batch:
        """The batch where the network is."""
        return {name: tensor.to(self.device) for name, tensor in batch.items()}

    def fill(self, state: State) -> None:
        """Put a state's tensors into the live model."""
        assert self.live is not None
        models.load(self.live, state, allow_partial=self.allow_partial)


def open_network(
    state: State, run_path: str | Path, settings: Settings, required: bool = True
) -> Network:
    """Rebuild, fill and trace the network of a state, and find its probe.

    When no model can be rebuilt, the weights alone are mapped by name and `missing` says what
    would help. Raises UsageError for a probe that doesn't fit and, where it is `required`, for a
    model that was asked for and doesn't.
    """
    device = usable_device(settings.device)
    for key in settings.assume if settings.model is None else ():
        if key not in ASSUMPTIONS:
            raise unknown("assumption", key, ASSUMPTIONS)
    try:
        hint = probe.hint(run_path, settings.probe)
        live = models.build(state, settings.model, {**hint, **settings.assume})
        models.load(live, state, allow_partial=settings.allow_partial)
    except models.ModelError as error:
        if (settings.model is not None or settings.assume) and required:
            raise
        return _weights_only(state, settings, device, str(error))
    live.module.to(device)
    probes = probe.find(run_path, live.inputs, settings.probe, settings.probe_inputs, settings.seed)
    tiny = {name: tensor[:2].to(device) for name, tensor in probes[0].batch.items()}
    for each in probes:
        _try(live, each, device)
    second = _second(run_path, live, settings, probes)
    if second is not None:
        _try(live, second, device)
    said = {unmasked(live.module, each.batch.get("mask")) for each in probes}
    live = replace(live, assumptions=(*live.assumptions, *(line for line in said if line)))
    anatomy = trace(live.module, live.forward, tiny)
    weights = [n for n, _ in live.module.named_parameters()]
    lines = [f"model: {live.source}", *live.assumptions]
    lines += [p.note for p in (*probes, *filter(None, [second])) if p.note] + list(anatomy.notes)
    network = Network(
        cover(anatomy, weights),
        live,
        probes,
        None,
        tuple(lines),
        device,
        settings.allow_partial,
        second=second,
    )
    return _proved(network, state, tiny)


def _second(
    run_path: str | Path, live: Live, settings: Settings, probes: tuple[probe.Probe, ...]
) -> probe.Probe | None:
    s = settings
    if s.second_probe is None:
        return None
    return probe.find_second(
        run_path, live.inputs, s.second_probe, s.sensitivity_pairs, s.seed, probes
    )


def _try(live: Live, each: probe.Probe, device: torch.device) -> None:
    """Run the first inputs of a probe plainly: what the model says of them is for the user."""
    batch = {name: tensor[:2].to(device) for name, tensor in each.batch.items()}
    live.module.eval()
    try:
        with torch.no_grad():
            outputs = live.forward(batch)
    except (RuntimeError, IndexError, ValueError, TypeError, AssertionError) as error:
        shape = "x".join(map(str, batch["inputs"].shape[1:]))
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise UsageError(
            f"the model can't run on {each.source} (inputs of {shape}): {said[0]}: give inputs of "
            "its own shape with --probe"
        ) from error
    labels = each.batch.get("labels")
    if labels is not None and int(labels.max()) >= outputs.shape[-1]:
        raise UsageError(
            f"{each.source}: the label {int(labels.max())} is beyond the model's "
            f"{outputs.shape[-1]} outputs"
        )


def _proved(network: Network, state: State, batch: Batch) -> Network:
    """The network with attention proved, block by block, from the mapped slices; what can't be
    proved loses its heads, for a wrong split raises nothing and looks right."""
    assert network.live is not None
    read, names = network.reader(state), set[str]()
    for component in network.anatomy.components:
        names |= {m.tensor for m in component.heads}
    tensors = {name: read(name).to(network.device) for name in names}
    live = network.live
    proofs = verify(live.module, live.forward, batch, network.anatomy, tensors)
    refused = {proof.block for proof in proofs if not proof.ok}
    lines = [f"block {p.block}: no rows per head: {p.reason}" for p in proofs if not p.ok]
    components = tuple(
        replace(c, heads=()) if c.block in refused else c for c in network.anatomy.components
    )
    return replace(
        network,
        anatomy=replace(network.anatomy, components=components),
        announcements=(*network.announcements, *lines),
        proofs=proofs,
    )


def _weights_only(state: State, settings: Settings, device: torch.device, why: str) -> Network:
    config = state.extras.get("config")
    families = [Path(f) for f in settings.families]
    anatomy = from_names(state, config if isinstance(config, dict) else None, families)
    weights = [n for n, i in state.tensors.items() if i.kind == "weight" and i.alias_of is None]
    lines = (f"weights only, no replay: {why}", *anatomy.notes)
    return Network(cover(anatomy, weights), None, (), why, lines, device, False)


def usable_device(name: str) -> torch.device:
    """The device of that name. Raises UsageError when no float64 tensor can be put there."""
    found = " or ".join(["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))])
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device {name}: there is no such device: give {found}") from None
    try:
        torch.zeros(1, dtype=torch.float64, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        # Sums and spectra are float64, which Apple's GPUs haven't got.
        said = str(error).strip().splitlines()[:1] or [type(error).__name__]
        why = said[0].split(". ")[0]
        raise UsageError(f"--device {name} can't be used here: {why}: give {found}") from error
    return device
