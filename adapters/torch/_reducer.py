"""Reduces the gradients of an optimizer's parameters, each as soon as the backward pass has computed it."""

import itertools
import weakref
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Optional, Union

import torch
from ronde._core import RondeError
from ronde._gradient_options import GradientOptions
from ronde.basics import Average, Max
from ronde.common.util import split_list
from ronde.process_sets import ProcessSet, engine_memory
from ronde.torch import mpi_ops
from torch.utils.weak import WeakIdKeyDictionary

Parameter = torch.Tensor
_CACHE_LINE = 64  # bytes

# Optimizers whose parameters have equal names (hashed) and that serve the same ranks are numbered in the order of their
# first steps. Not in which they are made: a rank may make some that it never uses. Nor in which they first have a
# gradient: that depends on what a rank computes.
_serials: "dict[tuple[int, tuple[int, ...]], itertools.count[int]]" = engine_memory()
_prefixes: "dict[int, str]" = engine_memory()  # by id of the reducer, which removes it


class _Shared:
    """What the reducers of one parameter know of each other: several may have a hook on it."""

    __slots__ = ("owners", "sender")

    def __init__(self) -> None:
        self.owners: "weakref.WeakSet[GradientReducer]" = weakref.WeakSet()
        self.sender: Optional[GradientReducer] = None  # has the gradient on its way


# By parameter. Slow to look up, so each reducer keeps what it found.
_shared: Any = WeakIdKeyDictionary()


def prefix_of(reducer: Any, what: str, names: Iterable[str], process_set: ProcessSet) -> str:
    """What the names of a reducer's operations start with, made when it is first asked for: at the same place of the
    program on all ranks."""
    if id(reducer) not in _prefixes:
        key = zlib.crc32("\n".join(names).encode())
        serial = next(_serials.setdefault((key, tuple(process_set.ranks or ())), itertools.count()))
        _prefixes[id(reducer)] = f"{what}.{key:08x}.{serial}."
    return _prefixes[id(reducer)]


def drop_prefix(reducer_id: int) -> None:
    _prefixes.pop(reducer_id, None)


def check_names(
    params: Sequence[Parameter], named: Sequence[tuple[str, Parameter]], names: dict[Parameter, str]
) -> None:
    """Fills in the names that the user gave; ValueError if there are some, but not for all parameters or twice."""
    if not named:
        return
    if not all(isinstance(item, tuple) and len(item) == 2 for item in named):
        raise ValueError("named_parameters must be pairs of name and parameter, as model.named_parameters() gives")
    twice = sorted(name for name, count in Counter(name for name, _ in named).items() if count > 1)
    if twice:
        raise ValueError(f"named_parameters: names must differ, but these come more than once: {', '.join(twice)}")
    for name, param in named:
        names.setdefault(param, name)
    unnamed = [number for number, param in enumerate(params) if param not in names]
    if unnamed:
        shapes = ", ".join(f"number {number} {tuple(params[number].shape)}" for number in unnamed[:5])
        raise ValueError(f"named_parameters: {len(unnamed)} of the optimizer's parameters have no name: {shapes}")


