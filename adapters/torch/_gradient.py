"""One parameter's gradient, from its backward pass to the step."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Optional

import torch
from ronde.basics import Average
from ronde.torch._sent import Sent, SentAgain
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from ronde.torch._reducer import GradientReducer


class Shared:
    """What the reducers of one parameter know of each other: several may have a hook on it."""

    __slots__ = ("owners", "sender")

    def __init__(self) -> None:
        self.owners: weakref.WeakSet[GradientReducer] = weakref.WeakSet()
        self.sender: Optional[GradientReducer] = None  # has the gradient on its way


# By parameter. Slow to look up, so a gradient keeps what it found.
_shared: Any = WeakIdKeyDictionary()


class Gradient:
    """What a reducer knows of the gradient of one of its parameters.

    In each step `left` counts the backward passes down. At 0 the gradient is sent, alone or with its group, until `sent`
    has ended in synchronize(); it is in the reducer's `reduced` until step() has used it.

    Belongs to the reducer, and refers to it weakly: an optimizer that is dropped, and its parameters, shall be gone at
    once, not when Python looks for cycles.
    """

    __slots__ = (
        "__weakref__", "_again", "_reducer", "group", "left", "name", "param", "sent", "shared", "sparse", "view",
    )  # fmt: skip

    def __init__(self, param: torch.Tensor, name: str, reducer: GradientReducer, passes: int) -> None:
        self.param = param
        self.name = name
        self.left = passes  # until it is sent; below 0: sent
        self.group: Optional[int] = None  # with whom it is sent
        self.view: Optional[torch.Tensor] = None  # where it lives so that other ranks reach it
        self.sparse = False  # was so before, on some rank
        self.sent: Optional[Sent] = None  # while it is on its way
        self.shared: Optional[Shared] = None  # None: not hooked
        self._again: Optional[SentAgain] = None
        self._reducer = weakref.ref(reducer)

    def hook(self) -> None:
        """Has computed() called after each backward pass."""
        param, reducer = self.param, self._reducer()
        if self.shared is not None or reducer is None or not (param.requires_grad and param.is_leaf):
            return
        shared = _shared.setdefault(param, Shared())
        others = shared.owners
        if len(others) > 0 and any(each.options.op != Average for each in [*others, reducer]):
            raise ValueError(
                f"{self.name!r} is in another DistributedOptimizer, too: its gradient would be reduced twice, which "
                "only op=Average allows"
            )
        others.add(reducer)
        self.shared = shared
        reference = weakref.ref(self)  # an optimizer that was dropped must not go on sending

        def computed(param: torch.Tensor) -> None:
            gradient = reference()
            if gradient is None:
                hook.remove()
            else:
                gradient.computed()

        hook = param.register_post_accumulate_grad_hook(computed)

    def computed(self) -> None:
        """A backward pass has added to this gradient."""
        reducer = self._reducer()
        if reducer is None:
            return
        if reducer.stood_in or reducer.reduced:
            self._check_unused(reducer)
        reducer.synchronized = False
        self.left -= 1
        if self.left > 0:
            return
        if self.left < 0:
            raise AssertionError(
                f"the gradient of {self.name!r} was computed {reducer.passes - self.left} times before step(), but "
                f"backward_passes_per_step is {reducer.passes}: increase it to accumulate gradients"
            )
        reducer.complete = True
        if not reducer.has_begun():
            return  # the first step sends
        if self.group is not None:
            members = reducer.members(self)
            if all(each.left == 0 and each.sender() is None for each in members):
                reducer.send(members)
        elif self.sender() is None and not self.send_again(reducer):
            reducer.send([self])

    def send_again(self, reducer: GradientReducer) -> bool:
        """Sends as in the step before. False: it cannot, since something has changed."""
        again, grad = self._again, self.param.grad
        if again is None or (grad is not self.view and self.view is not None) or not again.start(grad):
            return False
        self.mark(again, reducer)
        return True

    def prepare(self, reducer: GradientReducer) -> None:
        """What send_again() needs from now on, if the gradient allows it."""
        grad = self.param.grad
        can_send = grad is not None and SentAgain.can_send(grad, self.view, reducer)
        self._again = SentAgain(self, grad, reducer) if can_send else None  # type: ignore[arg-type]

    def forget_engine(self) -> None:
        self._again = None

    def sender(self) -> Optional[GradientReducer]:
        """Who has this parameter's gradient on its way."""
        return None if self.shared is None else self.shared.sender

    def mark(self, sent: Sent, reducer: GradientReducer) -> None:
        """It is on its way."""
        self.sent = sent
        reducer.sent.append(self)
        if self.shared is not None:
            self.shared.sender = reducer

    def _check_unused(self, reducer: GradientReducer) -> None:
        """AssertionError if the gradient was reduced already and this changes what that gave."""
        if self in reducer.stood_in and reducer.stood_in.pop(self) is self.param.grad:
            raise AssertionError(
                f"the gradient of {self.name!r} was computed after param_groups had been read, which reduced the "
                "gradients that there were: read them after step()"
            )
        if self in reducer.reduced:
            if reducer.options.op != Average:
                raise AssertionError(
                    f"the gradient of {self.name!r} was computed after synchronize() or a look at param_groups had "
                    "reduced it, and only op=Average allows to reduce it again: do so after step()"
                )
            reducer.reduced.discard(self)
