"""What makes a Keras optimizer distributed: Keras 3 on each of its backends, and Keras 2.

The optimizer that was given stays the same object of the same class; its own `apply` is replaced by a method of what
this module adds to it. So files that Keras writes of it need no ronde, and torch.compile, which looks methods up by
class, sees the replaced one.
"""

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Optional

from ronde._gradient_options import GradientOptions
from ronde._gradient_reducer import GradientReducer
from ronde._keras import models

Gradient = Any
Variable = Any

_ATTRIBUTE = "_ronde_distribution"  # of the optimizer
_MADE_FOR = "_ronde_made_for"  # of the model: what its train function was made for


def is_keras_optimizer(optimizer: Any) -> bool:
    """Whether it is one of Keras 2 or 3. Imports nothing: who has one has imported Keras."""
    return any(_is_of_keras(base) and "Optimizer" in base.__name__ for base in type(optimizer).__mro__)


def _is_of_keras(any_class: type) -> bool:
    return any_class.__module__.split(".")[0] in ("keras", "tf_keras")


def distribute(
    optimizer: Any,
    options: GradientOptions,
    average_passes: bool,
    scale_local: bool = True,
    device_dense: str = "",
    device_sparse: str = "",
) -> Any:
    """Makes a Keras optimizer distributed: in place, and returned.

    Args:
        average_passes: with backward_passes_per_step, gradients are averaged over the passes, not summed.
        scale_local: see GradientReducer.
        device_dense, device_sparse: of TensorFlow, where to place the operations around the collectives.
    """
    if distribution(optimizer) is not None:
        raise ValueError("this optimizer is distributed already")
    _patch(type(optimizer))
    inner = getattr(optimizer, "inner_optimizer", optimizer)  # a LossScaleOptimizer hands on the gradients
    kind: type[Distribution] = _Keras3 if hasattr(inner, "apply") else _Keras2
    made = kind(
        inner, options, average_passes, lambda: kind.make_reducer(options, device_dense, device_sparse, scale_local)
    )
    made.start()
    for each in (optimizer, inner):
        object.__setattr__(each, "register_local_var", made.register_local)
    return optimizer


