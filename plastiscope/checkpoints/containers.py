"""Plain containers as a pickle describes them: they hold data and run nothing."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

from plastiscope.checkpoints.unpickle import Rebuild, Stub, safe_key, set_entries
from plastiscope.errors import UnreadableError


def collection_rebuilds() -> dict[str, Rebuild]:
    """Plain containers: they hold data and run nothing."""
    return {
        "collections.OrderedDict": _mapping,
        "collections.defaultdict": lambda args: {},
        "collections.Counter": _mapping,
        "collections.deque": lambda args: deque(args[0] if args else ()),
        "builtins.dict": _mapping,
        "__builtin__.dict": _mapping,
        "builtins.list": _listing,
        "builtins.tuple": lambda args: tuple(_listing(args)),
        "builtins.set": lambda args: {safe_key(item) for item in _listing(args)},
        "__builtin__.set": lambda args: {safe_key(item) for item in _listing(args)},
        "builtins.frozenset": lambda args: frozenset(safe_key(i) for i in _listing(args)),
        "builtins.complex": lambda args: complex(*map(float, args[:2])),
        "builtins.slice": lambda args: Stub("slice", args),
        "builtins.bytearray": _bytes,
        "builtins.bytes": _bytes,
        "builtins.object": lambda args: Stub("object", args),
        "_codecs.encode": _encoded,
        "argparse.Namespace": lambda args: Namespace(),
        "types.SimpleNamespace": lambda args: Namespace(),
        "pathlib.PosixPath": _path,
        "pathlib.PurePosixPath": _path,
        "pathlib.WindowsPath": _path,
        "pathlib._local.PosixPath": _path,
        "pathlib._local.WindowsPath": _path,
        "torch.Size": lambda args: tuple(_listing(args)),
        "torch.device": lambda args: ":".join(str(a) for a in args if isinstance(a, str | int)),
        "torch.serialization._get_layout": lambda args: str(args[0]),
    }


class Namespace(dict[str, Any]):
    """An argparse.Namespace, as the dict it is."""

    def build_from(self, state: Any) -> None:
        if isinstance(state, dict):
            self.update({k: v for k, v in state.items() if isinstance(k, str)})


def _listing(args: tuple[Any, ...]) -> list[Any]:
    if not args:
        return []
    if not isinstance(args[0], list | tuple | set | frozenset | dict | deque):
        raise UnreadableError("corrupt pickle: a collection made of something else")
    return list(args[0])


def _mapping(args: tuple[Any, ...]) -> dict[Any, Any]:
    made: dict[Any, Any] = OrderedDict()
    if args and isinstance(args[0], dict):
        made.update(args[0])
    elif args:
        set_entries(made, (pair for pair in _listing(args) if len(pair) == 2))
    return made


def _bytes(args: tuple[Any, ...]) -> bytes:
    if args and isinstance(args[0], bytes | bytearray):
        return bytes(args[0])
    if args and isinstance(args[0], str):
        return args[0].encode("latin1")
    if args and isinstance(args[0], list):
        return bytes(args[0])
    # bytes(n) would allocate whatever the pickle says.
    return b""


def _encoded(args: tuple[Any, ...]) -> bytes:
    if len(args) < 1 or not isinstance(args[0], str):
        raise UnreadableError("corrupt pickle: bytes made of something else")
    return args[0].encode("latin1" if len(args) < 2 or args[1] == "latin1" else "utf-8")


def _path(args: tuple[Any, ...]) -> str:
    return "/".join(str(a) for a in args if isinstance(a, str)).replace("//", "/")