class GradientReducer:
    """See DistributedOptimizer for the arguments."""

    def __init__(
        self,
        params: Sequence[Parameter],
        named: Sequence[tuple[str, Parameter]],
        options: GradientOptions,
        as_views: bool = False,
    ) -> None:
        self.enabled = True  # step() synchronizes
        self.synchronized = False  # the gradients are reduced, and step() has not used them yet
        self._options = options
        self._scales = options.scales
        self._active = options.process_set.included()
        self._names: dict[Parameter, str] = {}
        self._passes = 0
        self._left: dict[Parameter, int] = {}  # passes until a gradient is sent; below 0: sent
        self._hooked: dict[Parameter, _Shared] = {}
        self._sparse: set[Parameter] = set()  # had a sparse gradient before
        self._group_of: dict[Parameter, int] = {}
        self._groups: list[list[Parameter]] = []
        self._as_views = as_views
        self._views: dict[Parameter, torch.Tensor] = {}  # where gradients live that other ranks reach
        self._sent: dict[Parameter, _Sent] = {}
        self._reduced: set[Parameter] = set()  # since the last step
        self._complete = False  # some gradient has had all its passes
        # The zeros that stood for missing gradients when an access to param_groups synchronized.
        self._stood_in: dict[Parameter, torch.Tensor] = {}
        self.set_passes(options.passes)
        check_names(params, named, self._names)
        self.add_parameters(params)
        self._make_groups(options.groups)
        weakref.finalize(self, drop_prefix, id(self))

    def set_passes(self, passes: int) -> None:
        if passes < 1:
            raise ValueError(f"backward_passes_per_step is {passes}; it must be at least 1")
        self._passes = passes
        self._left = dict.fromkeys(self._left, passes)

    def add_parameters(self, params: Sequence[Parameter]) -> None:
        for param in params:
            self._names.setdefault(param, f"parameter.{len(self._left)}")
            self._left[param] = self._passes
            self._hook(param)
        if self._as_views and self._active:
            self._views.update(shared_views([param for param in params if param not in self._views]))

    def check_idle(self, what: str) -> None:
        if self._complete:
            raise AssertionError(
                f"{what} was called between backward pass and step(), while gradients are on their way: call step() or "
                "synchronize() first"
            )
        self._reset()
        self._reduced.clear()

    def drop(self) -> None:
        """Waits for what is on its way and forgets it."""
        sent, self._sent = self._sent, {}
        self._reset()
        self._reduced.clear()
        try:
            _wait(list(sent.values()))
        finally:
            self._unmark(sent)

    def synchronize(self) -> None:
        """Sends what has not been sent and waits for all."""
        if not self._active:
            return
        if id(self) not in _prefixes:
            self._begin()
        try:
            for param in self._left:
                self._hook(param)  # may have been unfrozen
                if param.requires_grad and param not in self._sent and param not in self._reduced:
                    self._send([each for each in self._members(param) if each not in self._reduced])
        finally:
            params, sent = list(self._sent), list(dict.fromkeys(self._sent.values()))
            self._reset()
            try:
                _wait(sent)
            finally:
                self._unmark(params)
        with torch.no_grad():
            for each in sent:
                each.store()
        self._reduced.update(params)
        self.synchronized = True

    def stepped(self) -> None:
        """step() has used the gradients."""
        self.synchronized = False
        self._stood_in = {}
        self._reduced.clear()

    def finish_before_access(self) -> None:
        if self._complete and self.enabled and self._active:
            missing = [param for param in self._left if param.requires_grad and param.grad is None]
            self.synchronize()
            self._stood_in = {param: param.grad for param in missing if param.grad is not None}

    def reduce_loss(self, loss: Any) -> Any:
        if not self._active or loss is None:
            return loss
        value = loss.detach() if isinstance(loss, torch.Tensor) else torch.tensor(float(loss), dtype=torch.float64)
        result = mpi_ops.allreduce(
            value, None, self._name("loss"), op=self._options.op, process_set=self._options.process_set
        )
        return result if isinstance(loss, torch.Tensor) else result.item()

    # ---- names and groups ----

    def _make_groups(self, groups: Optional[Union[int, Sequence[Sequence[Parameter]]]]) -> None:
        if groups is None:
            return
        if isinstance(groups, int):
            trained = [param for param in self._left if param.requires_grad]
            self._groups = split_list(trained, groups) if groups and trained else []
        else:
            self._groups = [list(group) for group in groups if len(group) > 0]
        for number, group in enumerate(self._groups):
            for param in group:
                if param not in self._left:
                    raise ValueError(f"groups: a parameter of group {number} is not in the optimizer")
                if param in self._group_of:
                    raise ValueError(
                        f"groups: {self._names[param]!r} is in groups {self._group_of[param]} and {number}"
                    )
                self._group_of[param] = number

    def _members(self, param: Parameter) -> list[Parameter]:
        """The parameters that are sent together with this one."""
        number = self._group_of.get(param)
        return [param] if number is None else [each for each in self._groups[number] if each.requires_grad]

    def _begin(self) -> None:
        """Before the first gradients are sent, at the same place of the program on all ranks: a number of its own, and
        which gradients are sparse, for ranks that do not have them."""
        process_set = self._options.process_set
        prefix_of(self, "gradient", self._names.values(), process_set)
        may_be_sparse = not self._options.sparse_as_dense
        sparse = [may_be_sparse and param.grad is not None and param.grad.is_sparse for param in self._left]
        flags = torch.tensor(sparse, dtype=torch.bool)
        found = mpi_ops.allreduce(flags, None, self._name("sparse"), op=Max, process_set=process_set)
        self._sparse.update(param for param, is_sparse in zip(self._left, found.tolist()) if is_sparse)

    def _name(self, what: str) -> str:
        return _prefixes[id(self)] + what

    # ---- sending ----

    def _hook(self, param: Parameter) -> None:
        if param in self._hooked or not (self._active and param.requires_grad and param.is_leaf):
            return
        shared = _shared.setdefault(param, _Shared())
        others = shared.owners
        if len(others) > 0 and any(reducer._options.op != Average for reducer in [*others, self]):
            raise ValueError(
                f"{self._names[param]!r} is in another DistributedOptimizer, too: its gradient would be reduced twice, which "
                "only op=Average allows"
            )
        others.add(self)
        self._hooked[param] = shared
        reference = weakref.ref(self)  # an optimizer that was dropped must not go on sending

        def computed(param: Parameter) -> None:
            reducer = reference()
            if reducer is None:
                hook.remove()
            else:
                reducer._computed(param)

        hook = param.register_post_accumulate_grad_hook(computed)

    def _computed(self, param: Parameter) -> None:
        """A backward pass has added to this gradient."""
        if self._stood_in and self._stood_in.pop(param, None) is param.grad:
            raise AssertionError(
                f"the gradient of {self._names[param]!r} was computed after param_groups had been read, which reduced the "
                "gradients that there were: read them after step()"
            )
        if param in self._reduced:
            if self._options.op != Average:
                raise AssertionError(
                    f"the gradient of {self._names[param]!r} was computed after synchronize() or a look at param_groups had "
                    "reduced it, and only op=Average allows to reduce it again: do so after step()"
                )
            self._reduced.discard(param)
        self.synchronized = False
        left = self._left[param] - 1
        self._left[param] = left
        self._complete = self._complete or left == 0
        if left < 0:
            count = self._passes - left
            raise AssertionError(
                f"the gradient of {self._names[param]!r} was computed {count} times before step(), but "
                f"backward_passes_per_step is {self._passes}: increase it to accumulate gradients"
            )
        if left > 0 or id(self) not in _prefixes:
            return  # the first step sends
        if param not in self._group_of:
            if self._hooked[param].sender is None:
                self._send([param])
            return
        members = self._members(param)
        if all(self._left[each] == 0 and self._sender(each) is None for each in members):
            self._send(members)

    def _send(self, params: list[Parameter]) -> None:
        for param in params:
            sender = self._sender(param)
            if sender is not None:
                sender.synchronize()
            grad = param.grad
            if grad is None:
                param.grad = torch.zeros_like(param, requires_grad=False)
                if param in self._sparse:
                    param.grad = param.grad.to_sparse(1)
            elif grad.is_sparse and self._options.sparse_as_dense:
                param.grad = grad.to_dense()
            elif grad.is_sparse:
                self._sparse.add(param)
            if param in self._views and not _move(param, self._views[param]):
                del self._views[param]
        sent: _Sent
        if len(params) > 1:
            sent = _SentGroup(params, self)
        elif params[0].grad.is_sparse:  # type: ignore[union-attr]
            sent = _SentSparse(params[0], self)
        else:
            sent = _SentOne(params[0], self)
        for param in params:
            self._sent[param] = sent
            if param in self._hooked:
                self._hooked[param].sender = self

    def _sender(self, param: Parameter) -> "Optional[GradientReducer]":
        """Who has this parameter's gradient on its way."""
        shared = self._hooked.get(param)
        return None if shared is None else shared.sender

    def _unmark(self, params: Iterable[Parameter]) -> None:
        """These gradients are no longer on their way."""
        for param in params:
            if param in self._hooked:
                self._hooked[param].sender = None

    def _reset(self) -> None:
        self._sent, self._stood_in, self._complete = {}, {}, False
        self._left = dict.fromkeys(self._left, self._passes)
        self.synchronized = False