def distribution(optimizer: Any) -> Optional["Distribution"]:
    """What this optimizer, or the one inside of this LossScaleOptimizer, has of ronde; None: it is not distributed."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return getattr(inner, _ATTRIBUTE, None)


class Distribution:
    """What a distributed optimizer has beyond its own.

    Args:
        optimizer: not a LossScaleOptimizer.
        make_reducer: is called when gradients come first, since only then the backend is needed.
    """

    def __init__(
        self,
        optimizer: Any,
        options: GradientOptions,
        average_passes: bool,
        make_reducer: Callable[[], GradientReducer],
    ) -> None:
        self.optimizer, self.options, self.average_passes = optimizer, options, average_passes
        self.locals = 0  # how many variables' gradients stay on this rank
        self._make_reducer = make_reducer
        self._made: Optional[GradientReducer] = None
        self._reduced_before = False  # gradients that come are those of all ranks already

    def start(self) -> None:
        """Replaces methods of the optimizer. Raises ValueError if options do not fit it."""
        self._set(_ATTRIBUTE, self)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self.optimizer, name, value)  # Keras must not track it

    @property
    def reducer(self) -> GradientReducer:
        if self._made is None:
            self._made = self._make_reducer()
        return self._made

    def register_local(self, variable: Variable) -> None:
        """The gradient of this variable stays on this rank."""
        self.reducer.register_local(variable)
        self.locals += 1

    def reduce(self, grads: Sequence[Gradient], variables: Sequence[Variable]) -> list[Gradient]:
        return list(grads) if self._reduced_before else self.reducer.reduce(grads, variables)

    @contextlib.contextmanager
    def reduced(self, grads: list[Gradient], variables: Sequence[Variable]) -> Iterator[list[Gradient]]:
        """The gradients of all ranks; inside, those that come to the optimizer are taken as such."""
        results = self.reduce(grads, variables)
        self._reduced_before = True
        try:
            yield results
        finally:
            self._reduced_before = False

    @staticmethod
    def make_reducer(
        options: GradientOptions, device_dense: str, device_sparse: str, scale_local: bool
    ) -> GradientReducer:
        from ronde.tensorflow._reducer import TensorFlowReducer

        return TensorFlowReducer(options, device_dense, device_sparse, scale_local)


class _Keras3(Distribution):
    """All of Keras' ways to apply gradients lead through apply(). Clipping, weight decay and averages come after it.

    Passes are accumulated by Keras itself, whose accumulators are a part of the optimizer's state; gradients of all
    ranks are asked for when Keras has summed the last pass and is about to clip.
    """

    _to_clip: Optional[list[Variable]] = None  # the variables whose summed gradients Keras will clip next

    def start(self) -> None:
        passes, own = self.options.passes, self.optimizer.gradient_accumulation_steps
        if own and passes not in (1, own):
            raise ValueError(
                f"backward_passes_per_step is {passes} and the optimizer's gradient_accumulation_steps is {own}: give one"
            )
        if passes != 1 and not own:
            if hasattr(self.optimizer, "optimizers"):
                raise ValueError("backward_passes_per_step: Keras' MultiOptimizer cannot accumulate gradients")
            if self.optimizer.built:
                raise ValueError(
                    "backward_passes_per_step: the optimizer is built already; wrap it before, or a new one"
                )
            self.optimizer.gradient_accumulation_steps = passes
        self._own_apply, self._own_clip = self.optimizer.apply, self.optimizer._clip_gradients
        super().start()
        self._set("apply", self.apply)
        self._set("_clip_gradients", self.clip_gradients)

    def apply(self, grads: Iterable[Gradient], trainable_variables: Optional[Iterable[Variable]] = None) -> None:
        """As the optimizer's own, with the gradients of all ranks."""
        grads = list(grads)
        given = None if trainable_variables is None else list(trainable_variables)
        variables = list(self.optimizer._trainable_variables) if given is None else given
        if not grads or len(grads) != len(variables):
            self._own_apply(grads, given)  # Keras says what is wrong
        elif self.optimizer.gradient_accumulation_steps:
            self._apply_after_passes(grads, given, variables)
        else:
            self._own_apply(self.reduce(grads, variables), given)

    def _apply_after_passes(self, grads: list[Gradient], given: Any, variables: list[Variable]) -> None:
        optimizer = self.optimizer
        self._to_clip = [
            variable
            for grad, variable in zip(grads, variables)
            if grad is not None and not getattr(variable, "overwrite_with_gradient", False)
        ]
        due = _is_traced() or (int(optimizer._iterations) + 1) % optimizer.gradient_accumulation_steps == 0
        try:
            self._own_apply(grads, given)
            if due and self._to_clip is not None:
                raise RuntimeError(
                    "this release of Keras does not clip accumulated gradients: ronde cannot reduce them"
                )
        finally:
            self._to_clip = None

    def clip_gradients(self, grads: list[Gradient]) -> list[Gradient]:
        variables, self._to_clip = self._to_clip, None
        if variables is not None:
            grads = self._reduce_passes(list(grads), variables)
        return self._own_clip(grads)

    def _reduce_passes(self, grads: list[Gradient], variables: list[Variable]) -> list[Gradient]:
        """Keras gives means over passes."""
        import keras

        steps = self.optimizer.gradient_accumulation_steps
        factor = 1 if self.average_passes or self.options.passes == 1 else steps

        def send() -> list[Gradient]:
            results = self.reduce(grads, variables)
            return results if factor == 1 else [keras.ops.multiply(grad, factor) for grad in results]

        if keras.backend.backend() != "jax":
            return send()
        # Keras on JAX clips in every pass and throws the result away, but in the last.
        is_last = (self.optimizer._iterations + 1) % steps == 0
        return keras.ops.cond(is_last, send, lambda: grads)

    @staticmethod
    def make_reducer(
        options: GradientOptions, device_dense: str, device_sparse: str, scale_local: bool
    ) -> GradientReducer:
        backend = _backend()
        if backend == "tensorflow":
            return Distribution.make_reducer(options, device_dense, device_sparse, scale_local)
        if backend == "torch":
            from ronde.keras._torch import TorchReducer

            return TorchReducer(options, scale_local)
        if backend == "jax":
            from ronde.keras._jax import JaxReducer

            return JaxReducer(options, scale_local)
        raise ValueError(f"KERAS_BACKEND={backend} cannot train: use tensorflow, torch or jax")


