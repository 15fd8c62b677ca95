"""Look at chosen tensors and attentions while a model runs, and leave no trace.

Axes: B inputs, H heads, Hkv key/value heads, Tq queries, Tk keys, dh head width.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from plastiscope.anatomy.operands import HIDDEN, SDPA, sdpa_argument
from plastiscope.anatomy.parts import AttentionSite, ExpertSite, Operand, Site
from plastiscope.anatomy.passage import Follower, Passage, tensors_in, undisturbed
from plastiscope.anatomy.products import PRODUCTS
from plastiscope.anatomy.record import PICKS
from plastiscope.anatomy.routing import OnExpert, Routing
from plastiscope.errors import NotEnoughEvidenceError


@dataclass(frozen=True)
class AttentionCall:
    """One attention as it happened: q [B, H, Tq, dh], k and v [B, Hkv, Tk, dh] (before they are
    repeated for grouped heads) and its output [B, H, Tq, dh].

    `visible` is True where a query may see a key, broadcastable to [B, H, Tq, Tk], or None when
    all are seen. `probabilities` [B, H, Tq, Tk] are the softmax the model computed, or computed
    anew from q, k and the mask, in float32 or better; a query that sees no key has zeros.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    output: Tensor
    visible: Tensor | None
    _logits: Callable[[], Tensor]
    _given: Tensor | None = None

    @property
    def probabilities(self) -> Tensor:
        """Attention probabilities [B, H, Tq, Tk], rows summing to one."""
        if self._given is not None:
            return self._given
        logits = self._logits()
        blind = torch.isneginf(logits).all(-1, keepdim=True)
        return torch.softmax(logits.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)


