"""Networks of timm and torchvision, by name; class count, channels and image size from shapes."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from plastiscope.checkpoints.run import State, TensorInfo
from plastiscope.errors import UsageError
from plastiscope.models import hints
from plastiscope.models.live import Inputs, Live, ModelError
from plastiscope.models.names import match
from plastiscope.models.outputs import positional
from plastiscope.models.sizes import square

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
NAME_KEYS = ("architecture", "arch", "model_name", "model", "backbone", "network")
SIZE_KEYS = ("img_size", "image_size", "input_size", "resolution")
# Words of `assume` that aren't arguments of a model.
OWN = ("input", "probe", "activation", "stride", "padding", "pool", "heads", "kind", "vocabulary")


def name_in(state: State) -> str | None:
    """The name of a timm or torchvision model that the checkpoint's settings hold, if any."""
    values = [value for key, value in hints.settings(state.extras) if key in NAME_KEYS]
    names = [value for value in values if isinstance(value, str) and value.isidentifier()]
    for name in names:
        for library in ("timm", "torchvision"):
            if _knows(library, name):
                return name
    return None


def _knows(library: str, name: str) -> bool:
    try:
        module = _library(library)
    except UsageError:
        return False
    if library == "timm":
        return bool(module.is_model(name))
    return name in module.models.list_models(module=module.models)


def build_named(state: State, name: str, assume: Mapping[str, str]) -> Live:
    """The model of that name from the library whose tensors the checkpoint has."""
    fits = []
    for library in ("timm", "torchvision"):
        if _knows(library, name):
            live = build(state, library, name, assume)
            fits.append((len(live.stored), live))
    return max(fits, key=lambda fit: fit[0])[1]


def build(state: State, library: str, name: str, assume: Mapping[str, str]) -> Live:
    """The model `name` of "timm" or "torchvision", never its published weights.

    Words of `assume` that aren't this tool's own are passed on (embed_dim=96). Raises ModelError
    for an unknown name.
    """
    module = _library(library)
    plain = name.split("/")[-1]
    if not _knows(library, plain.split(".")[0]):
        near = f"list them with {library}.list_models()" if library == "timm" else "see its docs"
        raise ModelError(f"{library} {module.__version__} has no model {name!r}: {near}")
    more = {key: _literal(value) for key, value in assume.items() if key not in OWN}
    with torch.random.fork_rng(devices=[]):
        make = _timm if library == "timm" else _torchvision
        network, inputs = make(module, plain, state, assume, more)
    return Live(
        module=network.eval(),
        inputs=inputs,
        stored=match(network, state.tensors),
        forward=positional(network),
        source=f"{library} {name}",
    )


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _library(name: str) -> Any:
    try:
        if name == "timm":
            import timm

            return timm
        import torchvision
    except ImportError as error:
        raise UsageError(
            f"this model needs {name}: python -m pip install 'plastiscope[vision]'"
        ) from error
    return torchvision


def stored_shape(state: State, name: str) -> tuple[int, ...] | None:
    """The shape of a tensor by its name, under whatever prefix it is stored."""
    info: TensorInfo | None = state.tensors.get(name)
    if info is None:
        ends = [i for n, i in state.tensors.items() if n.endswith(f".{name}") and n.count(".") < 6]
        info = ends[0] if len(ends) == 1 else None
    return info.shape if info else None


def _create(make: Any, name: str, arguments: dict[str, Any]) -> nn.Module:
    try:
        made: nn.Module = make(name, **arguments)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        said = ", ".join(f"{key}={value}" for key, value in arguments.items())
        raise ModelError(f"{name}({said}) can't be made: {line}") from error
    return made


def _timm(
    timm: Any, name: str, state: State, assume: Mapping[str, str], more: dict[str, Any]
) -> tuple[nn.Module, Inputs]:
    stored = state.extras.get("config")
    own = stored.get("model_args") if isinstance(stored, Mapping) else None
    arguments: dict[str, Any] = {**(own if isinstance(own, Mapping) else {}), **more}
    model: Any = _create(timm.create_model, name, {"pretrained": False, **arguments})
    wanted = {**_timm_differences(model, state, assume), **arguments}
    if wanted != arguments:
        model = _create(timm.create_model, name, {"pretrained": False, **wanted})
    settings = model.pretrained_cfg
    said = hints.input_shape(state.extras, assume, SIZE_KEYS)
    size = wanted.get("img_size") or said or settings["input_size"]
    high, wide = hints.sides(size)
    channels = wanted.get("in_chans") or settings["input_size"][0]
    mean, std = (tuple(settings[key]) for key in ("mean", "std"))
    table = any("pos_embed" in key or "relative" in key for key, _ in model.named_parameters())
    inputs = Inputs(
        kind="image",
        shape=(int(channels), high, wide),
        mean=mean if len(mean) == channels else None,
        std=std if len(std) == channels else None,
        resizable=not (table or settings.get("fixed_input_size")),
        classes=model.num_classes or None,
    )
    return model, inputs


