"""Tables of which device holds which block."""

import builtins
import importlib.util
import io

import numpy as np
import pytest
import torch
from rich.console import Console

import spmd_core as spmd
from spmd_core.debugging import visualize

# (text, the cells of the drawn table by row)
FORMS = [
    (
        "{devices=[4,2]<=[8]}",
        [["CPU 0", "CPU 1"], ["CPU 2", "CPU 3"], ["CPU 4", "CPU 5"], ["CPU 6", "CPU 7"]],
    ),
    ("{devices=[2,2]3,1,2,0}", [["CPU 3", "CPU 1"], ["CPU 2", "CPU 0"]]),
    (
        "{devices=[2,1,4]0,2,4,6,1,3,5,7 last_tile_dim_replicate}",
        [["CPU [0, 2, 4, 6]"], ["CPU [1, 3, 5, 7]"]],
    ),
    (
        "{devices=[2,2,2]<=[2,4]T(1,0) last_tile_dim_replicate}",
        [["CPU [0, 4]", "CPU [1, 5]"], ["CPU [2, 6]", "CPU [3, 7]"]],
    ),
    (
        "{devices=[2,2,1,2]<=[8] last_tile_dims={replicated, manual}}",
        [
            ["CPU [0, 1] (manual)", "CPU [2, 3] (manual)"],
            ["CPU [4, 5] (manual)", "CPU [6, 7] (manual)"],
        ],
    ),
    (
        "{devices=[4,2]<=[8] last_tile_dims={replicated}}",
        [["CPU [0, 1]", "CPU [2, 3]", "CPU [4, 5]", "CPU [6, 7]"]],
    ),
    ("{devices=[3]4,0,9}", [["CPU 4", "CPU 0", "CPU 9"]]),
    ("{maximal device=3}", [["CPU 3"]]),
]


def cells(text):
    """The texts of the cells of a drawn table, by row."""
    rows = [line.strip().strip("│").split("│") for line in text.splitlines() if "│" in line]
    return [[cell.strip() for cell in row] for row in rows]


@pytest.mark.parametrize(("text", "expected"), FORMS, ids=[f[0] for f in FORMS])
def test_every_form_of_xlas_text(text, expected, capsys):
    table = visualize.visualize_sharding(text, use_color=False)
    assert cells(capsys.readouterr().out) == expected
    assert (table.row_count, len(table.columns)) == (len(expected), len(expected[0]))


@pytest.mark.parametrize(("text", "note"), [("{replicated}", ""), ("{manual}", " (manual)")])
def test_all_devices_hold_it(text, note, capsys, num_devices):
    visualize.visualize_sharding(text, use_color=False)
    ids = "0" if num_devices == 1 else str(list(range(num_devices)))
    assert cells(capsys.readouterr().out) == [[f"CPU {ids}{note}"]]


def test_three_dims_are_a_table_of_tables(capsys):
    table = visualize.visualize_sharding("{devices=[2,1,2]<=[4]}", use_color=False)
    out = capsys.readouterr().out
    assert table.row_count == 2 and "block 0 of dim 0" in out and "block 1 of dim 0" in out
    assert out.index("CPU 1") < out.index("block 1 of dim 0") < out.index("CPU 2")


def test_a_hundred_thousand_ids_of_other_hosts_need_no_device(capsys):
    visualize.visualize_sharding("{devices=[2,2]99990,99991,99992,99993}", use_color=False)
    assert cells(capsys.readouterr().out) == [
        ["CPU 99990", "CPU 99991"],
        ["CPU 99992", "CPU 99993"],
    ]


def test_a_wide_table_is_not_cut_off_in_a_file(capsys):
    visualize.visualize_sharding("{devices=[64]<=[64]}", use_color=False)
    assert cells(capsys.readouterr().out) == [[f"CPU {i}" for i in range(64)]]


