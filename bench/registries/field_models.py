"""Models around layers of other fields' packages, and batches of graphs, for fields.toml.

Packages are imported where they are used: each model runs where its own one is installed.
"""

from __future__ import annotations

import importlib
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

# --- graphs -----------------------------------------------------------------------------------


def graph(nodes: int, edges: int, *, seed: int | None = None) -> tuple[Tensor, Tensor]:
    """Sixteen features of each node, and edges; with a `seed`, the same edges in each step."""
    drawn = None if seed is None else torch.Generator().manual_seed(seed)
    return torch.randn(nodes, 16), torch.randint(nodes, (2, edges), generator=drawn)


def data(nodes: int, edges: int) -> Any:
    """A graph as an object."""
    features, edge_index = graph(nodes, edges)
    return importlib.import_module("torch_geometric.data").Data(x=features, edge_index=edge_index)


def batch_of(number: int, nodes: int, edges: int) -> Any:
    """Several graphs as one object."""
    graphs = [data(nodes + i, edges) for i in range(number)]
    return importlib.import_module("torch_geometric.data").Batch.from_data_list(graphs)


def hetero(nodes: int, edges: int) -> Any:
    """A graph of two kinds of nodes as an object."""
    made = importlib.import_module("torch_geometric.data").HeteroData()
    made["a"].x, made["b"].x = torch.randn(nodes, 16), torch.randn(nodes, 16)
    for pair in (("a", "to", "b"), ("b", "to", "a")):
        made[pair].edge_index = torch.randint(nodes, (2, edges))
    return made


