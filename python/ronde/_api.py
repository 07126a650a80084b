"""The collectives for frameworks whose tensors the core reads and writes by address."""

from collections.abc import Sequence
from typing import Any, Optional

from ronde import _core
from ronde._collectives import Collectives, Handle, Result
from ronde._frontend import Frontend, T
from ronde.process_sets import ProcessSet, set_id

Row = tuple[int, int, int, tuple[int, ...]]  # of a tensor, as _core.submit takes it


class Api(Collectives[T]):
    """See make_api."""

    def __init__(self, frontend: Frontend[T]) -> None:
        super().__init__(frontend)
        self._memory = frontend

    def _start(
        self,
        kind: str,
        given: Sequence[Any],
        name: Optional[str],
        process_set: ProcessSet,
        where: Result,
        **options: Any,
    ) -> Handle[list[T]]:
        parts = [self._prepare(each, where) for each in given]
        rows = [row for _, _, _, row in parts]
        core = _core.submit(_core.OPS[kind], name, rows, parts, process_set=set_id(process_set), **options)

        def finish(core: _core.Handle) -> list[T]:
            return [
                self._result(core, number, where, each, tensor, target)
                for number, (each, (tensor, _, target, _)) in enumerate(zip(given, parts))
            ]

        return Handle(core, finish)

    def _start_one(  # type: ignore[override]
        self,
        kind: str,
        given: Any,
        name: Optional[str],
        process_set: ProcessSet,
        where: Result,
        reduction: int = 0,
        prescale: float = 1.0,
        postscale: float = 1.0,
        root: int = 0,
    ) -> Handle[T]:
        tensor, source, target, row = self._prepare(given, where)
        core = _core.submit(
            _core.OPS[kind], name, (row,), source if source is target else (source, target), reduction, prescale,
            postscale, root, set_id(process_set),
        )  # fmt: skip
        return _One(core, self, where, given, tensor, target)

    def _prepare(self, given: Any, where: Result) -> tuple[T, T, Optional[T], Row]:
        """What is given as a tensor, the memory that is sent, that which gets the result (None: the core's), the row."""
        frontend = self._memory
        tensor = frontend.convert(given)
        if where is Result.IN_PLACE:
            frontend.check_writable(tensor, given)
        source = frontend.memory(tensor)
        address, dtype, shape = frontend.row(source)
        if where is Result.IN_PLACE:
            return tensor, source, source, (address, address, dtype, shape)
        if where is Result.CORE:
            return tensor, source, None, (address, 0, dtype, shape)
        target = frontend.empty_like(source)
        return tensor, source, target, (address, frontend.row(target)[0], dtype, shape)

    def _result(
        self, core: _core.Handle, number: int, where: Result, given: Any, tensor: T, target: Optional[T]
    ) -> Any:
        """Tensor `number` of an operation that has ended well."""
        if where is Result.IN_PLACE:
            self._memory.assign(tensor, target)  # type: ignore[arg-type]
            return given
        return self._memory.place(self._memory.wrap(core.output(number)) if target is None else target, tensor)


class _One(Handle[T]):
    """An operation on one tensor. One object: each that outlives the call brings Python's collector closer, which looks
    through the whole heap and so costs more than all else here."""

    __slots__ = ("_api", "_given", "_target", "_tensor", "_where")

    def __init__(
        self, core: _core.Handle, api: Api[T], where: Result, given: Any, tensor: T, target: Optional[T]
    ) -> None:
        self._core = core
        self._api: Optional[Api[T]] = api  # None: the result is there
        self._where = where
        self._given = given
        self._tensor: Optional[T] = tensor
        self._target = target

    def _end(self) -> T:
        if self._api is not None:
            self._result = self._api._result(self._core, 0, self._where, self._given, self._tensor, self._target)  # type: ignore[arg-type]
            self._api = self._given = self._tensor = self._target = None
        return self._result  # type: ignore[return-value]


def make_api(frontend: Frontend[T]) -> Api[T]:
    """The collectives for a framework."""
    return Api(frontend)
