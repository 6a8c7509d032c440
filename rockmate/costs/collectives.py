"""The cost of a collective: estimated, never run.

To measure one would take all ranks at the same time, and a rank that measures more calls than
another would wait for ever. So the time is

    time = latency + hops + bytes sent by a rank / rate

as NCCL itself estimates it, to choose among its algorithms (`src/graph/tuning.cc` of its sources),
with the costs of rings by Thakur, Rabenseifner and Gropp (2005).

| collective, of n ranks on k nodes, for a value of V bytes | bytes sent | hops (between nodes) |
|---|---|---|
| all-gather into V, reduce-scatter of V: ring | V (n - 1) / n | n - 1 (k - 1) |
| all-reduce: ring | 2 V (n - 1) / n | 2 (n - 1) (2 (k - 1)) |
| all-reduce: tree, if that is faster | 2 V / 0.92 | a node's ranks and log2 k, each way |
| all-to-all of V | V (n - 1) / n | 1 |
| broadcast | V | n - 1 (k - 1) |

The rate is that of a rank's links within a node. In a group on several nodes, NCCL runs a ring for
each network adapter, so a node sends at the rates of all of them: as many adapters as the group has
ranks there. Of an all-to-all, what leaves the node takes the adapter of its own rank.

Latencies and rates are of the kind of device or of a machine's description, not measured. They
decide how soon a planner would rather recompute something else, and nothing about what is right.
Left out are reductions in switches (NVLS, SHARP), which need hardware that a description does not
tell, and other traffic.

The workspace on a CPU includes that gloo copies what it gathers or scatters; of other collectives
than those on shards it is an upper limit. On a GPU NCCL's buffers are its own, made once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import ceil, inf, log2, prod
from typing import Any, NamedTuple

import torch
from torch import fx

from rockmate.costs.cost import Cost
from rockmate.costs.machine import Machine
from rockmate.ops.collectives import collective
from rockmate.ops.shards import GATHER, Cut, has_whole_memory

# Share of a ring's rate that NCCL expects of a tree.
_TREE_RATE = 0.92


class _Link(NamedTuple):
    """What connects ranks, by the names of `rockmate.costs.machine`.

    Attributes:
        latency_us: of each collective.
        gb_per_s: that a rank sends within a node.
        ranks_in_node: number of ranks that share one.
        gb_per_s_between_nodes: that each rank sends to other nodes.
        hop_latency_us: from rank to rank within a node.
        hop_latency_us_between_nodes: the same to another node.
    """

    latency_us: float
    gb_per_s: float
    ranks_in_node: float = inf
    gb_per_s_between_nodes: float = inf
    hop_latency_us: float = 0.0
    hop_latency_us_between_nodes: float = 0.0

    def time_ms(self, name: str, num_bytes: float, ranks: Sequence[int]) -> float:
        """Time of a collective.

        The bytes are those of the larger of what it takes and what it gives.
        """
        num_ranks = len(ranks)
        in_node = Counter(rank // self.ranks_in_node for rank in ranks)
        num_nodes, on_each = len(in_node), min(in_node.values())
        is_across = num_nodes > 1
        across = self.gb_per_s_between_nodes if is_across else inf
        kilobytes, share = num_bytes / 1e3, (num_ranks - 1) / num_ranks  # of which 1 GB/s: 1 us
        rate = min(self.gb_per_s, on_each * across)
        one_way_us = (num_ranks - num_nodes) * self.hop_latency_us
        one_way_us += (num_nodes - 1) * self.hop_latency_us_between_nodes
        if "all_to_all" in name:
            outside_us = (num_ranks - on_each) / num_ranks * kilobytes / across
            inside_us = (on_each - 1) / num_ranks * kilobytes / self.gb_per_s
            hop_us = self.hop_latency_us_between_nodes if is_across else self.hop_latency_us
            time_us = hop_us + max(outside_us, inside_us)
        elif "all_reduce" in name:
            ring_us = 2 * (one_way_us + share * kilobytes / rate)
            depth_us = (on_each - 1) * self.hop_latency_us
            depth_us += ceil(log2(num_nodes)) * self.hop_latency_us_between_nodes
            time_us = min(ring_us, 2 * (depth_us + kilobytes / (rate * _TREE_RATE)))
        else:
            sent = kilobytes if "broadcast" in name else share * kilobytes
            time_us = one_way_us + sent / rate
        return (self.latency_us + time_us) / 1e3


_LINKS = {"cpu": _Link(500.0, 1.0), "cuda": _Link(30.0, 100.0)}


def collective_cost(node: fx.Node, machine: Machine | None = None) -> Cost:
    """The cost of one call for which `is_communication` holds.

    Args:
        node: with the fake values of its argument and of its result, and the ranks of its groups.
        machine: whose links are meant; None: the assumed ones of the node's device.
    """
    if node.target is not collective:
        return _shards_cost(node, machine)
    op, given = node.args[:2]
    assert isinstance(given, fx.Node)
    num_bytes = max(given.meta["val"].nbytes, node.meta["val"].nbytes)
    device, name = node.meta["val"].device, str(op)
    copies = device.type == "cpu" and ("gather" in name or "scatter" in name)
    (ranks,) = node.meta["ranks"]
    return Cost(
        time_ms=_link_of(device, machine).time_ms(name, num_bytes, ranks),
        overhead_bytes=num_bytes if copies else 0,
    )


def _shards_cost(node: fx.Node, machine: Machine | None) -> Cost:
    """The cost of a call of `rockmate.ops.shards`, whose docstring has what it allocates."""
    args: Any = node.args
    operands, dims, num_ranks, dtype, *_ = args
    is_gather, given = node.target is GATHER, [each.meta["val"] for each in operands]
    whole = node.meta["val"] if is_gather else given
    cuts = [Cut(each.shape, dim, num_ranks) for each, dim in zip(whole, dims, strict=True)]
    device, dtype = given[0].device, dtype or given[0].dtype
    value_bytes = num_ranks * sum(prod(cut.part) for cut in cuts) * dtype.itemsize
    link = _link_of(device, machine)
    ranks, *replicas = node.meta["ranks"]
    time_ms = link.time_ms("all_gather" if is_gather else "reduce_scatter", value_bytes, ranks)
    for group in replicas:
        time_ms += link.time_ms("all_reduce", value_bytes / num_ranks, group)
    is_whole = is_gather and has_whole_memory(cuts, device)
    return Cost(time_ms=time_ms, overhead_bytes=0 if is_whole else value_bytes)


def _link_of(device: torch.device, machine: Machine | None) -> _Link:
    given = {} if machine is None else machine.link
    if "gb_per_s" not in given:
        return _LINKS.get(device.type, _LINKS["cuda"])
    return _Link(**{name: given[name] for name in _Link._fields if name in given})