def atoms(number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers and positions of atoms of two molecules."""
    molecule = torch.arange(number) * 2 // number
    return torch.randint(1, 9, (number,)), 2 * torch.randn(number, 3), molecule


class Within(nn.Module):
    """Edges between points of one molecule within a radius of each other, and their lengths."""

    def __init__(self, radius: float) -> None:
        super().__init__()
        self.radius = radius

    def forward(self, points: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        apart = torch.cdist(points, points) + 1e3 * torch.eye(len(points))
        edges = ((apart < self.radius) & (batch[:, None] == batch[None])).nonzero().t()
        return edges, (points[edges[0]] - points[edges[1]]).norm(dim=-1)


class AroundGraph(nn.Module):
    """Layers of a graph between dense ones."""

    def __init__(self, first: nn.Module, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer = first, layer
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, features: Tensor, edge_index: Tensor | None) -> Tensor:  # noqa: D102
        hidden = self.first(features)
        for layer in self.layers:
            given = (hidden,) if edge_index is None else (hidden, edge_index)
            hidden = torch.relu(layer(self.layer(*given)))
        return hidden


class OfData(nn.Module):
    """A model that is given an object, as training loops of graphs do."""

    def __init__(self, model: nn.Module, *, pools: bool = False) -> None:
        super().__init__()
        self.model, self.pools = model, pools

    def forward(self, graphs: Any) -> Tensor:  # noqa: D102
        result = self.model(graphs.x, graphs.edge_index)
        if not self.pools:
            return result
        pool = importlib.import_module("torch_geometric.nn").global_mean_pool
        return pool(result, graphs.batch)


class Hetero(nn.Module):
    """Convolutions between two kinds of nodes."""

    def __init__(self) -> None:
        super().__init__()
        layers = importlib.import_module("torch_geometric.nn")
        kinds = [("a", "to", "b"), ("b", "to", "a")]
        self.layers = nn.ModuleList(
            layers.HeteroConv({kind: layers.SAGEConv((16, 16), 16) for kind in kinds})
            for _ in range(2)
        )

    def forward(self, graphs: Any) -> dict[str, Tensor]:  # noqa: D102
        features = graphs.x_dict
        for layer in self.layers:
            features = layer(features, graphs.edge_index_dict)
            features = {kind: each.relu() for kind, each in features.items()}
        return features


class Rgcn(nn.Module):
    """Convolutions of three relations."""

    def __init__(self) -> None:
        super().__init__()
        layer = importlib.import_module("torch_geometric.nn").RGCNConv
        self.first, self.last = layer(16, 32, 3), layer(32, 8, 3)

    def forward(self, features: Tensor, edge_index: Tensor, kinds: Tensor) -> Tensor:  # noqa: D102
        return self.last(self.first(features, edge_index, kinds).relu(), edge_index, kinds)


class PointNet(nn.Module):
    """Messages between points that are near each other."""

    def __init__(self) -> None:
        super().__init__()
        layers = importlib.import_module("torch_geometric.nn")
        mlp = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32))
        self.layer, self.last = layers.PointNetConv(mlp, nn.Linear(32, 32)), nn.Linear(32, 8)

    def forward(self, points: Tensor, batch: Tensor) -> Tensor:  # noqa: D102
        apart = torch.cdist(points, points) + 100 * (batch[:, None] != batch[None])
        near = apart.topk(8, largest=False).indices
        target = torch.arange(len(points)).repeat_interleave(8)
        edge_index = torch.stack([near.flatten(), target])
        return self.last(self.layer(points, points, edge_index))


class DensePool(nn.Module):
    """Graphs that are pooled by a learned assignment."""

    def __init__(self) -> None:
        super().__init__()
        layers = importlib.import_module("torch_geometric.nn")
        self.pool, self.embed = layers.DenseGCNConv(16, 8), layers.DenseGCNConv(16, 32)
        self.reduce = layers.dense_diff_pool

    def forward(self, features: Tensor, adjacency: Tensor) -> Any:  # noqa: D102
        assignment = self.pool(features, adjacency)
        return self.reduce(self.embed(features, adjacency).relu(), adjacency, assignment)


class TopK(nn.Module):
    """Nodes that are chosen by a score."""

    def __init__(self) -> None:
        super().__init__()
        layers = importlib.import_module("torch_geometric.nn")
        self.first, self.last = layers.GCNConv(16, 32), layers.GCNConv(32, 8)
        self.pool = layers.TopKPooling(32, ratio=0.5)

    def forward(self, features: Tensor, edge_index: Tensor) -> Tensor:  # noqa: D102
        hidden = self.first(features, edge_index).relu()
        hidden, edge_index, *_ = self.pool(hidden, edge_index)
        return self.last(hidden, edge_index)


# --- solvers ----------------------------------------------------------------------------------


class _Field(nn.Module):
    """The right side of a differential equation; with the trace of its Jacobian in a flow."""

    def __init__(self, *, is_flow: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
        self.is_flow = is_flow

    def forward(self, time: Tensor, state: Any) -> Any:
        if not self.is_flow:
            return self.net(state) * (1 + time)
        with torch.enable_grad():
            at = state[0].requires_grad_(True)
            slope = self.net(at)
            trace = sum(
                torch.autograd.grad(slope[:, i].sum(), at, create_graph=True)[0][:, i]
                for i in range(2)
            )
        return slope, -trace


class Ode(nn.Module):
    """A differential equation solved within the forward."""

    def __init__(self, solve: Any, *, method: str, is_flow: bool = False) -> None:
        super().__init__()
        self.solve, self.method, self.field = solve, method, _Field(is_flow=is_flow)

    def forward(self, start: Tensor) -> Any:  # noqa: D102
        times = torch.linspace(0, 1, 5)
        state: Any = (start, torch.zeros(len(start))) if self.field.is_flow else start
        return self.solve(self.field, state, times, method=self.method)


# --- potentials -------------------------------------------------------------------------------


class Equivariant(nn.Module):
    """Energy of points by tensor products along edges, and its gradient by the points."""

    def __init__(self) -> None:
        super().__init__()
        o3, e3nn = importlib.import_module("e3nn.o3"), importlib.import_module("e3nn.nn")
        self.harmonics = o3.SphericalHarmonics("1x0e+1x1o", normalize=True)
        self.product = o3.FullyConnectedTensorProduct("8x0e", "1x0e+1x1o", "8x0e+8x1o")
        self.gate = e3nn.NormActivation("8x0e+8x1o", torch.sigmoid)
        self.again = o3.FullyConnectedTensorProduct("8x0e+8x1o", "1x0e+1x1o", "4x0e")
        self.first, self.last = nn.Linear(1, 8), nn.Linear(4, 1)

    def forward(self, points: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        points = points.detach().requires_grad_()
        source, target = edges
        apart = points[target] - points[source] + 0.01
        around = self.harmonics(apart)
        message = self.gate(self.product(self.first(apart.norm(dim=1, keepdim=True)), around))
        nodes = points.new_zeros(len(points), message.shape[1]).index_add(0, target, message)
        energy = self.last(self.again(nodes[source], around)).sum()
        return energy, torch.autograd.grad(energy, points, create_graph=True)[0]


def _near(points: Tensor, radius: float = 2.5) -> Tensor:
    """Pairs of different points within a radius of each other."""
    apart = torch.cdist(points, points) + 1e3 * torch.eye(len(points))
    return (apart < radius).nonzero().t().contiguous()


def _points(number: int) -> Tensor:
    """Places of atoms, none too near to another."""
    side = torch.arange(4.0)
    grid = torch.cartesian_prod(side, side, side)
    return 1.3 * grid[:number] + 0.1 * torch.randn(number, 3)


def molecules(number: int, _: int) -> dict[str, Tensor]:
    """Two molecules, as MACE reads them."""
    points = _points(number)
    half = number // 2
    edges = torch.cat([_near(points[:half]), half + _near(points[half:])], 1)
    kinds = torch.nn.functional.one_hot(torch.randint(3, (number,)), 3).float()
    shifts = torch.zeros(edges.shape[1], 3)
    return {
        "positions": points,
        "node_attrs": kinds,
        "edge_index": edges,
        "shifts": shifts,
        "unit_shifts": shifts.clone(),
        "cell": torch.zeros(6, 3),
        "batch": torch.arange(number) // half,
        "ptr": torch.tensor([0, half, number]),
    }


class _Potential(nn.Module):
    """A potential with its forces, as in training."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__()
        self.model, self.options = model, options

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        found = self.model(dict(batch), **self.options)
        return found["energy"], found["forces"]


def mace(kind: str = "MACE", **options: Any) -> nn.Module:
    """A small MACE."""
    modules, o3 = importlib.import_module("mace.modules"), importlib.import_module("e3nn.o3")
    interaction = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
    made = getattr(modules, kind)(
        r_max=2.5, num_bessel=4, num_polynomial_cutoff=5, max_ell=2,
        interaction_cls=interaction, interaction_cls_first=interaction, num_interactions=2,
        num_elements=3, hidden_irreps=o3.Irreps("8x0e + 8x1o"), MLP_irreps=o3.Irreps("8x0e"),
        gate=torch.nn.functional.silu, atomic_energies=torch.zeros(3).numpy(),
        avg_num_neighbors=4.0, atomic_numbers=[1, 6, 8], correlation=2, **options,
    )  # fmt: skip
    return _Potential(made, training=True)


def schnetpack_batch(number: int) -> dict[str, Tensor]:
    """One molecule, as SchNetPack reads it."""
    points = _points(number)
    first, second = _near(points)
    return {
        "_atomic_numbers": torch.randint(1, 9, (number,)),
        "_positions": points,
        "_idx_i": first,
        "_idx_j": second,
        "_offsets": torch.zeros(len(first), 3),
        "_idx_m": torch.zeros(number, dtype=torch.long),
        "_n_atoms": torch.tensor([number]),
        "_cell": torch.zeros(1, 3, 3),
        "_pbc": torch.zeros(1, 3, dtype=torch.bool),
    }


def schnetpack(kind: str, **options: Any) -> nn.Module:
    """A representation of SchNetPack with energy and forces."""
    loader = importlib.import_module("torch.utils.data.dataloader")
    vars(loader).setdefault("T_co", TypeVar("T_co", covariant=True))  # which it imports
    spk = importlib.import_module("schnetpack")
    part, atomistic = importlib.import_module("schnetpack.nn"), spk.atomistic
    representation = getattr(spk.representation, kind)(
        n_atom_basis=16,
        n_interactions=2,
        radial_basis=part.GaussianRBF(n_rbf=8, cutoff=2.5),
        cutoff_fn=part.CosineCutoff(2.5),
        **options,
    )
    energy = atomistic.Atomwise(n_in=16, output_key="energy", aggregation_mode="avg")
    outputs = [energy, atomistic.Forces()]
    distances = [atomistic.PairwiseDistances()]
    model = spk.model.NeuralNetworkPotential(
        representation=representation, input_modules=distances, output_modules=outputs
    )
    return _Potential(model)


class Ani(nn.Module):
    """A small ANI with forces."""

    def __init__(self) -> None:
        super().__init__()
        arch = importlib.import_module("torchani.arch")
        self.model = arch.simple_ani(("H", "C", "N", "O"), lot="wb97x-631gd", ensemble_size=1)

    def forward(self, kinds: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        points = points.detach().requires_grad_()
        energy = self.model((kinds, points), cell=None, pbc=None).energies
        return energy, torch.autograd.grad(energy.sum(), points, create_graph=True)[0]


class Density(nn.Module):
    """The likelihood of a flow."""

    def __init__(self, flow: Any) -> None:
        super().__init__()
        self.flow = flow

    def forward(self, points: Tensor) -> Tensor:  # noqa: D102
        return -self.flow().log_prob(points)


class Equilibrium(nn.Module):
    """A layer that is applied until its result stays."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(32, 32), nn.Linear(32, 8)
        self.solve = importlib.import_module("torchdeq").get_deq(f_max_iter=8)

    def forward(self, given: Tensor) -> Tensor:  # noqa: D102
        found, _ = self.solve(lambda z: torch.tanh(self.layer(z) + given), torch.zeros_like(given))
        return self.last(found[-1])
