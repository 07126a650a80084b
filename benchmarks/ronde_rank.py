"""A rank that runs ronde, torch.distributed's gloo and NumPy in one process: started by allreduce.py under ronderun.

What a case of each kind calls:

- tensor: one in-place allreduce of `bytes` of float32. `shared` is ronde with a tensor from `hvd.empty_shared`; `numpy`
  is the sum of as many arrays as there are ranks, in one process, without any communication.
- dtypes: ronde with `elements` of float32, float16 and bfloat16.
- gradients: ResNet-50's gradients. `ronde` submits them one by one in backward order and then waits for all; `one` is one
  tensor of as many floats; `gloo` sums the buckets that torch's DDP would make of them, all in flight, without DDP's
  copies into and out of the buckets.
- many: `tensors` of `bytes` each. `ronde` submits all and then waits; `gloo` calls one by one, `together` all in flight.

Of these, a case may name `only` some.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import resnet50
import torch
import torch.distributed as gloo
import turns
from checks import EXACT, EXACT_16_BIT, check_sum, values

import ronde.torch as hvd

Call = Callable[[], Any]
GLOO_TIMEOUT = 120.0  # seconds
_calls: dict[str, Call] = {}
_missing: dict[str, str] = {}


def start() -> None:
    """ronde and, among the same ranks, gloo."""
    torch.set_num_threads(1)
    hvd.init()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = gloo.FileStore(os.environ[turns.SOCKET] + ".gloo", hvd.size())  # type: ignore[operator]
    gloo.init_process_group(
        "gloo", store=store, rank=hvd.rank(), world_size=hvd.size(), timeout=timedelta(seconds=GLOO_TIMEOUT)
    )


def stop() -> None:
    gloo.destroy_process_group()
    hvd.shutdown()


def wanted(case: dict[str, Any], peer: str) -> bool:
    return peer in case.get("only", [peer])


def checked(who: str, tensors: list[torch.Tensor], call: Call, period: int = EXACT) -> None:
    """Runs the call once on values that are checked, leaves zeros, and keeps the call for the next blocks."""
    for tensor in tensors:
        tensor.copy_(torch.from_numpy(values(tensor.numel(), hvd.rank(), period)).reshape(tensor.shape))
    call()
    for tensor in tensors:
        check_sum(tensor.float().numpy(), hvd.size(), who, period)
        tensor.zero_()  # stays finite however often it is summed
    _calls[who] = call


def in_flight(tensors: list[torch.Tensor], prefix: str) -> Call:
    names = [f"{prefix}.{number}" for number in range(len(tensors))]

    def call() -> None:
        handles = [hvd.allreduce_async_(t, op=hvd.Sum, name=n) for t, n in zip(tensors, names)]
        for handle in handles:
            hvd.synchronize(handle)

    return call


def gloo_in_flight(tensors: list[torch.Tensor]) -> Call:
    def call() -> None:
        for pending in [gloo.all_reduce(tensor, async_op=True) for tensor in tensors]:
            pending.wait()

    return call


def prepare_tensor(case: dict[str, Any]) -> None:
    count = case["bytes"] // 4
    tensor = torch.empty(count)
    name = f"tensor.{count}"
    checked("ronde", [tensor], lambda: hvd.allreduce_(tensor, op=hvd.Sum, name=name))
    checked("gloo", [tensor], lambda: gloo.all_reduce(tensor))
    if hasattr(hvd, "empty_shared"):
        shared = hvd.empty_shared((count,), dtype=torch.float32)
        checked("shared", [shared], lambda: hvd.allreduce_(shared, op=hvd.Sum, name=f"{name}.shared"))
    else:
        _missing["shared"] = "ronde.torch has no empty_shared"
    if hvd.rank() == 0:
        arrays = [np.full(count, 0, np.float32) for _ in range(hvd.size())]  # np.zeros would be one page for all

        def numpy_sum() -> None:
            for other in arrays[1:]:
                np.add(arrays[0], other, out=arrays[0])

        _calls["numpy"] = numpy_sum


def prepare_dtypes(case: dict[str, Any]) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        name = str(dtype).rpartition(".")[2]
        tensor = torch.empty(case["elements"], dtype=dtype)

        def call(tensor: torch.Tensor = tensor, name: str = f"dtypes.{name}") -> None:
            hvd.allreduce_(tensor, op=hvd.Sum, name=name)

        checked(name, [tensor], call, EXACT if dtype == torch.float32 else EXACT_16_BIT)


def prepare_gradients(case: dict[str, Any]) -> None:
    shapes = resnet50.backward_shapes()
    gradients = [torch.empty(shape) for shape in shapes]
    checked("ronde", gradients, in_flight(gradients, "gradient"))
    if wanted(case, "one"):
        whole = torch.empty(sum(tensor.numel() for tensor in gradients))
        checked("one", [whole], lambda: hvd.allreduce_(whole, op=hvd.Sum, name="one"))
    if wanted(case, "gloo"):
        buckets = [torch.empty(count) for count in resnet50.buckets(shapes)]
        checked("gloo", buckets, gloo_in_flight(buckets))


def prepare_many(case: dict[str, Any]) -> None:
    tensors = [torch.empty(case["bytes"] // 4) for _ in range(case["tensors"])]
    checked("ronde", tensors, in_flight(tensors, "many"))
    if wanted(case, "together"):
        checked("together", tensors, gloo_in_flight(tensors))

    def one_by_one() -> None:
        for tensor in tensors:
            gloo.all_reduce(tensor)

    if wanted(case, "gloo"):
        checked("gloo", tensors, one_by_one)


_KINDS = {
    "tensor": prepare_tensor,
    "dtypes": prepare_dtypes,
    "gradients": prepare_gradients,
    "many": prepare_many,
}


def prepare(case: dict[str, Any]) -> dict[str, Any]:
    _calls.clear()
    _missing.clear()
    _KINDS[case["kind"]](case)
    return {"peers": list(_calls), "missing": dict(_missing)}


def block(peer: str, calls: int) -> list[float]:
    if peer == "numpy":  # rank 0 alone; the others wait where they do not disturb
        return turns.time_block(_calls[peer], lambda: None, calls) if hvd.rank() == 0 else []
    return turns.time_block(_calls[peer], gloo.barrier, calls)


if __name__ == "__main__":
    start()
    turns.serve(hvd.rank(), {"prepare": prepare, "block": block})
    stop()