@dataclass
class Watch(Follower):
    """Counts what was seen: `fired` holds, for each key, how often in the current pass."""

    sites: Mapping[Hashable, Site]
    attention: Mapping[Hashable, AttentionSite]
    on_tensor: Callable[[Hashable, Tensor], None]
    on_attention: Callable[[Hashable, AttentionCall], None]
    clone: bool = True
    detach: bool = True
    routing: Routing | None = None
    fired: Counter[Hashable] = field(default_factory=Counter)
    passage: Passage | None = None
    _at: dict[Site, list[Hashable]] = field(default_factory=dict)
    _parts: dict[Site, list[tuple[tuple[Hashable, int], str]]] = field(default_factory=dict)
    _single: dict[tuple[Hashable, int], AttentionSite] = field(default_factory=dict)
    _held: dict[tuple[Hashable, int], dict[str, Tensor]] = field(default_factory=dict)
    _calls: dict[Hashable, dict[int, AttentionCall]] = field(default_factory=dict)
    _ops: set[str] = field(default_factory=set)
    _modules: set[str] = field(default_factory=set)
    _routes: dict[Site, Hashable] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, site in self.sites.items():
            self._at.setdefault(site, []).append(key)
        for key, whole in self.attention.items():
            for number, found in enumerate(whole.parts or (whole,)):
                self._attend((key, number), found)
        routes = self.routing.sites if self.routing is not None else {}
        self._routes = {site: key for key, site in routes.items()}
        wanted = [*self._at, *self._parts, *self._routes]
        self._ops = {site.op for site in wanted}
        self._modules = {site.module for site in wanted}

    def _attend(self, key: tuple[Hashable, int], found: AttentionSite) -> None:
        self._single[key] = found
        if found.site.op == SDPA:
            self._parts.setdefault(found.site, []).append((key, "call"))
            return
        for name in ("q", "k", "v", "scores", "probabilities", "output"):
            operand: Operand | None = getattr(found, name)
            if operand is not None:
                self._parts.setdefault(operand.site, []).append((key, name))

    def check(self) -> None:
        """End one pass: NotEnoughEvidenceError names the sites that were not seen in it."""
        wanted = [*self.sites, *self.attention, *self._routes.values()]
        missed = [str(key) for key in wanted if not self.fired[key]]
        self.fired.clear()
        self._held.clear()
        self._calls.clear()
        if self.passage is not None:
            self.passage.start_again()
        if self.routing is not None:
            self.routing.end()
        if missed:
            raise NotEnoughEvidenceError(
                f"never reached in this forward pass: {', '.join(missed)}; "
                "the model took another path than when it was traced"
            )

    # --- following ---

    def function(
        self,
        site: Site,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if self.routing is not None and site.op in PRODUCTS:
            function = functools.partial(self.routing.product, function)
        elif self.routing is not None and site.op in PICKS:
            function = functools.partial(self.routing.pick, function)
        if site.op not in self._ops or site.module not in self._modules:
            return function(*args, **kwargs)
        self._inputs(site, args, kwargs)
        calls = [key for key, name in self._parts.get(site, ()) if name == "call"]
        given = tuple(self._keep(a) for a in args) if calls else args
        result = function(*args, **kwargs)
        self._outputs(site, result)
        for key in calls:
            self._fused(key, given, kwargs, result)
        return result

    def enter(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if site.module in self._modules:
            self._inputs(Site(site.module, site.call), args, kwargs)

    def leave(self, site: Site, output: Any) -> None:
        if site.module in self._modules:
            self._outputs(site, output)

    def _inputs(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for position, tensor in enumerate(tensors_in((args, kwargs))):
            port = f"input{position or ''}"
            self._seen(Site(site.module, site.call, site.op, site.ordinal, port), tensor)

    def _outputs(self, site: Site, output: Any) -> None:
        for position, tensor in enumerate(tensors_in(output)):
            port = f"output{position or ''}"
            self._seen(Site(site.module, site.call, site.op, site.ordinal, port), tensor)

    def _seen(self, site: Site, tensor: Tensor) -> None:
        for key in self._at.get(site, ()):
            self.fired[key] += 1
            self.on_tensor(key, self._keep(tensor))
        if self.routing is not None and site in self._routes:
            self.fired[self._routes[site]] += 1
            with torch._C.DisableTorchFunction():
                self.routing.see(site, tensor)
        for key, name in self._parts.get(site, ()):
            if name != "call":
                self._held.setdefault(key, {})[name] = self._keep(tensor)
                if name == "output":
                    self._explicit(key)

    def _keep(self, item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        with torch._C.DisableTorchFunction():  # or the passage would count these as the model's
            item = item.detach() if self.detach else item
            return item.clone() if self.clone else item

    # --- attention ---

    def _fused(
        self,
        key: tuple[Hashable, int],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Tensor,
    ) -> None:
        named = {name: self._keep(value) for name, value in kwargs.items()}
        self._happened(key, fused_call(self._single[key], args, named, self._keep(result)))

    def _explicit(self, key: tuple[Hashable, int]) -> None:
        held = self._held.pop(key)
        if len(held) == 6:
            self._happened(key, explicit_call(self._single[key], held))

    def _happened(self, key: tuple[Hashable, int], call: AttentionCall) -> None:
        """One attention, or one head of one: told when all are there."""
        owner, number = key
        calls = self._calls.setdefault(owner, {})
        calls[number] = call
        site = self.attention[owner]
        if len(calls) == max(1, len(site.parts)):
            del self._calls[owner]
            self.fired[owner] += 1
            with torch._C.DisableTorchFunction():
                whole = joined_call(site, [calls[k] for k in sorted(calls)])
            self.on_attention(owner, whole)


def joined_call(site: AttentionSite, calls: list[AttentionCall]) -> AttentionCall:
    """The attention of heads that were computed one by one."""
    if not site.parts:
        return calls[0]
    first = [site.kv_of_head.index(k) for k in range(site.kv_heads)] if site.kv_of_head else None
    k, v = (torch.cat([_by_query(c, getattr(c, x)) for c in calls], 1) for x in "kv")
    shape = [(*c.q.shape[:3], c.k.shape[2]) for c in calls]
    seen = [torch.ones(s, dtype=torch.bool) for s in shape]
    hidden = any(c.visible is not None for c in calls)
    seen = [
        s if c.visible is None else c.visible.expand(s.shape)
        for s, c in zip(seen, calls, strict=True)
    ]
    given = [c._given for c in calls]
    return AttentionCall(
        torch.cat([c.q for c in calls], 1),
        k if first is None else k[:, first],
        v if first is None else v[:, first],
        torch.cat([c.output for c in calls], 1),
        torch.cat(seen, 1) if hidden else None,
        lambda: torch.cat([c._logits() for c in calls], 1),
        torch.cat([g for g in given if g is not None], 1) if None not in given else None,
    )


def _by_query(call: AttentionCall, tensor: Tensor) -> Tensor:
    """k or v of each query head of one of the attentions."""
    return tensor.repeat_interleave(call.q.shape[1] // tensor.shape[1], 1)


def fused_call(
    site: AttentionSite, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor
) -> AttentionCall:
    """The attention that one call of scaled_dot_product_attention computed."""
    arranged = _Arranged(site)
    given = dict(kwargs)
    q = arranged.q(sdpa_argument(args, given, "query"))
    k = arranged.shared(site.k, sdpa_argument(args, given, "key"))
    v = arranged.shared(site.v, sdpa_argument(args, given, "value"))
    mask, causal = sdpa_argument(args, given, "attn_mask"), sdpa_argument(args, given, "is_causal")
    seen, added = _mask(mask, bool(causal), q, k)
    bias = None if added is None else arranged.map(added)
    visible = None if seen is None else arranged.map(seen)
    scale = given.get("scale")
    output = arranged.q(result, site.output)
    return AttentionCall(
        q, k, v, output, visible, lambda: _logits(q, k, scale, bias, visible, site)
    )


def explicit_call(site: AttentionSite, held: Mapping[str, Tensor]) -> AttentionCall:
    """The attention that a softmax between two products computed; `held` by operand name."""
    arranged = _Arranged(site)
    assert site.scores is not None and site.probabilities is not None
    scores = arranged.operand(site.scores, held["scores"])
    maps = arranged.operand(site.probabilities, held["probabilities"])
    scores = _without_sinks(scores, maps)
    seen = ~(scores <= HIDDEN)  # NaN isn't hidden: it has to show
    return AttentionCall(
        arranged.q(held["q"]),
        arranged.shared(site.k, held["k"]),
        arranged.shared(site.v, held["v"]),
        arranged.q(held["output"], site.output),
        _hiding(seen),
        lambda: scores,
        maps if maps.dtype == torch.float64 else maps.float(),
    )


def _without_sinks(scores: Tensor, maps: Tensor) -> Tensor:
    """The scores of the keys alone, when the softmax ran over further columns, first or last."""
    keys = maps.shape[-1]
    if scores.shape[-1] == keys:
        return scores
    whole = torch.softmax(scores.to(maps), -1)
    first = (whole[..., :keys] - maps).abs().max() <= (whole[..., -keys:] - maps).abs().max()
    return scores[..., :keys] if first else scores[..., -keys:]


@dataclass(frozen=True)
class _Arranged:
    """Brings the operands of one attention to [B, heads, tokens, width]."""

    site: AttentionSite

    def operand(self, operand: Operand, tensor: Tensor) -> Tensor:
        """[B..., H, T, dh] with all batch axes in one."""
        tensor = tensor.permute(operand.axes)
        if operand.folded:
            return tensor.reshape(-1, operand.folded, *tensor.shape[-2:])
        return tensor.reshape(-1, *tensor.shape[-3:])

    def q(self, tensor: Any, operand: Operand | None = None) -> Tensor:
        operand = operand or self.site.q
        assert operand is not None
        return self.operand(operand, tensor)

    def shared(self, operand: Operand | None, tensor: Any) -> Tensor:
        """k or v with one head for each distinct one, however they arrived."""
        assert operand is not None
        arranged = self.operand(operand, tensor)
        groups = self.site.kv_of_head
        if arranged.shape[1] == self.site.kv_heads or len(groups) != arranged.shape[1]:
            return arranged
        return _heads(arranged, [groups.index(g) for g in range(self.site.kv_heads)])

    def map(self, mask: Tensor) -> Tensor:
        """A mask broadcastable to the operands, brought to [B, H, Tq, Tk] or broadcastable."""
        operand = self.site.q
        assert operand is not None
        while mask.ndim < len(operand.axes):
            mask = mask[None]
        if operand.folded:
            mask = mask.flatten(0, -3)
            return (
                mask.reshape(-1, operand.folded, *mask.shape[-2:]) if len(mask) > 1 else mask[None]
            )
        order = [*operand.axes[:-2], mask.ndim - 2, mask.ndim - 1]
        mask = mask.permute(order)
        return mask.flatten(0, -4) if mask.ndim > 4 else mask


def _mask(mask: Any, causal: bool, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """(what is visible, what is added to the scores) of scaled_dot_product_attention's mask."""
    if causal:
        return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril(), None
    if mask is None:
        return None, None
    if mask.dtype == torch.bool:
        return mask, None
    return _hiding(~(mask <= HIDDEN)), mask


def _hiding(seen: Tensor) -> Tensor | None:
    """None where all is seen; a GPU isn't asked, for that would be to wait for it."""
    return None if seen.device.type == "cpu" and bool(seen.all()) else seen


def _heads(tensor: Tensor, numbers: Sequence[int]) -> Tensor:
    """Some heads [B, H, T, dh], by their numbers, which go to a GPU without waiting for it."""
    return tensor[:, torch.tensor(numbers).to(tensor.device, non_blocking=True)]


def _logits(
    q: Tensor,
    k: Tensor,
    scale: float | None,
    bias: Tensor | None,
    visible: Tensor | None,
    site: AttentionSite,
) -> Tensor:
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    groups = site.kv_of_head or tuple(h * k.shape[1] // q.shape[1] for h in range(q.shape[1]))
    k = k if k.shape[1] == q.shape[1] else _heads(k, groups)
    scores = q.to(exact) @ k.to(exact).transpose(-1, -2)
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias.to(exact)
    return scores if visible is None else scores.masked_fill(~visible, float("-inf"))


@contextlib.contextmanager
def watch(
    module: nn.Module,
    sites: Mapping[Hashable, Site],
    attention: Mapping[Hashable, AttentionSite],
    on_tensor: Callable[[Hashable, Tensor], None],
    on_attention: Callable[[Hashable, AttentionCall], None],
    *,
    clone: bool = True,
    detach: bool = True,
    experts: Mapping[Hashable, ExpertSite] | None = None,
    on_expert: OnExpert | None = None,
) -> Iterator[Watch]:
    """Call `on_tensor` and `on_attention` for each site as forward passes inside reach it.

    Call `check()` on the yielded Watch after every pass: it raises, by name, for what was never
    reached. Eval mode, flags, buffers, random state and switches are put back afterwards, hooks
    removed, also after an exception; outputs are the same bits as without watching (with the fused
    encoder path off). `clone=False` hands out the tensors themselves: reduce them at once, since
    the model may rewrite them in place. `detach=False` keeps them in the autograd graph: together
    with `clone=False` gradients can be taken with respect to them. `on_expert` gets the units of
    every block in `experts`, expert by expert.
    """
    routing = Routing(module, experts, on_expert) if experts and on_expert else None
    watching = Watch(sites, attention, on_tensor, on_attention, clone, detach, routing)
    with undisturbed(module), Passage(module, watching) as passage:
        watching.passage = passage
        yield watching
