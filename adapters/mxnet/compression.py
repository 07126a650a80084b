"""Compression of arrays on their way: Compression.none, .fp16, .bf16, and the interface Compressor."""

from ronde.compression import Compressor
from ronde.mxnet.mpi_ops import api

Compression = api.compression

__all__ = ["Compression", "Compressor"]
