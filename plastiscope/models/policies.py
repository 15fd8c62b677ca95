"""Policies of Stable-Baselines3 and rsl_rl: an extractor, branches for the actor and the critics.

Their names say which layers form which branch, so nothing is guessed but what the file lacks: the
activation (each library's own default unless stored) and, for images, the observation's size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from plastiscope.checkpoints.run import State, TensorInfo
from plastiscope.models import chain, hints
from plastiscope.models.layers import Layer, natural_key, read_layer_set, weights_of
from plastiscope.models.live import Live, ModelError
from plastiscope.models.names import match
from plastiscope.models.outputs import positional

RECURRENT = ("lstm_actor.", "lstm_critic.", "memory_a.", "memory_c.", "memory_s.", "memory.")
EXTRACTOR = "features_extractor."


@dataclass(frozen=True)
class Plan:
    """How a family of policies computes: the prefixes of each branch's layers, in order.

    The first branch gives the outputs. `critics` see the features and the first branch's action
    together; `last` is what the action goes through first. `unused` prefixes are copies that no
    forward pass uses.
    """

    family: str
    activation: str
    branches: tuple[tuple[str, ...], ...]
    critics: tuple[tuple[str, ...], ...] = ()
    last: str = "identity"
    unused: tuple[str, ...] = ()


class Policy(nn.Module):
    """Branches over shared layers; the outputs are the first branch's."""

    def __init__(
        self,
        steps: Mapping[str, nn.Module],
        branches: Sequence[Sequence[str]],
        critics: Sequence[Sequence[str]],
        squash: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__()
        for path, module in steps.items():
            chain.attach(self, path, module)
        self.branches, self.critics, self.squash = branches, critics, squash

    def forward(self, observations: Tensor) -> Tensor:
        """Observations [B, ...] to actions, logits or values [B, n]."""
        # Layers that branches share at their beginning run once, as in the library.
        known: dict[tuple[str, ...], Tensor] = {(): observations}
        outputs = [self._run(tuple(branch), known) for branch in self.branches]
        features = observations.flatten(1)
        for critic in self.critics:
            joined = torch.cat([features, self.squash(outputs[0])], dim=1)
            self._run(tuple(critic), {(): joined})
        return outputs[0]

    def _run(self, path: tuple[str, ...], known: dict[tuple[str, ...], Tensor]) -> Tensor:
        if path not in known:
            before = self._run(path[:-1], known)
            known[path] = self.get_submodule(path[-1])(before)
        return known[path]


class Normalizer(nn.Module):
    """rsl_rl's running normalisation of observations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        for name in ("_mean", "_var", "_std"):
            self.register_buffer(name, torch.zeros(1, width))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, observations: Tensor) -> Tensor:
        mean, std = self.get_buffer("_mean"), self.get_buffer("_std")
        return (observations - mean) / (std + 1e-2)


def recognises(state: State) -> bool:
    """Whether the names are those of a known family of policies."""
    return plan_of(state.tensors) is not None


def plan_of(names: Mapping[str, TensorInfo]) -> Plan | None:
    """The family of policies that the names belong to, or None."""

    def has(*prefixes: str) -> bool:
        return any(name.startswith(prefixes) for name in names)

    if has("mlp_extractor.") or ("action_net.weight" in names and has("value_net.")):
        return _actor_critic(has("vf_features_extractor.") and _own_values(names))
    for net in ("q_net", "quantile_net"):
        if has(f"{net}.{net}."):
            branch = (f"{net}.{EXTRACTOR}", f"{net}.{net}.")
            return Plan("DQN", "relu", (branch,), unused=(f"{net}_target.",))
    if has("actor.latent_pi.", "actor.mu.") and has("critic."):
        return _off_policy(names, has("actor.latent_pi."))
    for actor, critic in (("actor", "critic"), ("student", "teacher")):
        if has(f"{actor}.0.") and has(f"{critic}.0.") and {"std", "log_std"} & set(names):
            return _rsl_rl(
                names,
                (f"{actor}_obs_normalizer.", f"{actor}."),
                (f"{critic}_obs_normalizer.", f"{critic}."),
            )
    for form in ("{}_state_dict.", "{}.", ""):
        actor, critic = form.format("actor"), form.format("critic")
        if has(f"{actor}distribution.") and has(f"{actor}mlp.0."):
            return _rsl_rl(
                names,
                (f"{actor}obs_normalizer.", f"{actor}mlp."),
                (f"{critic}obs_normalizer.", f"{critic}mlp."),
            )
    return None


def _own_values(names: Mapping[str, TensorInfo]) -> bool:
    """Whether the value branch has an extractor of its own, not a second name of the shared one."""
    return any(
        name.startswith("vf_features_extractor.") and info.alias_of is None
        for name, info in names.items()
    )


def _actor_critic(apart: bool) -> Plan:
    shared = "mlp_extractor.shared_net."
    values = "vf_features_extractor." if apart else EXTRACTOR
    return Plan(
        family="A2C or PPO",
        activation="tanh",
        branches=(
            (EXTRACTOR, shared, "mlp_extractor.policy_net.", "action_net."),
            (values, shared, "mlp_extractor.value_net.", "value_net."),
        ),
        unused=("log_std", "pi_features_extractor."),
    )


def _off_policy(names: Mapping[str, TensorInfo], stochastic: bool) -> Plan:
    critics = sorted({name.split(".")[1] for name in names if name.startswith("critic.qf")})
    actor = f"actor.{EXTRACTOR}"
    branches: list[tuple[str, ...]] = [(actor, "actor.latent_pi.", "actor.mu.")]
    if "actor.log_std.weight" in names:
        branches.append((actor, "actor.latent_pi.", "actor.log_std."))
    return Plan(
        family="SAC or TQC" if stochastic else "TD3 or DDPG",
        activation="relu",
        branches=tuple(branches),
        critics=tuple((f"critic.{critic}.",) for critic in critics),
        last="tanh",
        unused=("actor_target.", "critic_target.", "actor.log_std", "log_ent_coef"),
    )


def _rsl_rl(
    names: Mapping[str, TensorInfo], actor: tuple[str, str], critic: tuple[str, str]
) -> Plan:
    """Both branches (normalizer, layers) on the same observations, where they take the same."""
    unused = ["std", "log_std"]
    if actor[1].endswith("mlp."):
        unused.append(actor[1].replace("mlp.", "distribution."))
    first = [names.get(f"{layers}0.weight") for _, layers in (actor, critic)]
    alone = first[1] is None or actor[1] == critic[1]
    if alone or first[0] is None or first[1] is None or first[0].shape[1] != first[1].shape[1]:
        # A critic with privileged observations can't be fed from the actor's.
        unused += [] if alone else critic
        return Plan("rsl_rl", "elu", (actor,), unused=tuple(unused))
    return Plan("rsl_rl", "elu", (actor, critic), unused=tuple(unused))


def build(state: State, assume: Mapping[str, str]) -> Live:
    """The policy with its critics; recurrent ones and dictionaries of images raise ModelError."""
    _refuse(state)
    plan = plan_of(state.tensors)
    assert plan is not None
    known, _ = hints.activation(state.extras, assume)
    plan = replace(plan, activation=known or plan.activation)
    parts = [_Part(state, plan, branch, assume) for branch in plan.branches]
    critics = [_Part(state, plan, critic, assume) for critic in plan.critics]
    if critics and parts[0].image:
        raise ModelError(
            "a critic over images isn't rebuilt from names alone: give the policy with --model "
            "path.py:function"
        )
    steps = {path: module for part in (*parts, *critics) for path, module in part.steps}
    finish = _finish(plan, parts[0], state)
    steps.update(finish)
    order = [(*(path for path, _ in part.steps),) for part in parts]
    order[0] = (*order[0], *finish)
    squash = torch.tanh if plan.last == "tanh" and not finish else _same
    module = Policy(steps, order, [[path for path, _ in c.steps] for c in critics], squash).eval()
    return Live(
        module=module,
        inputs=parts[0].inputs,
        stored=match(module, state.tensors),
        forward=positional(module),
        source=f"policy ({plan.family}), from its tensors' names",
        assumptions=(_describe(plan, parts[0], known is not None),),
        unused=tuple(name for name in state.tensors if name.startswith(plan.unused)),
    )


def _refuse(state: State) -> None:
    for name in state.tensors:
        if name.startswith(RECURRENT):
            raise ModelError(
                f"this policy is recurrent ({name}) and isn't replayed: its weights are measured; "
                "give it with --model path.py:function to replay it"
            )
        if ".extractors." in name:
            raise ModelError(
                f"this policy takes a dictionary of observations ({name}): give it with --model "
                "path.py:function"
            )


def _same(action: Tensor) -> Tensor:
    return action


class _Part:
    """One branch: its layers in order and the modules between them."""

    def __init__(
        self, state: State, plan: Plan, prefixes: Sequence[str], assume: Mapping[str, str]
    ) -> None:
        tensors = weights_of(state)
        self.layers: list[Layer] = []
        for prefix in prefixes:
            if prefix.endswith("obs_normalizer."):
                continue
            group = {n: i for n, i in tensors.items() if n.startswith(prefix)}
            self.layers += sorted(read_layer_set(group), key=lambda each: natural_key(each.path))
        between = chain.read_gaps(self.layers)
        given = {**_observation(state.extras), **assume}
        geometry, _ = chain.read_geometry(self.layers, between, state.extras, given)
        self.image = geometry is not None
        self.inputs = chain.inputs_of(self.layers, geometry)
        self.steps = chain.assemble(self.layers, between, plan.activation, geometry, cnn="relu")
        for prefix in prefixes:
            if prefix.endswith("obs_normalizer.") and f"{prefix}_mean" in state.tensors:
                self.steps.insert(0, (prefix[:-1], Normalizer(self.inputs.shape[0])))


def _observation(extras: Mapping[str, Any]) -> dict[str, str]:
    space = hints.find(extras, "observation_space")
    if not isinstance(space, Mapping):
        return {}
    shape = hints.size(space.get("_shape", space.get("shape")))
    return {"input": "x".join(map(str, shape))} if shape and len(shape) == 3 else {}


def _finish(plan: Plan, actor: _Part, state: State) -> dict[str, nn.Module]:
    """What the actor's last Sequential holds after its last layer: TD3's tanh, SAC's clipping."""
    last = actor.layers[-1]
    if plan.last != "tanh" or last.index is None:
        return {}
    path = f"{last.container}.{last.index + 1}"
    if "actor.log_std" in state.tensors:
        # The library clips the mean of state-dependent exploration to -2..2.
        return {path: nn.Hardtanh(-2.0, 2.0)}
    return {path: nn.Tanh()}


def _describe(plan: Plan, actor: _Part, stored: bool) -> str:
    origin = "as stored" if stored else "the library's default"
    line = f"assumed: {plan.activation} ({origin}) after every hidden layer of actor and critic"
    if actor.image:
        line += f", input {'x'.join(map(str, actor.inputs.shape))}"
    return f"{line} (change with --assume activation=…)"
