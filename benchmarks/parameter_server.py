"""What summing without a server saves: the same job through ronde's allreduce and through a parameter server.

The job: every rank has a gradient of 25 MiB of float32 and wants the sum. With a server all ranks send theirs to rank 0,
which adds them up as they come and sends the sum back to each: 2 (n-1) x 25 MiB go through one rank, which grows with the
ranks. Of a ring, 2 (n-1)/n x 25 MiB go through each (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations", 2009).

Both schemes over both ways to move bytes, by turns: `ronde` and `ronde server` (a broadcast from each rank in a process set
of it and rank 0, the sum, a broadcast to all) over shared memory; `gloo` (its ring) and `gloo server` (receives, sums and sends) over
torch.distributed's sockets. Milliseconds; the mean of the ranks, the median of calls, the median of blocks. Where ranks
outnumber cores all of them slow down; the ratio of the schemes is what counts.

    python benchmarks/parameter_server.py [-np 2 4 8] [--short] [--json [FILE]] [--plot FILE.png] [--check] [--quick]
"""

import argparse
from typing import Any

import peers
import report
import turns

MI = 1 << 20
BYTES = 25 * MI
KINDS = ["ronde", "ronde server", "gloo", "gloo server"]


def rank_main() -> None:
    import ronde_rank
    import torch

    import ronde.torch as hvd

    gloo = ronde_rank.gloo
    ronde_rank.start()
    rank, size = hvd.rank(), hvd.size()
    pairs = {other: hvd.add_process_set([0, other]) if size > 2 else hvd.global_process_set for other in range(1, size)}

    def prepare(case: dict[str, Any]) -> dict[str, Any]:
        tensor = torch.empty(case["bytes"] // 4)
        arrived = [torch.empty_like(tensor) for _ in range(size - 1)] if rank == 0 else []

        def send_to_server(other: int, what: torch.Tensor) -> Any:
            return hvd.broadcast_async_(what, other, name=f"from {other}", process_set=pairs[other])

        def ronde_server() -> None:
            if rank == 0:
                receiving = [send_to_server(other + 1, piece) for other, piece in enumerate(arrived)]
                for handle, piece in zip(receiving, arrived):
                    hvd.synchronize(handle)
                    tensor.add_(piece)
            else:
                hvd.synchronize(send_to_server(rank, tensor))
            hvd.broadcast_(tensor, 0, name="from the server")

        def gloo_server() -> None:
            if rank == 0:
                receiving = [gloo.irecv(piece, src=other + 1) for other, piece in enumerate(arrived)]
                for pending, piece in zip(receiving, arrived):
                    pending.wait()  # type: ignore[union-attr]
                    tensor.add_(piece)
                for sending in [gloo.isend(tensor, dst=other) for other in range(1, size)]:
                    sending.wait()  # type: ignore[union-attr]
            else:
                gloo.send(tensor, dst=0)
                gloo.recv(tensor, src=0)

        ronde_rank.checked("ronde", [tensor], lambda: hvd.allreduce_(tensor, op=hvd.Sum, name="allreduce"))
        ronde_rank.checked("ronde server", [tensor], ronde_server)
        ronde_rank.checked("gloo", [tensor], lambda: gloo.all_reduce(tensor))
        ronde_rank.checked("gloo server", [tensor], gloo_server)
        return {"peers": KINDS, "missing": {}}

    turns.serve(rank, {"prepare": prepare, "block": ronde_rank.block})
    ronde_rank.stop()


def label(np: Any, kind: str) -> str:
    return f"{kind} {np}"


def measure(nps: list[int], bytes_: int, seconds: float, rounds: int) -> dict[str, Any]:
    with turns.Run(seconds, rounds) as run:
        for np in nps:
            run.add(str(np), lambda np=np: peers.start_ronde(str(np), "parameter_server.py", np, run.folder))  # type: ignore[misc]
        results = run.case({"name": "sum", "kind": "sum", "bytes": bytes_}, label)
    return {"results": results, "missing": run.missing, "awake": run.awake}


def server_ratio(result: dict[str, Any], np: int, library: str) -> float:
    """How many times as long the server's scheme takes."""
    one, other = (result["results"][label(np, kind)]["rounds"] for kind in (f"{library} server", library))
    return turns.ratio(one, other)


def print_result(result: dict[str, Any]) -> None:
    heads = [f"{report.size_name(result['bytes'])} a rank", "server MiB", "ring MiB"]
    for library in ("ronde", "gloo"):
        heads += [f"{library} ms", "server ms", "ratio"]
    rows = []
    for np in result["np"]:
        mebibytes = result["bytes"] / MI
        row: list[Any] = [f"{np} ranks", 2 * (np - 1) * mebibytes, 2 * (np - 1) / np * mebibytes]
        for library in ("ronde", "gloo"):
            numbers = [result["results"].get(label(np, kind)) for kind in (library, f"{library} server")]
            row += [n["seconds"] * 1e3 if n else None for n in numbers]
            row.append(server_ratio(result, np, library) if all(numbers) else None)
        rows.append(row)
    report.print_table(heads, rows)
    print("server MiB, ring MiB: what goes through the busiest rank")
    report.print_missing(result)


def draw(figure: Any, result: dict[str, Any]) -> None:
    axis = figure.subplots()
    for kind, style in zip(KINDS, ("C0o-", "C0o:", "C1o-", "C1o:")):
        points = [
            (np, result["results"][label(np, kind)]["seconds"] * 1e3)
            for np in result["np"]
            if label(np, kind) in result["results"]
        ]
        if points:
            axis.semilogy(*zip(*points), style, label=kind)
    axis.set_xticks(result["np"])
    axis.set_xlabel("ranks")
    axis.set_ylabel("ms")
    axis.set_title(f"the sum of {report.size_name(result['bytes'])} a rank: allreduce and parameter server")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-np", type=int, nargs="+", help="ranks [2 4 8]")
    parser.add_argument("--seconds", type=float, default=3.0, help="measuring time of each number of each kind [3]")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each [6]")
    parser.add_argument("--short", action="store_true", help="2 and 4 ranks, a third of the time")
    report.add_options(parser)
    arguments = parser.parse_args()
    nps, bytes_ = arguments.np or ([2, 4] if arguments.short else [2, 4, 8]), BYTES
    if arguments.short:
        arguments.seconds = 1.0
    if arguments.quick:
        nps, bytes_, arguments.seconds, arguments.rounds = arguments.np or [3], 64 << 10, 0.01, 2
    watch = report.Watch()
    results = measure(nps, bytes_, arguments.seconds, arguments.rounds)
    result = report.document("parameter_server", arguments, watch.end(), [], np=nps, bytes=bytes_, **results)
    report.finish(arguments, result, print_result, draw)


if __name__ == "__main__":
    rank_main() if turns.is_rank() else main()
