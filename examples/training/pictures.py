"""Draws a device mesh as a picture for TensorBoard."""

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import spmd_core as spmd


def mesh_picture(mesh: spmd.Mesh) -> np.ndarray:
    """The devices' numbers at their places in the mesh: uint8 of shape (height, width, 3).

    The last axis goes to the right, the one before it down; each position along the axes before
    these has a grid of its own.
    """
    axes = [(str(name), size) for name, size in mesh.shape().items()]
    if len(axes) == 1:
        axes.insert(0, ("", 1))
    *outer, (row_axis, num_rows), (column_axis, num_columns) = axes
    grids = mesh.get_logical_mesh().reshape(-1, num_rows, num_columns)
    figure = Figure(
        figsize=(0.6 + len(grids) * (0.5 + 0.5 * num_columns), 1.0 + 0.5 * num_rows),
        dpi=100,
        layout="constrained",
    )
    canvas = FigureCanvasAgg(figure)  # to memory: there may be no display
    places = np.ndindex(*(size for _, size in outer))
    for i, (place, grid) in enumerate(zip(places, grids, strict=True)):
        plot = figure.add_subplot(1, len(grids), i + 1)
        plot.imshow(grid, cmap="tab20", vmin=0, vmax=mesh.size())
        for (row, column), device in np.ndenumerate(grid):
            plot.text(column, row, str(device), ha="center", va="center")
        plot.set(
            xticks=[],
            yticks=[],
            xlabel=column_axis,
            ylabel=row_axis,
            title=", ".join(f"{name} {at}" for (name, _), at in zip(outer, place)),
        )
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
