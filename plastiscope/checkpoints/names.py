"""Names: natural order, the wrappers around tensor names, and the step in a file's name."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Tokens that only a wrapper puts into a name; a model's own submodule is never called so.
_WRAPPERS = {
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_forward_module",
    "_dp_wrapped_module",
}


def natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key that puts `layers.10` behind `layers.2`, whatever the padding."""
    parts = re.split(r"(\d+)", text)
    return tuple(
        (1, int(part), "") if at % 2 else (0, 0, part) for at, part in enumerate(parts) if part
    )


def printable(text: str, limit: int = 400) -> str:
    """The text as one line without control characters: names in a file may hold anything."""
    line = "".join(c if c.isprintable() else "?" for c in text)
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def unwrap(names: Iterable[str]) -> dict[str, str]:
    """Every stored name with its wrapper prefixes removed, at any nesting, leading or inside.

    `module.` is removed where every name starts with it or where it stands beside another
    wrapper; a real submodule called `module` survives, and names that would collapse into one
    keep their wrappers, all of them.
    """
    stored = list(names)
    cleaned = {name: _without_wrappers(name) for name in stored}
    while cleaned and all(parts[0] == "module" and len(parts) > 1 for parts in cleaned.values()):
        cleaned = {name: parts[1:] for name, parts in cleaned.items()}
    joined = {name: ".".join(parts) for name, parts in cleaned.items()}
    if len(set(joined.values())) < len(joined):
        return {name: name for name in stored}
    return joined


def _without_wrappers(name: str) -> list[str]:
    parts = name.split(".")
    kept: list[str] = []
    for at, part in enumerate(parts[:-1]):
        beside = (at > 0 and parts[at - 1] in _WRAPPERS) or parts[at + 1] in _WRAPPERS
        if part in _WRAPPERS or (part == "module" and beside):
            continue
        kept.append(part)
    return [*kept, parts[-1]]


_METRIC = re.compile(
    r"(?<![a-z])(?:(?:val|valid|validation|train|test|eval|avg|mean|ema|mae|m)[_-]?)*"
    r"(?:loss|acc|accuracy|val|top1|top5|auc|auroc|f1|map|mse|mae|psnr|ssim|fid|score|reward|"
    r"return|ppl|perplexity|bleu|wer|lr|rmse|iou|miou|metric|dice|error|err)"
    r"[=_-]?-?\d+(?:\.\d+)?(?:e-?\d+)?",
    re.IGNORECASE,
)
_DECIMAL = re.compile(r"\d+\.\d+(?:e-?\d+)?")
_STAMP = re.compile(
    r"(?<!\d)(?:19|20)\d\d[-_]?[01]\d[-_]?[0-3]\d(?:[T_-]?[0-2]\d[-_:h]?[0-5]\d(?:[-_:m]?[0-5]\d)?)?(?!\d)"
)
_STEP_WORDS = (
    ("global_step", "globalstep", "gstep", "steps", "step", "timesteps", "frames", "updates"),
    ("iterations", "iteration", "iters", "iter", "itr", "it", "batch", "ba"),
    ("epochs", "epoch", "ep", "e"),
    ("tasks", "task", "t", "phase", "stage", "round", "gen", "generation"),
    ("checkpoint", "ckpt", "model", "chkpt", "cp", "net", "snapshot", "weights", "save"),
)
# A number behind these words tells runs apart, not moments of one run.
_RUN_WORDS = {"seed", "run", "trial", "fold", "version", "v", "rank", "exp", "worker", "replica"}
_UNNUMBERED = re.compile(
    r"(?:^|[^a-z])(best|last|latest|final|init|initial)(?:[^a-z]|$)", re.IGNORECASE
)


def step_numbers(name: str) -> dict[str, int]:
    """The numbers in a file's or folder's name that may be its step, by the word before them.

    Metric values, dates and numbers that tell runs apart (seed3) are left out; a number without
    a word, between separators, is under "". `100k` is 100000.
    """
    return {word: value for _, _, word, value in _numbers(_scrubbed(name))}


