"""The public functions, made for whichever Keras module is in use."""

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, Optional

from ronde import _numpy
from ronde._frontend import Values
from ronde._gradient_options import GradientOptions, chosen_groups
from ronde._gradient_reducer import local_variables
from ronde._keras import models
from ronde._keras.callbacks import make_callbacks
from ronde._keras.optimizer import distribute, is_keras_optimizer
from ronde.basics import Average
from ronde.compression import Compression, Compressor
from ronde.process_sets import ProcessSet, global_process_set

Array = Any
Tensor = Any


class KerasValues(Values[Tensor]):
    """Tensors of Keras 3's backends, also while a function is traced."""

    def __init__(self, keras: Any) -> None:
        self._keras = keras

    def convert(self, value: Any) -> Tensor:
        return self._keras.ops.convert_to_tensor(value)

    def integers(self, values: Sequence[int]) -> Tensor:
        return self._keras.ops.convert_to_tensor(values, "int64")

    def zeros_like(self, tensor: Tensor) -> Tensor:
        return self._keras.ops.zeros_like(tensor)

    def dtype_name(self, tensor: Tensor) -> str:
        return str(self._keras.backend.standardize_dtype(tensor.dtype))

    def cast(self, tensor: Tensor, dtype_name: str) -> Tensor:
        return self._keras.ops.cast(tensor, dtype_name)


