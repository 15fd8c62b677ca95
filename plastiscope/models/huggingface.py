"""Networks of the transformers library, from the config.json stored with the weights."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from plastiscope.checkpoints.run import State
from plastiscope.errors import UsageError
from plastiscope.models.conversion import plan
from plastiscope.models.live import Batch, Inputs, Live, ModelError
from plastiscope.models.outputs import answer, cast

SYNTHETIC_LENGTH = 64
# Keys that choose kernels, quantised storage or foreign code: none changes what is computed here.
DROPPED = ("auto_map", "quantization_config", "torch_dtype", "dtype")


def recognises(state: State) -> bool:
    """Whether the checkpoint carries a transformers config."""
    config = state.extras.get("config")
    return isinstance(config, Mapping) and "model_type" in config


def build(state: State, name: str | None = None) -> Live:
    """The network of class `name`, or of the config's own `architectures`; no remote code is run.

    Raises ModelError when the library has no such class or the config names none.
    """
    values = state.extras.get("config")
    if not isinstance(values, Mapping) or "model_type" not in values:
        raise ModelError(
            "a transformers model needs the config.json that belongs beside its weights: copy it "
            "there, or give --model path.py:function"
        )
    library = _library()
    model_class = _model_class(library, values, name)
    config = _config(library, values)
    with _quickly():
        module: Any = model_class(config).eval()
        module.tie_weights()  # left out with the initialisation
    return live(module, state, f"transformers {model_class.__name__}, from config.json")


def live(module: Any, state: State, source: str) -> Live:
    """A transformers model, whoever made it, with how the state's tensors fill it."""
    stored, merges = plan(module, state.tensors)
    return Live(
        module=module,
        inputs=_inputs(module, module.config),
        stored=stored,
        forward=_forward(module),
        source=source,
        merges=merges,
    )


def is_pretrained(module: nn.Module) -> bool:
    """Whether a module is one of the transformers library (or of code built on it)."""
    return any(
        base.__module__ == "transformers.modeling_utils" and base.__name__ == "PreTrainedModel"
        for base in type(module).__mro__
    )


def _library() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            "this checkpoint needs transformers: python -m pip install 'plastiscope[hf]'"
        ) from error
    return transformers


def _model_class(library: Any, values: Mapping[str, Any], name: str | None) -> type[nn.Module]:
    names = [name] if name else list(values.get("architectures") or [])
    if not names:
        raise ModelError("config.json names no architecture: say --model transformers:CLASS")
    found = getattr(library, names[0], None)
    if not (isinstance(found, type) and issubclass(found, library.PreTrainedModel)):
        remote = " (its own code is never run)" if "auto_map" in values else ""
        raise ModelError(
            f"transformers {library.__version__} has no model class {names[0]}{remote}: give "
            "another with --model transformers:CLASS, or --model path.py:function"
        )
    return found


def _config(library: Any, values: Mapping[str, Any]) -> Any:
    kept = {
        key: copy.deepcopy(value)
        for key, value in values.items()
        if key not in DROPPED and "attn_implementation" not in key
    }
    try:
        kind = library.AutoConfig.for_model(kept.pop("model_type"), **kept)
    except (ValueError, TypeError) as error:
        line = str(error).strip().splitlines()[0]
        raise ModelError(
            f"transformers {library.__version__} can't read this config.json ({line}): install "
            "the version that wrote it, or give --model path.py:function"
        ) from error
    kind.use_cache = False
    return kind


@contextmanager
def _quickly() -> Iterator[None]:
    """Skip the random initialisation, which is overwritten, where the library can; keep the RNG."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:
        from transformers.modeling_utils import no_init_weights
    with torch.random.fork_rng(devices=[]), no_init_weights():
        yield


def _inputs(module: Any, config: Any) -> Inputs:
    main = module.main_input_name
    kind = type(module).__name__
    classes = config.num_labels if "Classification" in kind else None
    if main == "pixel_values":
        return _image(module, getattr(config, "vision_config", None) or config, classes)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = getattr(text, "vocab_size", None)
    if main != "input_ids" or not vocabulary:
        raise ModelError(
            f"{kind} takes {main}, which isn't an image or token ids: give --model path.py:function"
        )
    longest = _longest(module, text)
    length = min(SYNTHETIC_LENGTH, longest or SYNTHETIC_LENGTH)
    causal = kind.endswith(("ForCausalLM", "LMHeadModel")) and not config.is_encoder_decoder
    return Inputs("tokens", (length,), vocabulary, longest=longest, classes=classes, causal=causal)


def _image(module: nn.Module, config: Any, classes: int | None) -> Inputs:
    size = getattr(config, "image_size", None) or 224
    high, wide = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    shape = (getattr(config, "num_channels", 3), int(high), int(wide))
    table = any("position_embedding" in name for name, _ in module.named_parameters())
    return Inputs("image", shape, resizable=not table, classes=classes)


def _longest(module: nn.Module, text: Any) -> int | None:
    """The rows of a learned position table; rotary and relative positions have no end."""
    for name, part in module.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(part, nn.Embedding) and ("position" in last or last in ("wpe", "embed_pos")):
            # RoBERTa and OPT keep the first rows of the table for padding.
            spare = getattr(part, "offset", 0)
            if part.padding_idx is not None:
                spare = part.padding_idx + 1
            return int(part.num_embeddings - spare)
    if "position_embeddings" in "".join(name for name, _ in module.named_parameters()):
        return getattr(text, "max_position_embeddings", None)
    return None


def _forward(module: Any) -> Callable[[Batch], Tensor]:
    accepted = inspect.signature(module.forward).parameters
    main = module.main_input_name

    def forward(batch: Batch) -> Tensor:
        arguments: dict[str, Any] = {main: cast(module, batch["inputs"])}
        if "mask" in batch and "attention_mask" in accepted:
            arguments["attention_mask"] = batch["mask"].long()
        if "decoder_input_ids" in accepted:
            arguments["decoder_input_ids"] = batch["inputs"]
        return answer(module(**arguments))

    return forward
