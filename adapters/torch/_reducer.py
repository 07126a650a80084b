"""Reduces the gradients of an optimizer's parameters, each as soon as the backward pass has computed it."""

import itertools
import weakref
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Optional, Union

import torch
from ronde._gradient_options import GradientOptions
from ronde.basics import Max
from ronde.common.util import split_list
from ronde.process_sets import ProcessSet, engine_memory
from ronde.torch import mpi_ops
from ronde.torch._gradient import Gradient
from ronde.torch._sent import Sent, SentGroup, SentOne, SentSparse, wait_for
from ronde.torch._views import move, shared_views

Parameter = torch.Tensor

# Optimizers whose parameters have equal names (hashed) and that serve the same ranks are numbered in the order of their
# first steps. Not in which they are made: a rank may make some that it never uses. Nor in which they first have a
# gradient: that depends on what a rank computes.
_serials: "dict[tuple[int, tuple[int, ...]], itertools.count[int]]" = engine_memory()
_prefixes: "dict[int, str]" = engine_memory()  # by id of the reducer, which removes it


class _Engines:
    """Counts the engines that this process has had."""

    def __init__(self) -> None:
        self.number = 0

    def clear(self) -> None:  # as engine memory
        self.number += 1


_engines: _Engines = engine_memory(_Engines())


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
        self.options = options
        self.scales = options.scales
        self.passes = 0
        self.complete = False  # some gradient has had all its passes
        self.sent: list[Gradient] = []  # on their way, in the order in which they were sent
        self.reduced: set[Gradient] = set()  # since the last step
        # The zeros that stood for missing gradients when an access to param_groups synchronized.
        self.stood_in: dict[Gradient, torch.Tensor] = {}
        self._active = options.process_set.included()
        self._begun_in = -1  # the engine in which the first gradients were sent
        self._names: dict[Parameter, str] = {}
        self._gradients: dict[Parameter, Gradient] = {}
        self._groups: list[list[Gradient]] = []
        self._as_views = as_views
        self.set_passes(options.passes)
        check_names(params, named, self._names)
        self.add_parameters(params)
        self._make_groups(options.groups)
        weakref.finalize(self, drop_prefix, id(self))

    def set_passes(self, passes: int) -> None:
        if passes < 1:
            raise ValueError(f"backward_passes_per_step is {passes}; it must be at least 1")
        self.passes = passes
        self._restart_passes()

    def add_parameters(self, params: Sequence[Parameter]) -> None:
        added = []
        for param in params:
            if param not in self._gradients:
                name = self._names.setdefault(param, f"parameter.{len(self._gradients)}")
                self._gradients[param] = Gradient(param, name, self, self.passes)
                added.append(param)
                if self._active:
                    self._gradients[param].hook()
        if self._as_views and self._active:
            for param, view in shared_views(added).items():
                self._gradients[param].view = view

    def check_idle(self, what: str) -> None:
        if self.complete:
            raise AssertionError(
                f"{what} was called between backward pass and step(), while gradients are on their way: call step() or "
                "synchronize() first"
            )
        self._take_sent()
        self.reduced.clear()

    def drop(self) -> None:
        """Waits for what is on its way and forgets it."""
        gradients, sent = self._take_sent()
        self.reduced.clear()
        try:
            wait_for(sent)
        finally:
            _unmark(gradients)

    def synchronize(self) -> None:
        """Sends what has not been sent and waits for all."""
        if not self._active:
            return
        if not self.has_begun():
            self._begin()
        try:
            for gradient in self._gradients.values():
                if gradient.shared is None:
                    gradient.hook()  # may have been unfrozen
                if gradient.sent is None and gradient.param.requires_grad and gradient not in self.reduced:
                    self.send([each for each in self.members(gradient) if each not in self.reduced])
        finally:
            gradients, sent = self._take_sent()
            try:
                wait_for(sent)
            finally:
                _unmark(gradients)
        with torch.no_grad():
            for each in sent:
                each.store()
        self.reduced.update(gradients)
        self.synchronized = True

    def stepped(self) -> None:
        """step() has used the gradients."""
        self.synchronized = False
        self.stood_in = {}
        self.reduced.clear()

    def finish_before_access(self) -> None:
        if self.complete and self.enabled and self._active:
            trained = [each for each in self._gradients.values() if each.param.requires_grad]
            missing = [each for each in trained if each.param.grad is None]
            self.synchronize()
            self.stood_in = {each: each.param.grad for each in missing if each.param.grad is not None}

    def reduce_loss(self, loss: Any) -> Any:
        if not self._active or loss is None:
            return loss
        value = loss.detach() if isinstance(loss, torch.Tensor) else torch.tensor(float(loss), dtype=torch.float64)
        result = mpi_ops.allreduce(
            value, None, self.name("loss"), op=self.options.op, process_set=self.options.process_set
        )
        return result if isinstance(loss, torch.Tensor) else result.item()

    # ---- names and groups ----

    def _make_groups(self, groups: Optional[Union[int, Sequence[Sequence[Parameter]]]]) -> None:
        if groups is None:
            return
        if isinstance(groups, int):
            trained = [param for param in self._gradients if param.requires_grad]
            chosen = split_list(trained, groups) if groups and trained else []
        else:
            chosen = [list(group) for group in groups if len(group) > 0]
        for number, group in enumerate(chosen):
            for param in group:
                gradient = self._gradients.get(param)
                if gradient is None:
                    raise ValueError(f"groups: a parameter of group {number} is not in the optimizer")
                if gradient.group is not None:
                    raise ValueError(f"groups: {gradient.name!r} is in groups {gradient.group} and {number}")
                gradient.group = number
            self._groups.append([self._gradients[param] for param in group])

    def members(self, gradient: Gradient) -> list[Gradient]:
        """Those that are sent together with this one."""
        if gradient.group is None:
            return [gradient]
        return [each for each in self._groups[gradient.group] if each.param.requires_grad]

    def has_begun(self) -> bool:
        """Whether gradients may be sent: this engine has seen _begin()."""
        return self._begun_in == _engines.number

    def _begin(self) -> None:
        """Before the first gradients are sent, at the same place of the program on all ranks: a number of its own, and
        which gradients are sparse, for ranks that do not have them."""
        process_set = self.options.process_set
        prefix_of(self, "gradient", self._names.values(), process_set)
        self._begun_in = _engines.number
        gradients = list(self._gradients.values())
        for each in gradients:
            each.forget_engine()
        may_be_sparse = not self.options.sparse_as_dense
        sparse = [may_be_sparse and each.param.grad is not None and each.param.grad.is_sparse for each in gradients]
        flags = torch.tensor(sparse, dtype=torch.bool)
        found = mpi_ops.allreduce(flags, None, self.name("sparse"), op=Max, process_set=process_set)
        for each, is_sparse in zip(gradients, found.tolist()):
            each.sparse = each.sparse or is_sparse

    def name(self, what: str) -> str:
        """The name of an operation, different from those of other reducers. Once it has begun."""
        return _prefixes[id(self)] + what

    # ---- sending ----

    def send(self, gradients: Sequence[Gradient]) -> None:
        """Sends gradients, of which there are several in a group only. Zeros stand for those that are missing."""
        for gradient in gradients:
            sender = gradient.sender()
            if sender is not None:
                sender.synchronize()
            self._make_ready(gradient)
        first = gradients[0]
        if len(gradients) == 1 and first.send_again(self):
            return
        sent: Sent
        if len(gradients) > 1:
            sent = SentGroup(gradients, self)
        elif first.param.grad.is_sparse:  # type: ignore[union-attr]
            sent = SentSparse(first, self)
        else:
            first.prepare(self)
            if first.send_again(self):
                return
            sent = SentOne(first, self)
        for gradient in gradients:
            gradient.mark(sent, self)

    def _make_ready(self, gradient: Gradient) -> None:
        """Gives it the form in which it is sent."""
        param, grad = gradient.param, gradient.param.grad
        if grad is None:
            param.grad = torch.zeros_like(param, requires_grad=False)
            if gradient.sparse:
                param.grad = param.grad.to_sparse(1)
        elif grad.is_sparse and self.options.sparse_as_dense:
            param.grad = grad.to_dense()
        elif grad.is_sparse:
            gradient.sparse = True
        if gradient.view is not None and not move(param, gradient.view):
            gradient.view = None

    def _take_sent(self) -> tuple[list[Gradient], list[Sent]]:
        """What is on its way; passes start over."""
        gradients, self.sent = self.sent, []
        sent = list(dict.fromkeys(each.sent for each in gradients if each.sent is not None))
        for each in gradients:
            each.sent = None
        self.stood_in, self.complete, self.synchronized = {}, False, False
        self._restart_passes()
        return gradients, sent

    def _restart_passes(self) -> None:
        for each in self._gradients.values():
            each.left = self.passes


def _unmark(gradients: Iterable[Gradient]) -> None:
    """These are no longer on their way."""
    for each in gradients:
        if each.shared is not None:
            each.shared.sender = None
