"""The collectives for frameworks whose tensors the core reads and writes by address."""

from collections.abc import Sequence
from typing import Any, Optional

from ronde import _core
from ronde._collectives import Collectives, Handle, Result
from ronde._frontend import Frontend, T
from ronde.process_sets import ProcessSet, set_id


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
        frontend = self._memory
        in_place, new = where is Result.IN_PLACE, where is Result.NEW
        tensors = [frontend.convert(tensor) for tensor in given]
        if in_place:
            for tensor, original in zip(tensors, given):
                frontend.check_writable(tensor, original)
        sources = [frontend.memory(tensor) for tensor in tensors]
        targets = sources if in_place else [frontend.empty_like(source) for source in sources] if new else []
        rows = []
        for number, source in enumerate(sources):
            address, dtype, shape = frontend.row(source)
            target = address if in_place else frontend.row(targets[number])[0] if new else 0
            rows.append((address, target, dtype, shape))
        core = _core.submit(_core.OPS[kind], name, rows, (sources, targets), process_set=set_id(process_set), **options)

        def finish(core: _core.Handle) -> list[T]:
            if in_place:
                for tensor, target in zip(tensors, targets):
                    frontend.assign(tensor, target)
                return list(given)
            made = targets if new else [frontend.wrap(core.output(number)) for number in range(len(tensors))]
            return [frontend.place(result, tensor) for result, tensor in zip(made, tensors)]

        return Handle(core, finish)


def make_api(frontend: Frontend[T]) -> Api[T]:
    """The collectives for a framework."""
    return Api(frontend)