def make_frontend(keras: Any) -> SimpleNamespace:
    """What is said once for ronde.keras and ronde.tensorflow.keras."""
    compressions: Compression[Any]
    if not hasattr(keras, "ops") or keras.backend.backend() == "tensorflow":
        from ronde.tensorflow.compression import Compression as compressions  # IndexedSlices too
    else:
        compressions = Compression(KerasValues(keras))

    def DistributedOptimizer(  # noqa: N802
        optimizer: Any,
        name: Optional[str] = None,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Optional[Compressor[Any]] = None,
        sparse_as_dense: bool = False,
        gradient_predivide_factor: float = 1.0,
        op: int = Average,
        backward_passes_per_step: int = 1,
        average_aggregated_gradients: bool = False,
        num_groups: int = 0,
        groups: Any = None,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
    ) -> Any:
        """Makes an optimizer step with the gradients of all ranks: in model.fit, and wherever it is used.

        They are those before clipping. The optimizer keeps its class, name and state to whoever asks, so a model that is
        saved with it loads in Keras without ronde. Inside of a LossScaleOptimizer, also the one that mixed_float16 makes,
        all ranks skip a step when the gradients of one are not finite.

        Args:
            optimizer: of Keras; it is changed and returned.
            name: accepted for compatibility; the optimizer keeps its own.
            device_dense, device_sparse: of TensorFlow, where to place the operations around the collectives.
            compression: how gradients travel: Compression.none, .fp16 or .bf16.
            sparse_as_dense: sends IndexedSlices as dense tensors.
            gradient_predivide_factor: divides gradients before they are summed; the rest of the average comes after.
            op: Average, Sum, Min, Max or Product.
            backward_passes_per_step: batches whose gradients are summed here before they are sent; the others change
                nothing. Keras 3 does it: it is the optimizer's gradient_accumulation_steps, and only its last pass sends.
            average_aggregated_gradients: divides the sums of several passes by their number.
            num_groups: deprecated, see groups.
            groups: gradients are sent together: into how many groups to cut them, or lists of variables. With JAX all go
                together.
            process_set: the ranks that train together. On others the optimizer works as if it were not distributed.
            scale_local_gradients: divides the gradients of local variables by the number of ranks.

        Raises:
            TypeError: it is no optimizer of Keras.
            ValueError: wrong factors or groups; called before init(); distributed already.
        """
        if not is_keras_optimizer(optimizer):
            kind = type(optimizer)
            raise TypeError(
                f"DistributedOptimizer needs an optimizer of Keras, not a {kind.__module__}.{kind.__name__}"
            )
        if hasattr(keras, "ops") and not hasattr(optimizer, "apply") and not hasattr(optimizer, "inner_optimizer"):
            raise TypeError(
                "this optimizer is one of Keras 2: import ronde.tensorflow.keras, with TF_USE_LEGACY_KERAS=1"
            )
        options = GradientOptions(
            compression=compression or compressions.none,
            op=op,
            predivide=gradient_predivide_factor,
            groups=chosen_groups(groups, num_groups),
            sparse_as_dense=sparse_as_dense,
            process_set=process_set,
            passes=backward_passes_per_step,
        )
        average = average_aggregated_gradients
        return distribute(optimizer, options, average, scale_local_gradients, device_dense, device_sparse)

    def PartialDistributedOptimizer(  # noqa: N802
        optimizer: Any, *args: Any, local_layers: Any = None, **kwargs: Any
    ) -> Any:
        """DistributedOptimizer that leaves the gradients of some layers on their rank.

        Args:
            local_layers: a layer, or several, that are built; their trainable weights are local.
            Others as DistributedOptimizer's.
        """
        optimizer = DistributedOptimizer(optimizer, *args, **kwargs)
        for variable in local_variables(local_layers):
            optimizer.register_local_var(variable)
        return optimizer

    def load_model(
        filepath: Any,
        custom_optimizers: Optional[Iterable[type]] = None,
        custom_objects: Optional[dict[str, Any]] = None,
        compression: Optional[Compressor[Any]] = None,
        compile: bool = True,
        **options: Any,
    ) -> Any:
        """Loads a model, whose optimizer comes back distributed and with its state.

        Args:
            filepath: of a file that model.save() wrote, with ronde or without.
            custom_optimizers: classes of optimizers that are not Keras's own.
            custom_objects: classes and functions of the file by name.
            compile: False leaves the model without an optimizer.
            compression, options: as DistributedOptimizer's. The file has none of them; give those of before again.
        """
        objects = {each.__name__: each for each in custom_optimizers or ()}
        objects.update(custom_objects or {})
        model = keras.models.load_model(filepath, custom_objects=objects or None, compile=compile)
        if getattr(model, "optimizer", None) is not None:
            model.optimizer = DistributedOptimizer(model.optimizer, compression=compression, **options)
        return model

    def broadcast_global_variables(
        root_rank: int, model: Any = None, process_set: ProcessSet = global_process_set
    ) -> None:
        """Gives every rank the root's weights and optimizer state of a model that is built; the optimizer need not be.

        Raises:
            ValueError: without a model: Keras 3 has no list of all variables.
        """
        if model is None:
            raise ValueError("broadcast_global_variables() needs the model: broadcast_global_variables(0, model)")
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None:
            models.build(optimizer, model.trainable_variables)
        variables = [*model.weights, *(models.optimizer_variables(optimizer) if optimizer is not None else ())]
        models.broadcast(variables, root_rank, "keras.broadcast_global_variables", process_set)

    def allreduce(
        value: Any,
        name: Optional[str] = None,
        average: Optional[bool] = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        op: Optional[int] = None,
        compression: Optional[Compressor[Any]] = None,
        process_set: ProcessSet = global_process_set,
    ) -> Array:
        """ronde.allreduce of a tensor of Keras, an array or a number, as a NumPy array."""
        compression = compression or compressions.none
        sent, ctx = compression.compress(_tensor(_array(value)))
        result = _numpy.allreduce(_array(sent), average, name, None, op, prescale_factor, postscale_factor, process_set)
        return _array(compression.decompress(_tensor(result), ctx))

    def allgather(value: Any, name: Optional[str] = None, process_set: ProcessSet = global_process_set) -> Array:
        """ronde.allgather of a tensor of Keras or an array, as a NumPy array."""
        return _numpy.allgather(_array(value), name, process_set)

    def broadcast(
        value: Any, root_rank: int, name: Optional[str] = None, process_set: ProcessSet = global_process_set
    ) -> Array:
        """ronde.broadcast of a tensor of Keras, an array or a number, as a NumPy array."""
        return _numpy.broadcast(_array(value), root_rank, name, process_set)

    def reducescatter(
        value: Any, name: Optional[str] = None, op: int = Average, process_set: ProcessSet = global_process_set
    ) -> Array:
        """ronde.reducescatter of a tensor of Keras or an array, as a NumPy array."""
        return _numpy.reducescatter(_array(value), name=name, op=op, process_set=process_set)

    def _tensor(array: Array) -> Tensor:
        return keras.ops.convert_to_tensor(array) if hasattr(keras, "ops") else keras.backend.constant(array)

    def _array(value: Any) -> Array:
        if hasattr(keras, "ops"):
            return keras.ops.convert_to_numpy(value)
        return models.value(value)

    made = [
        DistributedOptimizer,
        PartialDistributedOptimizer,
        load_model,
        broadcast_global_variables,
        allreduce,
        allgather,
        broadcast,
        reducescatter,
    ]
    for each in made:
        each.__qualname__ = each.__name__
    functions = {each.__name__: each for each in made}
    return SimpleNamespace(Compression=compressions, callbacks=make_callbacks(keras), **functions)