def _timm_differences(model: Any, state: State, assume: Mapping[str, str]) -> dict[str, Any]:
    """Arguments by which the stored tensors differ from the model's usual ones."""
    settings = model.pretrained_cfg
    found: dict[str, Any] = {}
    heads = settings.get("classifier")
    head = stored_shape(
        state, f"{heads if isinstance(heads, str) else (heads or ['head'])[0]}.weight"
    )
    classes = head[0] if head else 0
    if classes != model.num_classes:
        found["num_classes"] = classes
    first = settings.get("first_conv")
    stem = stored_shape(state, f"{first}.weight") if isinstance(first, str) else None
    if stem and len(stem) == 4 and stem[1] != settings["input_size"][0]:
        found["in_chans"] = stem[1]
    size = _timm_size(model, state, assume)
    if size:
        found["img_size"] = size
    names = {key.rpartition(".")[0].rpartition(".")[2] for key in state.tensors}
    if hasattr(model, "fc_norm") and "fc_norm" in names and isinstance(model.fc_norm, nn.Identity):
        found["global_pool"] = "avg"
    return found


def _timm_size(model: Any, state: State, assume: Mapping[str, str]) -> tuple[int, int] | None:
    embed: Any = getattr(model, "patch_embed", None)
    if getattr(embed, "img_size", None) is None:
        return None
    usual: tuple[int, int] = tuple(embed.img_size)
    given = hints.input_shape(state.extras, assume, SIZE_KEYS)
    table = stored_shape(state, "pos_embed")
    own = getattr(model, "pos_embed", None)
    if table and isinstance(own, torch.Tensor) and len(table) == 3:
        grid = square(table[1] - (own.shape[1] - embed.num_patches))
        patch = embed.patch_size
        size = (grid * patch[0], grid * patch[1]) if grid else usual
        return size if size != usual else None
    if given is None:
        return None
    size = hints.sides(given)
    return size if size != usual else None


def _torchvision(
    torchvision: Any, name: str, state: State, assume: Mapping[str, str], more: dict[str, Any]
) -> tuple[nn.Module, Inputs]:
    make = torchvision.models.get_model
    arguments: dict[str, Any] = {"weights": None, **more}
    if name in ("googlenet", "inception_v3"):
        helpers = any(part in key for key in state.tensors for part in ("aux1.", "AuxLogits."))
        arguments.update(aux_logits=helpers, init_weights=False)
    size = hints.input_shape(state.extras, assume, SIZE_KEYS) or (
        299 if name == "inception_v3" else 224,
    )
    table = stored_shape(state, "encoder.pos_embedding")
    patch = stored_shape(state, "conv_proj.weight")
    if table and patch:
        side = (square(table[1]) or 0) * patch[2]
        arguments["image_size"], size = side, (side,)
    model = _create(make, name, arguments)
    classes = _refit(model, state, name)
    channels = next(part for part in model.modules() if isinstance(part, nn.Conv2d)).in_channels
    high, wide = hints.sides(size)
    mean, std = IMAGENET if channels == 3 else (None, None)
    shape = (channels, high, wide)
    return model, Inputs(
        "image", shape, mean=mean, std=std, resizable=table is None, classes=classes
    )


def _refit(model: nn.Module, state: State, name: str) -> int | None:
    """Give head and first convolution the stored sizes, as people do who retrain a model."""
    layers = [
        (path, part)
        for path, part in model.named_modules()
        if isinstance(part, (nn.Linear, nn.Conv2d))
    ]
    classes: int | None = None
    for path, part in layers:
        shape = stored_shape(state, f"{path}.weight")
        if shape is None or shape == tuple(part.weight.shape):
            continue
        last, first = part.weight.shape[0] == 1000, path == layers[0][0]
        if last and shape[1:] == part.weight.shape[1:]:
            replace_layer(model, path, part, given=shape[0])
        elif first and isinstance(part, nn.Conv2d) and shape[2:] == part.weight.shape[2:]:
            replace_layer(model, path, part, taken=shape[1])
        elif not last:
            raise ModelError(
                f"{path}.weight is {list(shape)} in the checkpoint and {list(part.weight.shape)} "
                f"in torchvision's {name}: give the changed network with --model path.py:function"
            )
    for path, _ in layers:
        shape = stored_shape(state, f"{path}.weight")
        classes = shape[0] if shape else classes
    return classes


def replace_layer(
    model: nn.Module,
    path: str,
    part: nn.Linear | nn.Conv2d,
    taken: int | None = None,
    given: int | None = None,
) -> None:
    """The same layer with another number of input or output channels, in its place."""
    bias = part.bias is not None
    new: nn.Module
    if isinstance(part, nn.Linear):
        new = nn.Linear(taken or part.in_features, given or part.out_features, bias=bias)
    else:
        new = nn.Conv2d(
            taken or part.in_channels,
            given or part.out_channels,
            part.kernel_size,  # type: ignore[arg-type]
            part.stride,  # type: ignore[arg-type]
            part.padding,  # type: ignore[arg-type]
            groups=part.groups,
            bias=bias,
        )
    parent, _, last = path.rpartition(".")
    setattr(model.get_submodule(parent), last, new)
