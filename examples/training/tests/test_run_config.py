"""What the options of every recipe must satisfy together, and where --help lists them."""

from dataclasses import dataclass, fields

import pytest

from examples.training.knobs import KnobError, knob, parser_of
from examples.training.run_config import RunConfig, check_run_config


@dataclass(frozen=True)
class Config(RunConfig):
    width: int = knob(8, "size of the hidden state")
    clip: float = knob(0.5, "clip gradients to this norm")


@pytest.mark.parametrize(
    ("options", "message", "mended"),
    [
        ({"resume": "4"}, "got 4 and no --checkpoint. Add for", {"checkpoint": "run"}),
        ({"checkpoint": "run", "resume": "-1"}, "or auto; got '-1'. Leave it out", {"resume": "1"}),
        ({"deadline": 0.0}, "--deadline must be at least 0.1; got 0.0", {"deadline": 9.0}),
        ({"save_every": 2}, "got 2 and no --checkpoint", {"checkpoint": "run"}),
        ({"device": "cpu", "mesh": "x=2"}, "got --device cpu with --mesh 'x=2'", {"device": "xla"}),
        ({"devices": 8}, "Add for instance --mesh x=8.", {"mesh": "x=8"}),
        ({"steps": 0}, "--steps must be at least 1; got 0", {"steps": 1}),
    ],
)
def test_options_that_do_not_fit_together(options: dict, message: str, mended: dict) -> None:
    with pytest.raises(KnobError) as error:
        check_run_config(Config(**options), axis="x")
    assert message in str(error.value)
    check_run_config(Config(**{**options, **mended}), axis="x")


def test_help_lists_the_recipes_own_options_first() -> None:
    text = parser_of(Config, module="a.recipe", usage="A recipe.").format_help()
    listed = text[text.index("options:") :]
    places = {
        field.name: listed.index(f"--{field.name.replace('_', '-')} ")
        for field in fields(Config)
        if field.name not in ("capture", "progress")  # which have a form that begins with --no-
    }
    assert max(places["width"], places["clip"]) < min(
        place for name, place in places.items() if name not in ("width", "clip")
    )
    assert "clip gradients to this norm (default: 0.5)" in " ".join(listed.split())