def _scrubbed(name: str) -> str:
    stem = re.sub(r"\.(pt|pth|ckpt|bin|safetensors|npz|zip|pkl|pickle|tar|th|t7)\b", "", name)
    # Lightning appends -v1 when a file of the same name exists.
    stem = re.sub(r"-v\d+$", "", stem)
    return _STAMP.sub("~", _DECIMAL.sub("~", _METRIC.sub("~", stem)))


def _numbers(stem: str) -> list[tuple[int, int, str, int]]:
    """Start, end, word and value of every number that may be a step."""
    found = []
    for match in re.finditer(r"\d+", stem):
        before = re.search(r"([A-Za-z_]*[A-Za-z])[=_\-. ]?$", stem[: match.start()])
        after = re.match(r"([kKmM])?(?:[_\- ]?([A-Za-z]+))?(?![A-Za-z])", stem[match.end() :])
        unit = {"k": 1000, "m": 1000000}.get((after[1] or "").lower() if after else "", 1)
        joined = stem[match.end() : match.end() + 1].isalpha() and unit == 1
        if joined and (after is None or word_rank(after[2] or "") is None):
            continue
        word = _word(before[1] if before else "", after[2] if after else "")
        glued = before is not None and stem[match.start() - 1].isalpha()
        own = re.split(r"[_\-]", before[1].lower())[-1] if before else ""
        if word is not None and not (glued and word_rank(own) is None):
            end = match.end() + (unit > 1)
            found.append((match.start(), end, word, int(match[0][:18]) * unit))
    return found


def _word(before: str, after: str | None) -> str | None:
    tail = re.split(r"[_\-]", before.lower())[-1]
    if tail in _RUN_WORDS:
        return None
    whole = before.lower().strip("_")
    for candidate in ("global_step" if whole.endswith("global_step") else tail,):
        if word_rank(candidate) is not None and word_rank(candidate) != 4:
            return candidate
    if after and word_rank(after.lower()) in (0, 1, 2):
        return after.lower()
    return tail if word_rank(tail) is not None else ""


def word_rank(word: str) -> int | None:
    """How directly a word says "step": 0 step, 1 iteration, 2 epoch, 3 task, 4 checkpoint."""
    for rank, words in enumerate(_STEP_WORDS):
        if word.lower() in words:
            return rank
    return None


def best_word(words: Iterable[str]) -> str:
    """The word that says "step" most directly; a bare number comes behind named ones."""
    return min(words, key=lambda word: (_order(word), word))


def _order(word: str) -> float:
    rank = word_rank(word)
    return 3.5 if rank is None else float(rank)


def unnumbered_role(name: str) -> str | None:
    """best, last, final ... when the name says so."""
    match = _UNNUMBERED.search(name)
    return match[1].lower() if match else None


def tells_runs_apart(name: str) -> bool:
    """Whether the name numbers a run (seed3, fold-1), not a moment of one."""
    words = "|".join(sorted(_RUN_WORDS - {"v"}, key=len, reverse=True))
    return re.search(rf"(?<![a-z])(?:{words})[=_\-]?\d", name, re.IGNORECASE) is not None


def task_number(name: str) -> int | None:
    """The task in a name such as task_012.pt."""
    match = re.search(r"(?<![a-z])tasks?[=_\-]?(\d+)", name, re.IGNORECASE)
    return int(match[1]) if match else None


def template(name: str) -> str:
    """The name with its step, metric values and dates replaced: equal within one run."""
    stem = _scrubbed(name)
    for start, end, _, _ in reversed(_numbers(stem)):
        stem = f"{stem[:start]}#{stem[end:]}"
    suffix = name.rsplit(".", 1)[-1] if "." in name else ""
    return re.sub(r"[~_\-. =]+", "_", f"{stem.replace('~', '')}_{suffix}").strip("_")
