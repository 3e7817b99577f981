"""Random training steps around tables of uneven sizes: what single operations cannot show.

A step looks rows of a table up, beside data that other axes split, and multiplies with the same
table or another one. Parameters are leaves whose gradients are compared, or that one step of
gradient descent has changed in the same program. As in `programs`, a step is drawn from a number.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F

import spmd_core as spmd
from benchmarks.partitioner.chain_draws import DTYPE
from benchmarks.partitioner.chains import draw_spec
from benchmarks.partitioner.programs import MESHES, Spec, weights

# Of rows and columns of a table, and of the data: few divide by the axes of most meshes.
ROWS = (3, 5, 7, 8, 11, 13, 16, 29)
WIDTHS = (1, 3, 4, 6, 8, 9)
BATCHES = (1, 3, 4, 5, 8)
LENGTHS = (1, 2, 3, 4, 6)
# What a step may have beside the lookup.
PARTS = ("positions", "norm", "mlp", "head", "tied head", "bias", "loss", "computed", "update")
RATE = 0.1


@dataclass(frozen=True)
class TableStep:
    """One program.

    Attributes:
        seed: of the values.
        rows, width, batch, length: the table has rows of that width; of (batch, length) ids.
        parts: some of `PARTS`.
        marks: names of tensors and their partition specs.
    """

    seed: int
    rows: int
    width: int
    batch: int
    length: int
    parts: tuple[str, ...]
    marks: tuple[tuple[str, Spec], ...]

    def __str__(self) -> str:
        marks = ", ".join(f"{name} {spec}" for name, spec in self.marks)
        return (
            f"a table ({self.rows}, {self.width}), ids ({self.batch}, {self.length}), "
            f"with {', '.join(self.parts) or 'nothing else'}; marked: {marks or 'nothing'}"
        )

    def simpler(self) -> Iterator["TableStep"]:
        """The same with one thing less."""
        for part in self.parts:
            yield replace(self, parts=tuple(p for p in self.parts if p != part))
        for mark in self.marks:
            yield replace(self, marks=tuple(m for m in self.marks if m is not mark))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its tensors, by name; parameters first."""
        data = (self.batch, self.length)
        found: dict[str, tuple[int, ...]] = {"table": (self.rows, self.width)}
        if "positions" in self.parts:
            found["positions"] = (self.length + 1, self.width)
        if "norm" in self.parts:
            found["norm"] = (self.width,)
        if "mlp" in self.parts:
            found["mlp"] = (self.width, self.width)
        if "head" in self.parts:
            found["head"] = (self.rows, self.width)
        if "bias" in self.parts and self.has_head:
            found["bias"] = (self.rows,)
        width = self.rows if self.has_head else self.width
        return {**found, "ids": data, "hidden": (*data, self.width), "result": (*data, width)}

    @property
    def has_head(self) -> bool:
        """Whether the result has a column for each row of the table."""
        return "head" in self.parts or "tied head" in self.parts


DATA = ("ids", "hidden", "result")


class TableSteps:
    """Draws steps and runs them; `examination.examine` does the rest."""

    name = "table_step"

    def draw(self, mesh: int, seed: int) -> TableStep:
        """The step with this number; at least the table and the ids are marked."""
        rng = random.Random(f"table step {mesh} {seed}")
        rows, width, batch, length = (rng.choice(of) for of in (ROWS, WIDTHS, BATCHES, LENGTHS))
        parts = [part for part in PARTS if rng.random() < 0.4]
        if "tied head" in parts and "head" in parts:
            parts.remove(rng.choice(("head", "tied head")))
        step = TableStep(seed, rows, width, batch, length, tuple(parts), ())
        marks = {
            name: draw_spec(rng, len(shape), MESHES[mesh][2])
            for name, shape in step.shapes().items()
            if name in ("table", "ids") or rng.random() < 0.4
        }
        return replace(step, marks=tuple(marks.items()))

    def run(self, step: TableStep, mesh: spmd.Mesh | None) -> list[Any]:
        """The result, and the gradients or the parameters after an update."""
        device, marks, shapes = "cpu" if mesh is None else "xla", dict(step.marks), step.shapes()

        def marked(name: str, value: torch.Tensor) -> torch.Tensor:
            spec = marks.get(name)
            return value if mesh is None or spec is None else spmd.mark_sharding(value, mesh, spec)

        generator = torch.Generator().manual_seed(step.seed)
        own: dict[str, torch.Tensor] = {}
        for name, shape in shapes.items():
            if name not in DATA:
                value = torch.randn(shape, dtype=DTYPE, generator=generator)
                own[name] = marked(name, value.to(device)).requires_grad_()
        ids, targets = torch.randint(step.rows, (2, *shapes["ids"]), generator=generator)
        ids, targets = marked("ids", ids.to(device)), targets.to(device)
        loss, result = self._loss(step, own, ids, targets, marked)
        gradients = torch.autograd.grad(loss, [*own.values()])
        if "update" not in step.parts:
            return [result.detach(), *gradients]
        with torch.no_grad():
            for parameter, gradient in zip(own.values(), gradients):
                parameter.sub_(gradient, alpha=RATE)
        loss, _ = self._loss(step, own, ids, targets, marked)
        return [loss.detach(), *(parameter.detach() for parameter in own.values())]

    @staticmethod
    def _loss(
        step: TableStep,
        own: dict[str, torch.Tensor],
        ids: torch.Tensor,
        targets: torch.Tensor,
        marked: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        table = own["table"]
        if "computed" in step.parts:
            table = (table * 2).sin()
        x = F.embedding(ids, table)
        if "positions" in step.parts:
            x = x + F.embedding(torch.arange(step.length, device=ids.device), own["positions"])
        x = marked("hidden", x)
        if "norm" in step.parts:
            x = F.layer_norm(x, own["norm"].shape, own["norm"])
        if "mlp" in step.parts:
            x = x + F.linear(x, own["mlp"]).tanh()
        if step.has_head:
            x = F.linear(x, own.get("head", table), own.get("bias"))
        result = marked("result", x)
        if "loss" in step.parts and step.has_head:
            return F.cross_entropy(result.flatten(0, 1), targets.flatten()), result
        return (result.sin() * weights(result)).sum(), result

    def is_as_good(self, step: TableStep, got: list[Any], expected: list[Any]) -> bool:
        """False: float64 leaves no room for rounding."""
        return False
