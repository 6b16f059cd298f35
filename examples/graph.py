"""A deep graph network in stages: parts of the graph pass through them, and each uses what the others have left there.

torchrun --nproc-per-node 2 examples/graph.py
torchrun --nproc-per-node 4 examples/graph.py  # two ranks for each stage, which share the vertices of every part
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from thinwire.collectives import Mailbox, Topology
from thinwire.hosts.pipeline import Runner
from thinwire.methods.pipeline import Carried, least_cut, there_and_back

VERTICES, CLASSES, WIDTH, LAYERS, PARTS, EPOCHS = 192, 3, 16, 8, 8, 60


def planted(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """A graph with more edges inside of classes than between: normalised edges, weak features, classes."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(0, CLASSES, (VERTICES,), generator=generator)
    likely = torch.where(classes[:, None] == classes, 0.08, 0.02)
    edges = (torch.rand(VERTICES, VERTICES, generator=generator) < likely).triu(1).float()
    edges = edges + edges.T + torch.eye(VERTICES)
    scale = edges.sum(1).rsqrt()
    features = torch.randn(VERTICES, WIDTH, generator=generator)
    features[:, :CLASSES] += 0.5 * nn.functional.one_hot(classes, CLASSES)
    return scale[:, None] * edges * scale, features, classes


class Gathered(torch.autograd.Function):
    """The rows that all ranks of a group have, one below the other."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


class GraphStage(nn.Module):
    """Some layers h + relu((A h) W); the first stage has the features, the last the classes.

    carried: of this stage; begin a round before each epoch. parts: the vertices of each part, between which few edges
    lie. ways: ranks that compute a part's vertices between them.
    """

    def __init__(
        self, layers: Sequence[int], seed: int, num_parts: int = PARTS, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__()
        self.edges, self.features, self.classes = planted(seed)
        self.parts = least_cut(self.edges, num_parts)
        self.layers, self.group, self.carried = layers, group, Carried()
        self.way, self.ways = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
        generators = {at: torch.Generator().manual_seed(100 * seed + at) for at in layers}
        draw = {at: torch.randn(WIDTH, WIDTH, generator=generator) for at, generator in generators.items()}
        self.weights = nn.ParameterDict({str(at): 0.3 * values / WIDTH**0.5 for at, values in draw.items()})

    def forward(self, hidden: Tensor | None, part: int) -> Tensor:
        own = self.parts[part].chunk(self.ways)[self.way]
        hidden = self.features[own] if hidden is None else hidden
        for at in self.layers:
            whole = hidden if self.group is None else Gathered.apply(hidden, self.group)
            found = self.edges[own][:, self.parts[part]] @ self.carried.leave(str(at), part, whole)
            for other in range(len(self.parts)):
                if other != part and (there := self.carried.of(str(at), other, part)) is not None:
                    found = found + self.edges[own][:, self.parts[other]] @ there
            hidden = hidden + torch.relu(found @ self.weights[str(at)])
        if LAYERS - 1 not in self.layers:
            return hidden
        return nn.functional.cross_entropy(hidden[:, :CLASSES], self.classes[own])


def main() -> None:
    dist.init_process_group("gloo")
    stages, ways = 2, dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (stages, ways), mesh_dim_names=("pipeline", "way"))
    number, each = mesh["pipeline"].get_local_rank(), LAYERS // stages
    group = mesh["way"].get_group() if ways > 1 else None
    stage = GraphStage(range(number * each, (number + 1) * each), seed=0, group=group)
    optimizer = torch.optim.Adam(stage.parameters(), lr=3e-3)
    mailbox = Mailbox(mesh["pipeline"], Topology(stages, 1))
    orders = torch.Generator().manual_seed(0)
    for epoch in range(EPOCHS):
        # Another order each time, so that no part has old neighbours always.
        order = torch.randperm(PARTS, generator=orders).tolist()
        stage.carried.begin(order)
        shape = (VERTICES // PARTS // ways, WIDTH)
        runner = Runner(there_and_back(stages, order), {number: stage}, mailbox, lambda *_, shape=shape: shape)
        loss = runner.run(list(range(PARTS)), [1 / PARTS / ways] * PARTS)
        if group is not None:
            for param in stage.parameters():
                dist.all_reduce(param.grad, group=group)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        if dist.get_rank() == 0 and epoch % (EPOCHS - 1) == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, {mailbox.meter.snapshot().sent_bytes / 1e6:.3f} MB sent")
    mailbox.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
