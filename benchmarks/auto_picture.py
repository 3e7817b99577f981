"""Draws the picture of the guide on automatic sharding: what is chosen for a small training step.

The step is an MLP with a norm and a residual connection. It is recorded and searched as
`auto_shard` does, over a mesh of two axes; nothing of it runs. The picture has the forward:
operations, the tensors between them with their dims, the groups that are split alike, and the axis
that splits each dim. Equal colors are equal classes of a group.

Run: python -m benchmarks.auto_picture
"""

import argparse
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--picture",
        type=Path,
        default=Path(__file__).parents[1] / "docs" / "images" / "auto_sharding",
        help="what to write, no suffix",
    )
    options = parser.parse_args()

import torch
from matplotlib.patches import Rectangle
from torch import nn

import spmd_core as spmd
from benchmarks.published import plots
from spmd_core.auto.costs import CostModel
from spmd_core.auto.decide import Progress
from spmd_core.auto.explained import Explainer
from spmd_core.auto.groups import group
from spmd_core.auto.machine import Machine
from spmd_core.auto.read_step import read_step
from spmd_core.auto.recorded_step import RecordedStep, record
from spmd_core.auto.searches import searched
from spmd_core.planner.topology import present

NUM_DEVICES, AXES = 8, ("a", "b")
ROWS, WIDTH, HIDDEN = 8192, 1024, 4096
SHORT = {"native_layer_norm": "norm", "linear": "@", "add": "+", "mean": "mean", "gelu": "gelu"}
# Of the picture, in its own unit: between operations, and from the row to the weights above it; a
# dim's cell; and how opaque the classes of a group are.
PITCH, LEAF_Y, CELL_X, CELL_Y, SHADES = 2.0, 1.5, 0.9, 0.5, (0.65, 0.25, 0.45)
BELOW = "arc,angleA=-90,angleB=-90,armA=18,armB=53,rad=8"
BOX_X, BOX_Y = 0.26, 0.18  # half of an operation's box


class Block(nn.Module):
    """x + MLP(norm(x)), and its mean as the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.gelu(self.up(self.norm(x)))
        return (x + self.down(h)).mean()


def chosen() -> Explainer:
    """What explains the choice for the block's training step."""
    spmd.simulate(NUM_DEVICES)
    spmd.use_spmd()
    model = Block().to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    mesh = spmd.Mesh(range(NUM_DEVICES), (2, 4), AXES)
    x = torch.zeros(ROWS, WIDTH).to("xla")
    found = present()

    def search(recorded: RecordedStep) -> Explainer:
        groups = group(read_step(recorded.graph))
        best, *_ = searched(
            groups,
            found,
            mesh=mesh,
            memory=found.hbm_bytes,
            most=0,
            objective="time",
            names=recorded.names,
            markable=recorded.markable,
            report=print,
            progress=Progress(),
        )
        machine = Machine.of(found.devices)
        model = CostModel(groups, mesh.mesh_shape, machine, mesh.ids)
        return Explainer(model, machine, best.candidate.solution, AXES, {})

    explainer: Explainer = record(lambda: step(x), search)
    return explainer


class Drawing:
    """The picture of the forward: operations in a row, tensors behind and weights above them.

    Args:
        figure: an empty matplotlib figure.
        explainer: of the choice.
    """

    def __init__(self, figure: Any, explainer: Explainer) -> None:
        self._axes = figure.subplots()
        self._axes.axis("off")
        self._explainer, self._groups = explainer, explainer.model.groups
        self._hue: dict[int, str] = {}
        self._place: dict[int, tuple[float, float]] = {}  # the middle of each tensor that is drawn

    def draw(self) -> None:
        """Draws all operations up to the loss."""
        step, right = self._groups.step, 0.0
        for operation in step.operations:
            right += PITCH
            for number, (tensor, _) in enumerate(operation.operands):
                if tensor in self._place:
                    self._read(tensor, right)
                elif number == 0:  # the input
                    self._tensor(tensor, (right - PITCH / 2, 0.0))
                    self._read(tensor, right)
                else:  # a weight
                    self._tensor(tensor, (right, LEAF_Y))
                    self._arrow((right, LEAF_Y - CELL_Y), (right, BOX_Y))
            self._operation(operation.entry.name.partition("::")[2], right)
            if not operation.results or not step.tensors[operation.results[0][0]].spec.shape:
                break  # the loss
            made, to = operation.results[0][0], right + PITCH / 2
            self._tensor(made, (to, 0.0))
            self._arrow((right + BOX_X, 0.0), (to - CELL_X / 2, 0.0))
        self._axes.set(xlim=(0.4, right + 0.6), ylim=(-0.95, LEAF_Y + CELL_Y + 0.05))

    def _operation(self, name: str, x: float) -> None:
        style = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": "black"}
        text = SHORT.get(name.partition(".")[0], name)
        self._axes.text(x, 0.0, text, ha="center", va="center", bbox=style, zorder=3)

    def _tensor(self, tensor: int, middle: tuple[float, float]) -> None:
        """Its dims as cells, one below the other, in the color of its group, a shade a class."""
        self._place[tensor] = middle
        owner = self._groups.of_tensor[tensor]
        color = self._hue.setdefault(owner, plots.COLORS[len(self._hue) % len(plots.COLORS)])
        shape = self._groups.step.tensors[tensor].spec.shape
        spec = self._explainer.spec(tensor, self._explainer.solution.choices)
        for dim, (size, axes) in enumerate(zip(shape, spec)):
            corner = (middle[0] - CELL_X / 2, middle[1] + CELL_Y * (len(shape) / 2 - dim - 1))
            shade = SHADES[self._groups.tensor_class[tensor, dim] % len(SHADES)]
            cell = Rectangle(corner, CELL_X, CELL_Y, fc=(color, shade), ec=color, zorder=2)
            self._axes.add_patch(cell)
            names = axes if isinstance(axes, tuple) else (axes,)
            text = (
                f"{size:,}" if axes is None else f"{size:,}\nover {' and '.join(map(str, names))}"
            )
            where = (middle[0], corner[1] + CELL_Y / 2)
            self._axes.text(*where, text, ha="center", va="center", fontsize=8, zorder=3)

    def _read(self, tensor: int, x: float) -> None:
        """An arrow from a tensor of the row to the operation at x."""
        at, y = self._place[tensor]
        if x - at < PITCH:
            self._arrow((at + CELL_X / 2, y), (x - BOX_X, 0.0))
        else:  # the residual connection, below the others
            self._arrow(
                (at, y - CELL_Y), (x, -BOX_Y), "arc,angleA=-90,angleB=-90,armA=18,armB=53,rad=8"
            )

    def _arrow(
        self, start: tuple[float, float], end: tuple[float, float], form: str = "arc3"
    ) -> None:
        look = {"arrowstyle": "->", "connectionstyle": form, "shrinkA": 0, "shrinkB": 0}
        self._axes.annotate("", end, start, arrowprops=look, zorder=1)


def main(picture: Path) -> int:
    """Searches, and writes the picture."""
    explainer = chosen()
    plots.save(lambda of: Drawing(of, explainer).draw(), picture, size=(12.0, 3.4), kinds=["png"])
    print(f"written: {picture}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(options.picture))
