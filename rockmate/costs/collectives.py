"""The cost of a collective: estimated, never run.

To measure one would take all ranks at the same time, and a rank that measures more calls than
another would wait for ever. So the time is that of a ring (Thakur, Rabenseifner and Gropp, 2005):

    time = latency + bytes sent by a rank / bandwidth

| collective | bytes sent by a rank, of n, for a value of V bytes |
|---|---|
| all-reduce | 2 V (n - 1) / n |
| all-gather into V, reduce-scatter of V, all-to-all of V | V (n - 1) / n |
| broadcast | V |

Latency and bandwidth are of the kind of device or of a machine's description, not measured. They
decide how soon a planner would rather recompute something else, and nothing about what is right.

The workspace on a CPU includes that gloo copies what it gathers or scatters; of other collectives
than those on shards it is an upper limit. On a GPU NCCL's buffers are its own, made once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from rockmate._torch.distributed import ranks_of
from rockmate.costs.cost import Cost
from rockmate.costs.machine import Machine
from rockmate.ops.collectives import collective
from rockmate.ops.shards import gather_shards

# Collectives that send a value twice: once to reduce it, once to spread the result.
_TWICE = "all_reduce"


class _Link(NamedTuple):
    latency_ms: float
    gb_per_s: float

    def time_ms(self, num_bytes: float) -> float:
        """Time to send so many bytes."""
        return self.latency_ms + num_bytes / (self.gb_per_s * 1e6)


_LINKS = {"cpu": _Link(0.5, 1.0), "cuda": _Link(0.03, 100.0)}


def collective_cost(node: fx.Node, machine: Machine | None = None) -> Cost:
    """The cost of one call for which `is_communication` holds.

    Args:
        node: with the fake values of its argument and of its result.
        machine: whose links are meant; None: the assumed ones of the node's device. A collective
            that does not tell the number of its ranks runs within a node.
    """
    if node.target is not collective:
        return _shards_cost(node, machine)
    op, given = node.args[:2]
    assert isinstance(given, fx.Node)
    before, after = given.meta["val"].nbytes, node.meta["val"].nbytes
    value_bytes, name = max(before, after), str(op)
    num_parts = max(value_bytes // max(min(before, after), 1), 2)
    share = 1.0 if "broadcast" in name else (num_parts - 1) / num_parts
    if _TWICE in name:
        share = 2.0  # of many ranks: their number does not show in the sizes
    device = node.meta["val"].device
    copies = device.type == "cpu" and ("gather" in name or "scatter" in name)
    return Cost(
        time_ms=_link_of(device, machine, num_parts).time_ms(share * value_bytes),
        overhead_bytes=value_bytes if copies else 0,
    )


def _shards_cost(node: fx.Node, machine: Machine | None) -> Cost:
    """The cost of a call of `rockmate.ops.shards`, whose docstring has what it allocates."""
    operands: Any = node.args[0]
    dims: Any = node.args[1]
    num_ranks: Any = node.args[2]
    dtypes: Any = node.args[4:]
    given = [operand.meta["val"] for operand in operands]
    device, is_gather = given[0].device, node.target is gather_shards
    dtype = dtypes[0] or given[0].dtype
    elements = sum(each.numel() for each in given) * (num_ranks if is_gather else 1)
    value_bytes = elements * dtype.itemsize
    # Else the collective's memory is the result.
    has_own_memory = not is_gather or len(given) > 1 or dims[0] != 0 or device.type == "cpu"
    overhead_bytes = value_bytes if has_own_memory else 0
    share = (num_ranks - 1) / num_ranks
    time_ms = _link_of(device, machine, num_ranks).time_ms(share * value_bytes)
    replicas: Any = None if is_gather else node.args[6]
    if replicas:
        num_replicas = len(ranks_of(replicas))
        # Replicas are on other nodes where their parts fill one.
        link = _link_of(device, machine, num_ranks * num_replicas)
        sent_bytes = 2 * (num_replicas - 1) / num_replicas * value_bytes / num_ranks
        time_ms += link.time_ms(sent_bytes)
    return Cost(time_ms=time_ms, overhead_bytes=overhead_bytes)


def _link_of(device: torch.device, machine: Machine | None, num_ranks: int) -> _Link:
    if machine is None or "gb_per_s" not in machine.link:
        return _LINKS.get(device.type, _LINKS["cuda"])
    is_within = num_ranks <= machine.link["ranks_in_node"]
    rate = machine.link["gb_per_s" if is_within else "gb_per_s_between_nodes"]
    return _Link(machine.link["latency_us"] / 1e3, rate)
