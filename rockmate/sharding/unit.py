"""Units of a sharded model: what is gathered together, and how long it stays.

A unit is a submodule, such as a layer, with the parameters in it that belong to no unit within. The
model itself is the last unit. Its parameters are packed into buckets of a bounded size, and a large
one has a bucket to itself. A bucket is gathered in one collective when the forward first reads one
of its parameters, and forgotten when the forward of its unit has ended. Where the graph is
captured, the plan decides from there on. In a plain forward autograd keeps what it needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rockmate._torch.distributed import reduces_in_own_dtype
from rockmate._torch.members import tensor_tables
from rockmate.ops.held_gradients import HeldGradients
from rockmate.ops.shard_ops import gathered


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How parameters are gathered and gradients reduced.

    Attributes:
        dtype: of whole parameters; None: their own.
        reduce_dtype: in which gradients are added; None: that of the parameter if
            `reduces_in_own_dtype`, else that of the gradients.
        reduces_in_own_dtype: as PyTorch's `fully_shard` of the installed version does it.
        output_dtype: to which floating-point outputs of the model are cast; None: as they are.
        casts_inputs: whether floating-point inputs of a unit are cast to `dtype`.
        bucket_bytes: the largest bucket of several parameters, in bytes of whole parameters.
    """

    dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reduces_in_own_dtype: bool = False
    output_dtype: torch.dtype | None = None
    casts_inputs: bool = True
    bucket_bytes: int = 1 << 22

    @classmethod
    def of(cls, mp_policy: Any, bucket_bytes: int) -> Policy:
        """Of a `torch.distributed.fsdp.MixedPrecisionPolicy`, or None."""
        if mp_policy is None:
            return cls(bucket_bytes=bucket_bytes)
        return cls(
            dtype=mp_policy.param_dtype,
            reduce_dtype=mp_policy.reduce_dtype,
            reduces_in_own_dtype=reduces_in_own_dtype(),
            output_dtype=mp_policy.output_dtype,
            casts_inputs=mp_policy.cast_forward_inputs,
            bucket_bytes=bucket_bytes,
        )


@dataclass(eq=False, slots=True)
class ShardedModel:
    """What all units of one model share.

    Attributes:
        policy: of the model.
        num_ranks: that share each parameter.
        group: name of their process group.
        replicas: name of the group of ranks with the same parts; "" if there is one of each.
        ignored: the parameters that stay whole, as the user asked.
        depth: number of forwards of its modules that are running.
        held: gradients that wait for a later backward to reduce them.
    """

    policy: Policy
    num_ranks: int
    group: str
    replicas: str = ""
    ignored: tuple[nn.Parameter, ...] = ()
    depth: int = 0
    held: HeldGradients = field(default_factory=HeldGradients)


@dataclass(eq=False, slots=True)
class Place:
    """Where a sharded parameter stands, first of all places if it is tied.

    Attributes:
        module: that has it.
        name: there.
        dim: the dimension that is cut.
        num_bytes: of the whole parameter as it is gathered.
        placement: of the whole parameter among ranks that share it otherwise; see `Rest`.
    """

    module: nn.Module
    name: str
    dim: int
    num_bytes: int
    rest: Rest | None = None

    @property
    def parameter(self) -> DTensor:
        """What stands there now; in a trace, the tracer's."""
        found: Any = tensor_tables(self.module)[0][self.name]
        return found


@dataclass(frozen=True, slots=True)
class Rest:
    """How a gathered parameter is still divided, by tensor parallelism.

    Attributes:
        mesh: of tensor parallelism.
        placements: there.
    """

    mesh: Any
    placements: tuple[Any, ...]


@dataclass(eq=False, slots=True)
class Unit:
    """Parameters that are gathered for one part of the model.

    Attributes:
        model: to which it belongs.
        buckets: places of its parameters, those of one collective together.
        whole: gathered parameters by the address of their place, while the unit's forward runs.
        depth: number of forwards of its modules that are running.
    """

    model: ShardedModel
    buckets: list[list[Place]] = field(default_factory=list)
    whole: dict[int, Any] = field(default_factory=dict)
    depth: int = 0

    def add(self, places: list[Place]) -> None:
        """Packs further parameters into buckets, in order."""
        limit, open_buckets = self.model.policy.bucket_bytes, dict[Any, list[Place]]()
        for place in places:
            kind = place.parameter.dtype
            bucket = open_buckets.get(kind)
            taken = sum(each.num_bytes for each in bucket) if bucket else 0
            if bucket is None or taken + place.num_bytes > limit:
                bucket = []
                self.buckets.append(bucket)
                if place.num_bytes <= limit:
                    open_buckets[kind] = bucket
            bucket.append(place)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """For the forward of one of its modules."""
        self.depth += 1
        self.model.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
            self.model.depth -= 1
            if not self.depth:
                self.whole.clear()

    def read(self, place: Place) -> Any:
        """The parameter at a place, whole inside of the model's forward, else as it is stored."""
        if not self.model.depth:
            return place.parameter
        if id(place) not in self.whole:
            bucket = next(bucket for bucket in self.buckets if place in bucket)
            is_trained = place.parameter.requires_grad
            self._gather([p for p in bucket if p.parameter.requires_grad == is_trained])
        return self.whole[id(place)]

    def _gather(self, places: list[Place]) -> None:
        model, policy = self.model, self.model.policy
        own_dtype = places[0].parameter.dtype
        found = gathered(
            [place.parameter.to_local() for place in places],
            [place.dim for place in places],
            model.num_ranks,
            model.group,
            policy.dtype if own_dtype.is_floating_point else None,
            policy.reduce_dtype or (own_dtype if policy.reduces_in_own_dtype else None),
            model.replicas,
            [place.parameter for place in places],
            model.held,
        )
        for place, whole in zip(places, found, strict=True):
            rest = place.rest
            self.whole[id(place)] = (
                whole
                if rest is None
                else DTensor.from_local(whole, rest.mesh, rest.placements, run_check=False)
            )
