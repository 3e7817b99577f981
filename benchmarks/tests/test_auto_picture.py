"""The guide's picture has the dims and the axes of a search."""

from matplotlib.figure import Figure

from benchmarks import auto_picture


def test_the_picture_shows_what_is_chosen() -> None:
    figure = Figure()
    auto_picture.Drawing(figure, auto_picture.chosen()).draw()
    (axes,) = figure.axes
    texts = [text.get_text() for text in axes.texts if text.get_text()]
    operations = [text for text in texts if text in auto_picture.SHORT.values()]
    assert operations == ["norm", "@", "gelu", "@", "+", "mean"]
    dims = [text.partition("\n")[0] for text in texts if text not in operations]
    sizes = (auto_picture.ROWS, auto_picture.WIDTH, auto_picture.HIDDEN)
    rows, width, hidden = (f"{size:,}" for size in sizes)
    norm, up, down = [width], [hidden, width], [width, hidden]
    before, inside, after = [rows, width], [rows, hidden], [rows, width]
    shown = [before, norm, before, up, inside, inside, down, after, after]
    assert dims == [size for tensor in shown for size in tensor]
    split = [text for text in texts if "over" in text]
    assert any(text.startswith(f"{hidden}\n") for text in split)
    assert any(text.startswith(f"{rows}\n") for text in split)
