"""The callbacks, made for whichever Keras module is in use."""

import warnings
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, Optional, Union

import numpy as np

from ronde import _core, _objects
from ronde._keras import models
from ronde._keras.optimizer import distribution
from ronde.process_sets import ProcessSet, global_process_set

Logs = Optional[dict[str, Any]]
Multiplier = Union[float, Callable[[float], float]]


def make_callbacks(keras: Any) -> SimpleNamespace:
    """The classes of this page's end, as subclasses of `keras.callbacks.Callback`."""
    base = keras.callbacks.Callback

    class BroadcastGlobalVariablesCallback(base):  # type: ignore[misc,valid-type]
        """Gives every rank the root's weights and optimizer state when training begins, so that all start alike; a model
        whose shapes are not known yet, after its first batch.

        At the end of each epoch it compares trainable weights across ranks, which stay equal bit by bit when gradients
        of all ranks are applied. It costs a hash of the weights and one small allreduce.

        Args:
            root_rank: whose values: of the rank that has loaded a checkpoint.
            device: accepted for compatibility.
            local_variables: variables that are neither broadcast nor compared.
            drift: what to do if weights differ: "raise", "warn" or "ignore", which compares nothing.

        Raises:
            ArgumentError: when training begins, if ranks have different models, or, unless `drift` is "ignore", different
                numbers of batches.
            RuntimeError: at an epoch's end, if their weights differ; it names the first variable.
        """

        def __init__(
            self,
            root_rank: int,
            device: str = "",
            local_variables: Iterable[Any] = (),
            drift: str = "raise",
            process_set: ProcessSet = global_process_set,
        ) -> None:
            super().__init__()
            if drift not in ("raise", "warn", "ignore"):
                raise ValueError(f"drift is {drift!r}; it must be 'raise', 'warn' or 'ignore'")
            self.root_rank = root_rank
            self.broadcast_done = False
            self._left_out = list(local_variables or ())
            self._drift = drift
            self._process_set = process_set

        def on_train_begin(self, logs: Logs = None) -> None:
            self.broadcast_done = not self._process_set.included()
            if self.broadcast_done:
                return
            own = (bool(self.model.built and self.model.weights), self.params.get("steps"))
            everywhere = _objects.allgather_object(own, "keras.start", self._process_set)
            if self._drift != "ignore":
                self._check_steps([steps for _, steps in everywhere])
            if all(built for built, _ in everywhere):
                models.build(self.model.optimizer, self.model.trainable_variables)
                self._broadcast()

        def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
            if not self.broadcast_done:
                self._broadcast()

        def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
            if self._drift == "ignore" or not self._process_set.included() or self._process_set.size() == 1:
                return
            models.settle(self.model)
            ours = distribution(self.model.optimizer)
            local = [each for each in self.model.trainable_variables if ours and ours.reducer.is_local(each)]
            variables = models.without(self.model.trainable_variables, [*local, *self._left_out])
            differs = models.first_difference(variables, "keras.weights", self._process_set)
            if differs is None:
                return
            advice = (
                "something but the optimizer changes weights on some ranks only"
                if ours
                else "the model's optimizer is not distributed: wrap it with DistributedOptimizer()"
            )
            text = (
                f"after epoch {epoch + 1} ranks have different weights, first in '{models.name_of(differs)}': {advice}"
            )
            if self._drift == "raise":
                raise RuntimeError(text)
            warnings.warn(text, stacklevel=2)

        def _check_steps(self, steps: list[Optional[int]]) -> None:
            """Ranks with more batches than others would wait for them until the stall limit."""
            if None not in steps and len(set(steps)) > 1:
                numbers = ", ".join(
                    f"{each} on rank {rank}" for rank, each in zip(self._process_set.ranks or (), steps)
                )
                raise _core.ArgumentError(
                    f"ranks have different numbers of batches per epoch: {numbers}. Cut the data, or set steps_per_epoch"
                )

        def _broadcast(self) -> None:
            models.settle(self.model)
            variables = [*self.model.weights, *models.optimizer_variables(self.model.optimizer)]
            variables = models.without(variables, self._left_out)
            models.broadcast(variables, self.root_rank, "keras.broadcast", self._process_set)
            self.broadcast_done = True

    class MetricAverageCallback(base):  # type: ignore[misc,valid-type]
        """Replaces each metric of an epoch by its mean over the ranks that have it; all ranks get all metrics.

        Callbacks that come after it in the list see the means, and so does History. Put it before those that decide by
        metrics (EarlyStopping, ReduceLROnPlateau, checkpoints): then all ranks decide alike.

        Args:
            device: accepted for compatibility.
        """

        def __init__(self, device: str = "", process_set: ProcessSet = global_process_set) -> None:
            super().__init__()
            self._process_set = process_set

        def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
            if logs is None or not self._process_set.included():
                return
            own = {name: float(models.value(metric)) for name, metric in logs.items() if _is_number(metric)}
            everywhere = _objects.allgather_object(own, "keras.metrics", self._process_set)
            for name in dict.fromkeys(name for each in everywhere for name in each):
                found = [each[name] for each in everywhere if name in each]
                logs[name] = sum(found) / len(found)

    class LearningRateScheduleCallback(base):  # type: ignore[misc,valid-type]
        """Sets the learning rate to initial_lr x multiplier in the epochs [start_epoch, end_epoch).

        Args:
            initial_lr: the learning rate that multiplier 1 stands for.
            multiplier: a number, or a function of the epoch (a fraction of epochs included if not `staircase`).
            start_epoch, end_epoch: epochs where it applies; end_epoch None: to the end.
            staircase: changes once per epoch, not with each batch. A number as multiplier is always that.
            momentum_correction: scales the optimizer's velocities by new / old learning rate, as if it had always been
                the new one (Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 2.1). For optimizers with a
                `momentum`, whose velocities contain the learning rate.
            steps_per_epoch: batches in an epoch, where Keras cannot tell and `staircase` is False.
        """

        def __init__(
            self,
            initial_lr: float,
            multiplier: Multiplier,
            start_epoch: int = 0,
            end_epoch: Optional[int] = None,
            staircase: bool = True,
            momentum_correction: bool = True,
            steps_per_epoch: Optional[int] = None,
        ) -> None:
            super().__init__()
            if initial_lr is None or not initial_lr > 0:
                raise ValueError(f"initial_lr is {initial_lr}; it must be above 0")
            self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
            self.staircase = staircase or not callable(multiplier)
            self.momentum_correction, self.steps_per_epoch = momentum_correction, steps_per_epoch
            self._knows_steps = bool(steps_per_epoch)
            self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier
            self._epoch = 0

        def on_train_begin(self, logs: Logs = None) -> None:
            schedules = getattr(getattr(keras.optimizers, "schedules", None), "LearningRateSchedule", ())
            if isinstance(getattr(self.model.optimizer, "_learning_rate", None), schedules):
                raise ValueError(
                    "the optimizer's learning rate is a LearningRateSchedule, which a callback cannot change: make the "
                    "optimizer with a number, or scale the schedule itself by the number of ranks"
                )
            if not self.staircase and not self._knows_steps:
                self.steps_per_epoch = self.params.get("steps")
                if not self.steps_per_epoch:
                    raise ValueError(
                        f"Keras cannot tell the batches of an epoch: give {type(self).__name__} steps_per_epoch"
                    )

        def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
            self._epoch = epoch

        def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
            if self._epoch < self.start_epoch or (self.end_epoch is not None and self._epoch >= self.end_epoch):
                return
            if self.staircase and batch == 0:
                self._set(self._epoch)
            elif not self.staircase:
                assert self.steps_per_epoch is not None
                self._set(self._epoch + batch / self.steps_per_epoch)

        def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
            if logs is not None:
                logs["lr"] = self._learning_rate()

        def _learning_rate(self) -> float:
            models.settle(self.model)
            return float(models.value(self.model.optimizer.learning_rate))

        def _set(self, epoch: float) -> None:
            old, new = self._learning_rate(), self.initial_lr * float(self.multiplier(epoch))
            if np.float32(old) == np.float32(new):
                return
            optimizer = self.model.optimizer
            optimizer.learning_rate = new
            if self.momentum_correction and old > 0:
                for velocity in _velocities(optimizer):
                    velocity.assign(models.value(velocity) * (new / old))

    class LearningRateWarmupCallback(LearningRateScheduleCallback):
        """Raises the learning rate from initial_lr / size to initial_lr over the first epochs, batch by batch.

        See Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 2.2.

        Args:
            initial_lr: the learning rate after warm-up: that of one rank times the number of ranks.
            warmup_epochs: how many epochs it takes.
            momentum_correction, steps_per_epoch: see LearningRateScheduleCallback.
            verbose: 1 prints when warm-up has ended.
        """

        def __init__(
            self,
            initial_lr: float,
            warmup_epochs: int = 5,
            momentum_correction: bool = True,
            steps_per_epoch: Optional[int] = None,
            verbose: int = 0,
        ) -> None:
            if warmup_epochs < 1:
                raise ValueError(f"warmup_epochs is {warmup_epochs}; it must be at least 1")

            def multiplier(epoch: float) -> float:
                size = _core.topology()["size"]
                done = min(1.0, (epoch + 1 / (self.steps_per_epoch or 1)) / warmup_epochs)  # 1 in the last batch
                return (1 + done * (size - 1)) / size

            super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
            self.warmup_epochs, self.verbose = warmup_epochs, verbose

        def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
            has_ended = epoch == self.warmup_epochs - 1
            if has_ended:  # with steps_per_execution nobody has been asked before the last batch
                self._set(self.warmup_epochs)
            super().on_epoch_end(epoch, logs)
            if has_ended and self.verbose:
                print(f"Epoch {epoch + 1}: warm-up has ended with learning rate {self._learning_rate():g}.")

    class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc,name-defined]
        """ModelCheckpoint with save_best_only, which writes on rank 0 alone.

        `monitor` should be a mean over ranks: put MetricAverageCallback before it.

        Args:
            filepath: where to; may also be set later, as the attribute.
            Others as ModelCheckpoint's.
        """

        def __init__(
            self,
            monitor: str = "val_loss",
            verbose: int = 0,
            mode: str = "auto",
            save_freq: Any = "epoch",
            save_weights_only: bool = False,
            filepath: str = "",
        ) -> None:
            suffix = ".weights.h5" if save_weights_only else ".keras"  # Keras wants one before it knows the path
            super().__init__(
                filepath or f"best{suffix}", monitor=monitor, verbose=verbose, save_best_only=True, mode=mode,
                save_freq=save_freq, save_weights_only=save_weights_only,
            )  # fmt: skip
            self.filepath = filepath

        def on_train_begin(self, logs: Logs = None) -> None:
            if not self.filepath:
                raise ValueError("BestModelCheckpoint does not know where to write: give it a filepath")
            super().on_train_begin(logs)

        def _save_model(self, *args: Any, **kwargs: Any) -> None:
            if _core.topology()["rank"] == 0:
                super()._save_model(*args, **kwargs)

    made = [
        BroadcastGlobalVariablesCallback,
        MetricAverageCallback,
        LearningRateScheduleCallback,
        LearningRateWarmupCallback,
        BestModelCheckpoint,
    ]
    for each in made:
        each.__qualname__ = each.__name__
    return SimpleNamespace(**{each.__name__: each for each in made})


def _is_number(metric: Any) -> bool:
    try:
        float(models.value(metric))
    except (TypeError, ValueError):
        return False
    return True


def _velocities(optimizer: Any) -> list[Any]:
    """The variables of an optimizer with momentum whose velocities contain the learning rate: not those of Muon, say."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    contains_rate = any(base.__name__ in ("SGD", "RMSprop") for base in type(optimizer).__mro__)
    if not contains_rate or not getattr(optimizer, "momentum", 0):
        return []
    if hasattr(optimizer, "get_slot_names"):  # Keras 2, legacy
        return [each for each in models.optimizer_variables(optimizer) if "momentum" in each.name]
    return [
        each
        for name in ("momentums", "_momentums")
        for each in (getattr(optimizer, name, None) or ())
        if each is not None
    ]