class _Keras2(Distribution):
    """Keras 2: apply_gradients() is the one way. Clipping comes after it."""

    _sums: Any = None  # over passes

    def start(self) -> None:
        self._own_apply_gradients = self.optimizer.apply_gradients
        super().start()
        self._set("apply_gradients", self.apply_gradients)

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Gradient, Variable]], *args: Any, **kwargs: Any) -> Any:
        """As the optimizer's own, with the gradients of all ranks; with backward_passes_per_step, nothing happens but
        after the last pass."""
        pairs = list(grads_and_vars)
        if not pairs:
            return self._own_apply_gradients(pairs, *args, **kwargs)
        grads, variables = [grad for grad, _ in pairs], [variable for _, variable in pairs]
        if self.options.passes == 1:
            return self._own_apply_gradients(list(zip(self.reduce(grads, variables), variables)), *args, **kwargs)
        import tensorflow as tf

        from ronde.tensorflow._accumulation import Accumulation

        if self._sums is None:
            self._sums = Accumulation(self.options.passes, self.average_passes)
        with tf.init_scope():  # not inside the branch below
            models.build(self.optimizer, variables)
        sums, is_last = self._sums.add(grads, variables, lambda each: self.reduce(each, variables))

        def step() -> Any:
            self._own_apply_gradients(list(zip(sums, variables)), *args, **kwargs)
            return tf.identity(is_last)

        tf.cond(is_last, step, lambda: tf.identity(is_last))
        return self.optimizer.iterations


def _backend() -> str:
    """Of Keras 3."""
    return sys.modules["keras"].backend.backend()


def _is_traced() -> bool:
    backend = _backend()
    return backend == "jax" or (backend == "tensorflow" and not sys.modules["tensorflow"].executing_eagerly())


# ---- Two places where Keras decides before it comes to the optimizer ----


def _patch(optimizer_class: type) -> None:
    """See _patch_loss_scaling and _patch_trainer; each once."""
    name = next(base.__module__.split(".")[0] for base in optimizer_class.__mro__ if _is_of_keras(base))
    keras = sys.modules[name]
    if hasattr(optimizer_class, "apply"):
        _patch_loss_scaling(keras.optimizers.LossScaleOptimizer)
    else:
        for each in keras.mixed_precision.LossScaleOptimizer.__subclasses__():
            _patch_loss_scaling(each)
    _patch_trainer(keras.Model, not hasattr(optimizer_class, "apply") or _backend() == "tensorflow")


@functools.lru_cache(maxsize=None)
def _patch_loss_scaling(loss_scale_optimizer: Any) -> None:
    """Lets a LossScaleOptimizer, also the one that compile() makes, see the gradients of all ranks.

    It skips a step whose gradients are not finite. Ranks that decided that by their own gradients would part ways.
    """
    for name, change in (
        ("apply", _apply),
        ("stateless_apply", _stateless_apply),
        ("apply_gradients", _apply_gradients),
    ):
        if name in vars(loss_scale_optimizer):
            original = getattr(loss_scale_optimizer, name)
            setattr(loss_scale_optimizer, name, functools.wraps(original)(change(original)))


def _apply(original: Any) -> Any:
    def apply(self: Any, grads: Iterable[Gradient], trainable_variables: Any = None) -> Any:
        inner = distribution(self)
        if inner is None:
            return original(self, grads, trainable_variables)
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        with inner.reduced(list(grads), variables) as results:
            return original(self, results, trainable_variables)

    return apply


def _stateless_apply(original: Any) -> Any:
    def stateless_apply(
        self: Any, optimizer_variables: Any, grads: Iterable[Gradient], trainable_variables: Any
    ) -> Any:
        inner = distribution(self)
        if inner is None:
            return original(self, optimizer_variables, grads, trainable_variables)
        with inner.reduced(list(grads), self._trainable_variables) as results:
            return original(self, optimizer_variables, results, trainable_variables)

    return stateless_apply


def _apply_gradients(original: Any) -> Any:
    def apply_gradients(
        self: Any, grads_and_vars: Iterable[tuple[Gradient, Variable]], *args: Any, **kwargs: Any
    ) -> Any:
        inner = distribution(self)
        if inner is None:
            return original(self, grads_and_vars, *args, **kwargs)
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        with inner.reduced([grad for grad, _ in pairs], variables) as results:
            return original(self, list(zip(results, variables)), *args, **kwargs)

    return apply_gradients


@functools.lru_cache(maxsize=None)
def _patch_trainer(model: Any, on_tensorflow: bool) -> None:
    """Models whose optimizer became distributed, or has another local variable, since their train function was made, make a
    new one. On TensorFlow they are compiled without XLA, which cannot contain ronde's operations."""
    original = model.make_train_function

    @functools.wraps(original)
    def make_train_function(self: Any, force: bool = False) -> Any:
        ours = distribution(getattr(self, "optimizer", None))
        if ours is None:
            return original(self, force)
        if on_tensorflow and self.jit_compile and not self.run_eagerly:
            warnings.warn(
                "jit_compile is switched off for this model: XLA cannot contain ronde's operations", stacklevel=3
            )
            self.jit_compile = False
        made_for = (ours, ours.locals)
        outdated = getattr(self, _MADE_FOR, None) != made_for
        object.__setattr__(self, _MADE_FOR, made_for)
        return original(self, force or outdated)

    model.make_train_function = make_train_function
