"""Programs saved by torch.export (.pt2): the graph itself, without the code that made it."""

from __future__ import annotations

import functools
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plastiscope.checkpoints.run import State
from plastiscope.errors import UsageError
from plastiscope.models.live import Inputs, Live, ModelError
from plastiscope.models.names import match
from plastiscope.models.outputs import positional


def build(state: State, path: str) -> Live:
    """The program as a module; its inputs are those it was exported with.

    Raises ModelError when the program takes several inputs, or only one size of batch.
    """
    if not Path(path).is_file():
        raise UsageError(f"--model {path}: no such file")
    if not zipfile.is_zipfile(path):
        raise UsageError(f"--model {path} isn't a torch.export program (not a zip archive)")
    try:
        program = torch.export.load(path)
    except (RuntimeError, ValueError, OSError, AssertionError) as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(f"--model {path} isn't a torch.export program: {line}") from error
    example = _example(program, path)
    module = program.module()
    # An exported graph has no training mode to leave, so its methods only refuse.
    module.train = functools.partial(nn.Module.train, module)  # type: ignore[method-assign]
    module.eval = functools.partial(nn.Module.eval, module)  # type: ignore[method-assign]
    return Live(
        module=module,
        inputs=_inputs(program, example, path),
        stored=match(module, state.tensors),
        forward=positional(module),
        source=f"--model {path}",
    )


def _example(program: Any, path: str) -> Any:
    names = [
        spec.arg.name
        for spec in program.graph_signature.input_specs
        if spec.kind == torch.export.graph_signature.InputKind.USER_INPUT
    ]
    nodes = [node for node in program.graph.nodes if node.name in names]
    values = [node.meta.get("val") for node in nodes]
    if len(values) != 1 or not isinstance(values[0], torch.Tensor):
        raise ModelError(f"--model {path} takes {len(values)} inputs: export one with one tensor")
    if isinstance(values[0].shape[0], int):
        raise ModelError(
            f"--model {path} takes batches of {values[0].shape[0]} only: export it with a dynamic "
            "first dimension"
        )
    return values[0]


def _inputs(program: Any, example: Any, path: str) -> Inputs:
    sides = [side if isinstance(side, int) else None for side in example.shape[1:]]
    if not example.dtype.is_floating_point:
        shape = (sides[0] or 64,)
        longest = sides[0]
        return Inputs("tokens", shape, _vocabulary(program, path), longest=longest)
    known = [side for side in sides if side is not None]
    if len(known) != len(sides) or len(known) not in (1, 3):
        raise ModelError(
            f"--model {path}: its input is neither an image nor a vector of fixed size"
        )
    return Inputs("image" if len(known) == 3 else "vector", tuple(known))


def _vocabulary(program: Any, path: str) -> int:
    for node in program.graph.nodes:
        if node.op == "call_function" and "embedding" in str(node.target):
            return int(node.args[0].meta["val"].shape[0])
    raise ModelError(f"--model {path} takes ids but embeds none")
