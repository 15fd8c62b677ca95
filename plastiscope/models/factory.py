"""Networks of the user's own code: an instance, a class or a function that makes one."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from plastiscope.checkpoints.run import State
from plastiscope.errors import UsageError
from plastiscope.models import hints, huggingface, sizes
from plastiscope.models.live import Live, ModelError
from plastiscope.models.names import match
from plastiscope.models.outputs import positional

# Parameters that take the checkpoint's whole config instead of one value of it.
WHOLE = ("config", "cfg", "conf", "args", "hparams", "hyper_parameters", "model_args", "params")
# Stored settings that say where or how a run went on, not what its network is.
KEPT_BACK = ("device", "dtype", "pretrained", "weights", "checkpoint", "path", "compile", "seed")


class Settings(dict[str, Any]):
    """A stored config, read as attributes or as items."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            value = self[name]
            return Settings(value) if isinstance(value, dict) else value
        raise AttributeError(name)


def build(state: State, spec: str, assume: Mapping[str, str]) -> Live:
    """The network that `path.py:name` or `package.module:name` is or makes.

    A class or function is called with the checkpoint's own settings, matched to its parameters by
    name. Raises ModelError when a parameter has neither a setting nor a default, or when the
    result isn't an nn.Module.
    """
    found = load_object(spec, "--model")
    module = found if isinstance(found, nn.Module) else _call(found, state.extras, spec)
    if not isinstance(module, nn.Module):
        raise ModelError(f"--model {spec} gave a {type(module).__name__}, not an nn.Module")
    module = unwrap(module).eval()
    if huggingface.is_pretrained(module):
        return huggingface.live(module, state, f"--model {spec}")
    return Live(
        module=module,
        inputs=sizes.infer(module, state, assume),
        stored=match(module, state.tensors),
        forward=positional(module),
        source=f"--model {spec}",
    )


def load_object(spec: str, option: str) -> Any:
    """What `path.py:name` or `package.module:name` names; this runs the user's own file."""
    place, _, name = spec.rpartition(":")
    if not place or not name.isidentifier():
        raise UsageError(f"{option} {spec}: write path.py:NAME or package.module:NAME")
    module = _from_file(Path(place), option) if place.endswith(".py") else _import(place, option)
    if not hasattr(module, name):
        raise UsageError(f"{option} {spec}: {place} has no {name}")
    return getattr(module, name)


def _from_file(path: Path, option: str) -> Any:
    if not path.is_file():
        raise UsageError(f"{option} {path}: no such file")
    name = f"plastiscope_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look their module up
    # The file may import its neighbours, as it does when it is run.
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


def _import(name: str, option: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        raise UsageError(f"{option} {name}: no such module in this environment") from error
    finally:
        sys.path.remove(str(Path.cwd()))


def _call(maker: Any, extras: Mapping[str, Any], spec: str) -> Any:
    if not callable(maker):
        raise ModelError(f"--model {spec} is a {type(maker).__name__}, not a network or a factory")
    arguments = _arguments(maker, extras, spec)
    return maker(**arguments)


def _arguments(maker: Callable[..., Any], extras: Mapping[str, Any], spec: str) -> dict[str, Any]:
    arguments = {}
    for name, parameter in inspect.signature(maker).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        needed = parameter.default is parameter.empty
        value = _whole(extras, name) if name in WHOLE else _value(extras, name)
        if value is not None:
            arguments[name] = value
        elif needed:
            raise ModelError(
                f"--model {spec} needs {name!r}, which the checkpoint's settings don't hold: give "
                "it a default value, or wrap it in a function without parameters"
            )
    return arguments


def _value(extras: Mapping[str, Any], name: str) -> Any:
    if name.lower() in KEPT_BACK:
        return None
    return hints.find(extras, name.lower())


def _whole(extras: Mapping[str, Any], name: str) -> Settings | None:
    for key in (name, *WHOLE):
        if isinstance(extras.get(key), Mapping):
            return Settings(extras[key])
    return None


def unwrap(module: nn.Module) -> nn.Module:
    """The network inside torch.compile's and the data-parallel wrappers."""
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while True:
        inner = getattr(module, "_orig_mod", None)
        if isinstance(inner, nn.Module):
            module = inner
        elif isinstance(module, parallel):
            module = module.module
        else:
            return module
