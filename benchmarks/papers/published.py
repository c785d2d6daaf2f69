"""Graphs, machines and results as papers print them, beside which ``comparisons.py`` puts the cost models.

S is SuperGCN (ICS 2025), SP its preprint, P Plexus, U ScaleGNN. What no paper prints is said to be assumed.
"""

from __future__ import annotations

from dataclasses import replace

from pyg_dist.plan.simulate import GROWTH, GraphStatistics
from pyg_dist.pricing.machine import Machine

TABLE_5_RANKS = 2048
TABLE_5_WIDTH = 768
"""S, Table 5 is of mag240M's input: its volumes are whole rows of 768 columns, and 4.000 bytes of parameters a row."""
TABLE_5 = {  # S, Table 5: one layer of mag240M on 2,048 ranks of Fugaku: GB, all ranks together, and milliseconds
    "pre": (1934.8559, 1094.35),
    "post": (1934.8559, 1131.62),
    "hybrid": (1269.5784, 730.792),
    "int2 data": (80.4770, 47.0393),
    "int2 parameters": (1.6530, 4.82566),
}
_MAG_ROWS = TABLE_5["post"][0] * 1e9 / (4 * TABLE_5_WIDTH)
_MAG = GraphStatistics(
    121_751_666, 2_593_241_212, 768, 153, TABLE_5_RANKS, _MAG_ROWS, GROWTH, "S, Tables 2 and 5; growth fitted"
)
_PRODUCTS_HALO = {32: 18e6 - 14_249_639, 256: 22e6 - 14_249_639}  # P, 7.1: owned and halo nodes, less the owned ones
GRAPHS = {
    "papers100M": GraphStatistics(
        111_059_956, 1_615_685_872, 128, 172, TABLE_5_RANKS, _MAG_ROWS * 1_615_685_872 / _MAG.num_edges, GROWTH,
        "S, Table 2; as many rows by edge as mag240M, the same archive's citations (assumed); growth fitted",
    ),
    "mag240M": _MAG,
    "products-14M": GraphStatistics(
        14_249_639, 245_036_907 - 14_249_639, 128, 32, 32, _PRODUCTS_HALO[32], 0.349, "P, Table 4 and 7.1"
    ),
}  # fmt: skip


def undirected(graph: GraphStatistics) -> GraphStatistics:
    """With every edge in both directions, and as many times more rows to send."""
    return replace(graph, num_edges=2 * graph.num_edges, halo_rows=2 * graph.halo_rows)


def fugaku() -> Machine:
    """A quarter of an A64FX per rank, four ranks on a node.

    Bandwidth and latency are the line through the two rows of S, Table 5 that differ in nothing but bytes, the data and
    the parameters of int2. The time is the busiest rank's and the bytes are the mean rank's: imbalance is in it.
    Products: half of the data sheet's 256 GB/s and 1.7 Tflop/s (float32) of a core group, assumed.
    """
    data, parameters = TABLE_5["int2 data"], TABLE_5["int2 parameters"]
    bandwidth = (data[0] - parameters[0]) * 1e9 / TABLE_5_RANKS / ((data[1] - parameters[1]) * 1e-3)
    start = parameters[1] * 1e-3 - parameters[0] * 1e9 / TABLE_5_RANKS / bandwidth
    latency = start / (TABLE_5_RANKS - 1)
    return _half_of("Fugaku: messages by S, Table 5; products assumed", 256e9, 1.7e12, replace(
        Machine(), call_seconds=0.0, intra_latency=latency, inter_latency=latency, intra_bandwidth=bandwidth,
        inter_bandwidth=4 * bandwidth, ranks_per_node=4, cores=4,
    ))  # fmt: skip


def perlmutter() -> Machine:
    """An A100 per rank, four on a node with four network cards of 25 GB/s and 19.5 Tflop/s (P, 6.1).

    Half of each, and of the data sheet's 1,555 GB/s of memory and 300 GB/s of NVLink; latencies assumed.
    """
    return _half_of("Perlmutter: P, 6.1 and data sheets at half, assumed", 1555e9, 19.5e12, replace(
        Machine(), call_seconds=2e-5, intra_latency=2e-6, inter_latency=4e-6, intra_bandwidth=150e9,
        inter_bandwidth=50e9, ranks_per_node=4, cores=4,
    ))  # fmt: skip


def _half_of(source: str, memory: float, flops: float, network: Machine) -> Machine:
    """Products that reach half of a memory's bandwidth (4 bytes by entry and column) and half of the peak."""
    rate = memory / 2
    return replace(network, source=source, spmm=(4 / rate, 12 / rate, 8 / rate), gemm_rate=flops / 2, stream_rate=rate)


MACHINES = {"fugaku": fugaku, "perlmutter": perlmutter}