def test_a_tensors_own_sharding(mesh_2d, num_devices, capsys):
    x = torch.zeros(8, 8, device="xla")
    with pytest.raises(
        spmd.errors.SpmdError,
        match=r"shows a tensor's sharding; this one, of shape \(8, 8\), has none\. "
        r"Call spmd\.mark_sharding",
    ):
        visualize.visualize_tensor_sharding(x)
    spmd.mark_sharding(x, mesh_2d, ("a", "b"))
    visualize.visualize_tensor_sharding(x, use_color=False)
    drawn = cells(capsys.readouterr().out)
    a, b = mesh_2d.mesh_shape
    assert drawn == [[f"CPU {row * b + column}" for column in range(b)] for row in range(a)]
    # The table agrees with where the data is.
    for shard in x.local_shards:
        if shard.indices is not ...:
            row, column = (s.start * n // 8 for s, n in zip(shard.indices, (a, b)))
            assert drawn[row][column] == shard.shard_device.replace(":", " ")
    with pytest.raises(
        spmd.errors.DeviceMismatchError, match=r"got a tensor on cpu\. Move it first"
    ):
        visualize.visualize_tensor_sharding(torch.zeros(2))
    with pytest.raises(spmd.errors.DeviceMismatchError, match="got list"):
        visualize.visualize_tensor_sharding([1])


def colours(text):
    """rich's name of the background of each cell, for a table of one-line cells; console; table."""
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=400)
    table = visualize.visualize_sharding(text)
    return (
        [[str(cell.style).split(" on ")[1] for cell in column._cells] for column in table.columns],
        console,
        table,
    )


@pytest.mark.parametrize("tiles", [(4, 2), (8, 8), (2, 4), (16, 1), (1, 9)])
def test_neighbours_have_different_colours(tiles, capsys):
    columns, _, _ = colours(f"{{devices=[{tiles[0]},{tiles[1]}]<=[{tiles[0] * tiles[1]}]}}")
    grid = np.array(columns).T
    assert grid.shape == tiles
    assert (grid[1:] != grid[:-1]).all() and (grid[:, 1:] != grid[:, :-1]).all()


def test_no_colour_means_none(capsys):
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(visualize.visualize_sharding("{devices=[2,2]<=[4]}", use_color=False))
    assert "\x1b[" not in console.file.getvalue()
    console.print(visualize.visualize_sharding("{devices=[2,2]<=[4]}"))
    assert "\x1b[" in console.file.getvalue()


def test_width_and_scale(capsys):
    def width(**kwargs):
        visualize.visualize_sharding("{devices=[1]0}", use_color=False, **kwargs)
        drawn = capsys.readouterr().out.splitlines()
        return len(drawn[0]) - 2, len(drawn) - 2

    assert width() == (9, 1) and width(min_width=20) == (20, 1)
    assert width(scale=3.0) == (27, 5)
    assert width(min_width=2, max_width=4)[0] == 4
    for bad in ({"scale": 0}, {"min_width": 0}, {"min_width": 9, "max_width": 8}):
        with pytest.raises(
            ValueError,
            match=r"takes a scale above 0 and 0 < min_width <= max_width; got scale="
            r".*Leave them out",
        ):
            width(**bad)


BAD = [
    ("", "a sharding is shown from XLA's text of it; got ''"),
    ("{devices=[2,2]}", "a sharding is shown from XLA's text"),
    ("{devices=[2]0,1", "a sharding is shown from XLA's text"),
    ("{devices=[2]0,1 last_tile_dims={other}}", "a sharding is shown from XLA's text"),
    (7, "got 7"),
    ("{devices=[2,2]0,1,2}", "4 places for 3 different devices"),
    ("{devices=[2]1,1}", "2 places for 1 different devices"),
    ("{devices=[0]0}", "0 places"),
    ("{devices=[4]<=[2,2]T(0,0)}", r"T\(\.\.\.\) of a sharding permutes.*with 2 sizes"),
    ("{devices=[4]<=[2,2]T(1,0,2)}", r"T\(\.\.\.\) of a sharding permutes"),
    ("{devices=[8]<=[4]}", "8 places for 4 different devices"),
    (
        "{devices=[1,1,1,2]0,1}",
        r"up to 3 dims; got .* of 4 dims\. Read tensor\.sharding\.tile_assignment",
    ),
]


@pytest.mark.parametrize(("text", "match"), BAD)
def test_bad_text_is_refused(text, match):
    with pytest.raises(spmd.errors.PartitionSpecError, match=match):
        visualize.visualize_sharding(text)


def test_without_rich_it_says_how_to_install_it(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "rich" else found(name, *rest),
    )
    imports = builtins.__import__

    def without(name, *rest, **kwargs):
        assert not name.startswith("rich")
        return imports(name, *rest, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="pip install rich"):
        visualize.visualize_sharding("{replicated}")
