"""The cost of a collective: estimated, never run.

To measure one would take all ranks at the same time, and a rank that measures more calls than
another would wait for ever. So the time is that of a ring (Thakur, Rabenseifner and Gropp, 2005):

    time = latency + bytes sent by a rank / bandwidth

| collective | bytes sent by a rank, of n, for a value of V bytes |
|---|---|
| all-reduce | 2 V (n - 1) / n |
| all-gather into V, reduce-scatter of V, all-to-all of V | V (n - 1) / n |
| broadcast | V |

Latency and bandwidth are of the kind of device, not measured. They decide how soon a planner would
rather recompute something else, and nothing about what is right.

The workspace on a CPU is an upper limit: gloo copies what it gathers or scatters. On a GPU NCCL's
buffers are its own, made once.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import fx

from rockmate.costs.cost import Cost

# Collectives that send a value twice: once to reduce it, once to spread the result.
_TWICE = "all_reduce"


class _Link(NamedTuple):
    latency_ms: float
    gb_per_s: float


_LINKS = {"cpu": _Link(0.5, 1.0), "cuda": _Link(0.03, 100.0)}


def collective_cost(node: fx.Node) -> Cost:
    """The cost of one call of `rockmate.ops.collectives.collective`.

    Args:
        node: with the fake values of its argument and of its result.
    """
    op, given = node.args[:2]
    assert isinstance(given, fx.Node)
    before, after = given.meta["val"].nbytes, node.meta["val"].nbytes
    value_bytes, name = max(before, after), str(op)
    num_parts = max(value_bytes // max(min(before, after), 1), 2)
    share = 1.0 if "broadcast" in name else (num_parts - 1) / num_parts
    if _TWICE in name:
        share = 2.0  # of many ranks: their number does not show in the sizes
    device = node.meta["val"].device
    link = _LINKS.get(device.type, _LINKS["cuda"])
    time_ms = link.latency_ms + share * value_bytes / (link.gb_per_s * 1e6)
    copies = device.type == "cpu" and ("gather" in name or "scatter" in name)
    return Cost(time_ms=time_ms, overhead_bytes=value_bytes if copies else 0)
