"""A pickle machine that imports nothing and calls nothing.

Every global a pickle names becomes an inert `Global`; the few that are harmless data (tensors,
numpy arrays and scalars, collections, namespaces) are rebuilt by functions of this package, and
everything else becomes a `Stub` that remembers its name, arguments and state. The pure Python
machine of the standard library is the base because its C twin allocates whatever size a pickle
declares.
"""

from __future__ import annotations

import io
import pickle
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, BinaryIO, ClassVar

from plastiscope.errors import UnreadableError

_MAX_OPERATIONS = 20_000_000
_BASE: Any = pickle._Unpickler  # type: ignore[attr-defined,unused-ignore]
_STOP: Any = pickle._Stop  # type: ignore[attr-defined,unused-ignore]


@dataclass(frozen=True)
class Global:
    """A name that a pickle refers to; never looked up."""

    name: str


@dataclass(eq=False, repr=False)
class Stub:
    """An object of a class that isn't imported: what the pickle said about it."""

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    items: list[Any] = field(default_factory=list)
    entries: dict[Any, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        # The generated one would walk a tree that may refer to itself.
        return f"<{self.name}>"

    @property
    def attributes(self) -> dict[str, Any]:
        """Its instance dictionary, as far as the pickle holds one."""
        parts = self.state if isinstance(self.state, tuple) else (self.state,)
        found: dict[str, Any] = {}
        for part in parts:
            if isinstance(part, dict):
                found.update({k: v for k, v in part.items() if isinstance(k, str)})
        return found


Rebuild = Callable[[tuple[Any, ...]], Any]


@dataclass(frozen=True)
class Unpickled:
    """What one pickle holds, and the names of the classes that were stubbed."""

    tree: Any
    stubs: tuple[str, ...]


class _Limited:
    """A file that never reads, hence never allocates, past its end."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size

    @property
    def left(self) -> int:
        return max(self._size - self._file.tell(), 0)

    def read(self, count: int) -> bytes:
        # Asking for the position is slow, and needed only where the declared size is large.
        if count > 65536:
            count = min(count, self.left)
        return self._file.read(count)

    def readline(self) -> bytes:
        return self._file.readline(1 << 20)


def unpickle(
    file: BinaryIO,
    size: int,
    rebuilds: dict[str, Rebuild],
    persistent_load: Callable[[Any], Any] | None = None,
) -> Unpickled:
    """Read one pickle from `file` (of `size` bytes in all) and stop right behind it.

    Raises:
        UnreadableError: truncated, corrupt or absurdly large pickle; says which.
    """
    # Bytes in memory can't be read past their end, and their own methods are several times faster.
    source = file if isinstance(file, io.BytesIO) else _Limited(file, size)
    machine = _Machine(source, rebuilds, persistent_load)
    try:
        return Unpickled(machine.load(), tuple(sorted(machine.stubs)))
    except UnreadableError:
        raise
    except EOFError:
        raise UnreadableError("truncated: the pickle ends before its end mark") from None
    except pickle.UnpicklingError as error:
        cause = "truncated" if "truncated" in str(error) else "corrupt pickle"
        raise UnreadableError(f"{cause}: {str(error) or 'unpickling error'}") from None
    except (MemoryError, RecursionError) as error:
        raise UnreadableError(f"corrupt pickle: absurd size ({type(error).__name__})") from None
    except Exception as error:
        if not file.read(1):
            raise UnreadableError("truncated: the file ends inside the pickle") from None
        # Damaged opcodes raise nearly anything, often without a message.
        raise UnreadableError(f"corrupt pickle: {type(error).__name__} {error}".rstrip()) from None


class _Machine(_BASE):  # type: ignore[misc]
    dispatch: ClassVar[dict[int, Any]] = dict(_BASE.dispatch)

    def __init__(
        self,
        file: _Limited | io.BytesIO,
        rebuilds: dict[str, Rebuild],
        persistent_load: Callable[[Any], Any] | None,
    ) -> None:
        # Python 2 files hold byte strings; latin1 keeps every byte.
        super().__init__(file, encoding="latin1")
        self._rebuilds = rebuilds
        self._persistent = persistent_load
        self.stubs: set[str] = set()

    def load(self) -> Any:
        # A frame is a length before opcodes that follow anyway; nothing needs to gather it.
        self.read, self.readline = self._file_read, self._file_readline
        self.metastack: list[Any] = []
        self.stack: list[Any] = []
        self.append = self.stack.append
        self.proto = 0
        read, dispatch = self.read, self.dispatch
        try:
            for _ in range(_MAX_OPERATIONS):
                key = read(1)
                if not key:
                    raise EOFError
                dispatch[key[0]](self)
        except _STOP as stop:
            return stop.value
        raise UnreadableError(f"absurd pickle: more than {_MAX_OPERATIONS} operations")

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise UnreadableError("corrupt pickle: a storage outside of a torch file")
        return self._persistent(pid)

    def find_class(self, module: str, name: str) -> Global:
        if not isinstance(module, str) or not isinstance(name, str):
            raise UnreadableError("corrupt pickle: a global without a name")
        return Global(f"{module}.{name}")

    def _called(self, what: Any, args: Any) -> Any:
        if not isinstance(args, tuple):
            raise UnreadableError("corrupt pickle: a call without arguments")
        if not isinstance(what, Global):
            # A method of a stub, or a stubbed function's result that is called again.
            name = what.name if isinstance(what, Stub) else type(what).__name__
            self.stubs.add(name)
            return Stub(name, args)
        rebuild = self._rebuilds.get(what.name)
        if rebuild is not None:
            return rebuild(args)
        self.stubs.add(what.name)
        return Stub(what.name, args)

    def _instantiate(self, klass: Any, args: Any) -> None:
        self.append(self._called(klass, tuple(args)))

    def _reduce(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self._called(self.stack[-1], args)

    def _new_object(self) -> None:
        args = self.stack.pop()
        self.append(self._called(self.stack.pop(), args))

    def _new_object_with_names(self) -> None:
        names, args, klass = self.stack.pop(), self.stack.pop(), self.stack.pop()
        made = self._called(klass, args)
        if isinstance(made, Stub) and isinstance(names, dict):
            made.entries.update(names)
        self.append(made)

    def _build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, Stub):
            target.state = state
        elif hasattr(target, "build_from"):
            target.build_from(state)
        # The attributes of a dict (state_dict's _metadata) aren't needed.

    def _append_one(self) -> None:
        value = self.stack.pop()
        _extend(self.stack[-1], [value])

    def _append_many(self) -> None:
        items = self.pop_mark()
        _extend(self.stack[-1], items)

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        set_entries(self.stack[-1], [(key, value)])

    def _set_items(self) -> None:
        items = self.pop_mark()
        set_entries(self.stack[-1], zip(items[::2], items[1::2], strict=True))

    def _dict(self) -> None:
        items = self.pop_mark()
        made: dict[Any, Any] = {}
        set_entries(made, zip(items[::2], items[1::2], strict=True))
        self.append(made)

    def _frozen_set(self) -> None:
        self.append(frozenset(safe_key(item) for item in self.pop_mark()))

    def _add_items(self) -> None:
        items = self.pop_mark()
        if isinstance(self.stack[-1], set):
            self.stack[-1].update(safe_key(item) for item in items)
        else:
            _extend(self.stack[-1], items)

    def _byte_array(self) -> None:
        count = int.from_bytes(self.read(8), "little")
        data = self.read(count)
        if len(data) != count:
            raise EOFError
        self.append(bytearray(data))

    def _frame(self) -> None:
        self.read(8)

    def _refused(self) -> None:
        raise UnreadableError("corrupt pickle: registered extensions aren't data")


def _extend(target: Any, items: list[Any]) -> None:
    if isinstance(target, list | deque):
        target.extend(items)
    elif isinstance(target, Stub):
        target.items.extend(items)
    else:
        raise UnreadableError("corrupt pickle: items appended to something that isn't a list")


def set_entries(target: Any, pairs: Any) -> None:
    if isinstance(target, Stub):
        target = target.entries
    if not isinstance(target, dict):
        raise UnreadableError("corrupt pickle: entries set on something that isn't a dict")
    for key, value in pairs:
        target[safe_key(key)] = value


def safe_key(key: Any, depth: int = 0) -> Hashable:
    """The key itself when hashing it is cheap, else a name for it.

    A tuple of tuples of tuples, each holding the same one twice, takes exponential time to hash.
    """
    if key is None or isinstance(key, str | int | float | bytes | complex | Global | Stub):
        return key
    if isinstance(key, tuple) and depth < 3 and len(key) <= 16:
        return tuple(safe_key(part, depth + 1) for part in key)
    return f"<{type(key).__name__} {id(key):x}>"


for _opcode, _method in (
    (pickle.REDUCE, _Machine._reduce),
    (pickle.NEWOBJ, _Machine._new_object),
    (pickle.NEWOBJ_EX, _Machine._new_object_with_names),
    (pickle.BUILD, _Machine._build),
    (pickle.APPEND, _Machine._append_one),
    (pickle.APPENDS, _Machine._append_many),
    (pickle.SETITEM, _Machine._set_item),
    (pickle.SETITEMS, _Machine._set_items),
    (pickle.DICT, _Machine._dict),
    (pickle.FROZENSET, _Machine._frozen_set),
    (pickle.ADDITEMS, _Machine._add_items),
    (pickle.BYTEARRAY8, _Machine._byte_array),
    (pickle.FRAME, _Machine._frame),
    (pickle.EXT1, _Machine._refused),
    (pickle.EXT2, _Machine._refused),
    (pickle.EXT4, _Machine._refused),
):
    _Machine.dispatch[_opcode[0]] = _method