class _Sent(ABC):
    """Gradients on their way."""

    __slots__ = ()

    @abstractmethod
    def wait(self) -> None:
        """Waits for the end; raises the operation's error."""

    @abstractmethod
    def store(self) -> None:
        """Puts the reduced gradients where the optimizer looks for them. To be called without autograd."""


class _SentOne(_Sent):
    """A dense gradient by itself: what most steps are made of, so it is one object."""

    __slots__ = ("_compression", "_context", "_grad", "_handle", "_param", "_result")

    def __init__(self, param: Parameter, reducer: GradientReducer) -> None:
        options = reducer._options
        prescale, postscale = reducer._scales
        self._param, self._compression = param, options.compression
        self._grad: torch.Tensor = param.grad  # type: ignore[assignment]
        tensor, self._context = self._compression.compress(self._grad)
        self._result = tensor
        name = reducer._name(reducer._names[param])
        self._handle = mpi_ops.allreduce_async_(
            tensor, None, name, options.op, prescale, postscale, options.process_set
        )

    def wait(self) -> None:
        self._result = self._handle.wait()

    def store(self) -> None:
        _store(self._param, self._grad, self._compression.decompress(self._result, self._context))


class _SentGroup(_Sent):
    """The dense gradients of a group of parameters."""

    __slots__ = ("_compression", "_contexts", "_grads", "_handle", "_params", "_results")

    def __init__(self, params: list[Parameter], reducer: GradientReducer) -> None:
        options = reducer._options
        prescale, postscale = reducer._scales
        self._params, self._compression = params, options.compression
        self._grads: list[torch.Tensor] = [param.grad for param in params]  # type: ignore[misc]
        if self._grads[0].is_sparse:
            raise ValueError(
                f"the gradient of {reducer._names[params[0]]!r} is sparse and cannot be sent in a group: leave it "
                "out of `groups` or use sparse_as_dense=True"
            )
        pairs = [self._compression.compress(grad) for grad in self._grads]
        self._contexts = [ctx for _, ctx in pairs]
        self._results = [tensor for tensor, _ in pairs]
        name = reducer._name(f"group.{reducer._group_of[params[0]]}")
        self._handle = mpi_ops.grouped_allreduce_async_(
            self._results, None, name, options.op, prescale, postscale, options.process_set
        )

    def wait(self) -> None:
        self._results = self._handle.wait()

    def store(self) -> None:
        for param, grad, result, ctx in zip(self._params, self._grads, self._results, self._contexts):
            _store(param, grad, self._compression.decompress(result, ctx))


class _SentSparse(_Sent):
    """A sparse gradient."""

    __slots__ = ("_handle", "_param", "_result")

    def __init__(self, param: Parameter, reducer: GradientReducer) -> None:
        options = reducer._options
        self._param = param
        self._result: torch.Tensor = param.grad  # type: ignore[assignment]
        name = reducer._name(reducer._names[param])
        self._handle = mpi_ops.sparse_allreduce_async(self._result, name, options.op, options.process_set)

    def wait(self) -> None:
        self._result = self._handle.wait()

    def store(self) -> None:
        self._param.grad = self._result


def shared_views(params: Iterable[Parameter]) -> dict[Parameter, torch.Tensor]:
    """For each parameter that is trained on the CPU, memory for a gradient that the other ranks of this host reach.

    One piece of memory per dtype, in the order in which a backward pass reaches the parameters, so that gradients that
    travel together are neighbours."""
    by_dtype: dict[torch.dtype, list[Parameter]] = {}
    for param in reversed(list(params)):
        if param.requires_grad and param.is_cpu and param.layout == torch.strided and param.is_contiguous():
            by_dtype.setdefault(param.dtype, []).append(param)
    views = {}
    for dtype, members in by_dtype.items():
        align = max(1, _CACHE_LINE // dtype.itemsize)
        sizes = [-(-param.numel() // align) * align for param in members]
        memory = mpi_ops.empty_shared(sum(sizes), dtype=dtype)
        for param, part in zip(members, memory.split(sizes)):
            views[param] = part[: param.numel()].view(param.shape)
    return views


def _move(param: Parameter, view: torch.Tensor) -> bool:
    """Has the gradient live in its view. It does not when somebody has set it to None since, as zero_grad() does.

    False: the view does not fit, as the parameter has another dtype, shape or layout by now."""
    grad = param.grad
    if grad is view or grad is None or grad.is_sparse:
        return True
    if (grad.dtype, grad.shape, grad.stride(), grad.device) != (view.dtype, view.shape, view.stride(), view.device):
        return False
    # A gradient that somebody put into another one's view stays: what is there would be overwritten.
    if grad.untyped_storage().data_ptr() != view.untyped_storage().data_ptr():
        with torch.no_grad():
            param.grad = view.copy_(grad)
    return True


def _store(param: Parameter, grad: torch.Tensor, reduced: torch.Tensor) -> None:
    if reduced is not grad:
        grad.copy_(reduced)
    if param.grad is not grad:
        param.grad = grad


def _wait(sent: Sequence[_Sent]) -> None:
    """Waits for all, then raises the first error there was."""
    errors = []
    for each in dict.fromkeys(sent):
        try:
            each.wait()
        except RondeError as error:
            errors.append(error)
    if errors:
        raise errors[0]
