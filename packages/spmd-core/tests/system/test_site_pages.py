"""The parts of the site that are made from sources; `scripts/docs.sh` builds the whole."""

import re
from pathlib import Path

import pytest

import spmd_core as spmd
from scripts.site_pages import PAGES, docstrings, messages, settings, text_forms

ROOT = Path(__file__).parents[4]


def test_a_page_names_each_part_that_is_made():
    pages = [path.read_text() for path in (ROOT / "docs").rglob("*.md")]
    named = [
        name for page in pages for name in re.findall(r"^<!-- made by: (\w+) -->$", page, re.M)
    ]
    assert sorted(named) == sorted(PAGES)


def test_every_public_name_has_an_entry():
    text = "\n".join(PAGES[name]() for name in PAGES if name.startswith("api"))
    modules = {name for name in spmd.__all__ if f"## spmd_core.{name}\n" in text}
    others = {"errors", "config"}  # which have pages of their own
    missing = {
        name
        for name in spmd.__all__
        if f"}} spmd_core.{name}" not in text and name not in modules | others
    }
    assert missing == set()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a mesh has an axis; got 0. Name one.", ("a mesh has an axis", "0", "Name one.")),
        ("a mesh has an axis; got 0.", ("a mesh has an axis", "0", "")),
        (
            "nothing is pending; {n} are. Call it first.",
            ("nothing is pending", "{n} are", "Call it first."),
        ),
        ("torch's own words.", ("torch's own words.", "", "")),
    ],
)
def test_a_message_is_its_rule_what_was_got_and_what_to_do(text, parts):
    assert messages.Message("MeshError", text, "x.py").parts() == parts


def test_the_texts_of_raised_errors_are_found():
    """Those that a call makes have the parts that the glossary shows, in the same order."""
    found = [one for one in messages.messages() if one.kind == "MeshError"]
    with pytest.raises(spmd.errors.MeshError) as raised:
        spmd.Mesh(range(8), (3, 2), ("x", "y"))
    patterns = [re.escape(re.sub(r"‹[^›]*›", "\0", one.text)).replace("\0", ".*") for one in found]
    assert any(re.fullmatch(pattern, str(raised.value), re.S) for pattern in patterns)


SOURCE = """
WHO = "nobody"
def refuse(what, instead):
    raise MeshError(f"a mesh has axes; got {what}. {instead}")
def advice(a):
    if a:
        return "Name one."
    return f"Name one of {a}."
def f(a, b):
    found = "one"
    if a:
        found += " more"
    elif b:
        found = str(b)
    raise MeshError(f"{'rule of ' if a else ''}the {WHO}; got {found}. " + advice(a))
def g(a):
    refuse(f"a list of {a.shape}", "Give a tuple." if a else "Give an int.")
    warnings.warn("a is b; got {}. Do c.".format(a))
"""


def test_texts_of_all_branches_helpers_and_refusals_are_read(tmp_path, monkeypatch):
    (tmp_path / "one.py").write_text(SOURCE)
    monkeypatch.setattr(messages, "SOURCES", {"one": tmp_path})
    found = {(one.kind, one.text) for one in messages.messages.__wrapped__()}
    assert found == {
        *(
            ("MeshError", f"‹…›the nobody; got {got}. {cure}")
            for got in ("one", "one more", "‹found›")
            for cure in ("Name one.", "Name one of ‹a›.")
        ),
        ("MeshError", "a mesh has axes; got a list of ‹shape›. Give a tuple."),
        ("MeshError", "a mesh has axes; got a list of ‹shape›. Give an int."),
        ("Warning", "a is b; got ‹a›. Do c."),
    }


def test_messages_of_our_own_classes_say_what_to_do():
    own = {name for name in vars(spmd.errors) if name.endswith("Error")}
    bare = [one.text for one in messages.messages() if one.kind in own and not one.parts()[2]]
    assert bare == []


def test_each_setting_and_variable_is_described():
    made, page = settings.page(), (ROOT / "docs/reference/settings.md").read_text()
    for name in vars(spmd.config):
        assert f"spmd_core.config.{name}\n" in made
    assert [name for name in settings.variables_read() if f"`{name}" not in page] == []


def test_the_list_of_pages_has_each_ones_first_sentence(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("---\na: 1\n---\n\n# Title\n\n```python\nx = 1.\n```\n\nOne is\nsaid. Two.\n")
    assert text_forms._summary(page) == "One is said."
    assert text_forms._first_paragraph(page) == "One is said. Two."


def test_docstrings_become_markdown():
    text = docstrings.markdown(
        "Adds *args.\n\n    a table\n\nArgs:\n    x: a number,\n        or two.\n\n"
        "Example:\n    >>> 1 + 1\n    2\n"
    )
    assert text.splitlines() == [
        r"Adds \*args.", "", "    a table", "", "**Args**", "", "- `x`: a number,", "  or two.",
        "", "**Example**", "", "```pycon", ">>> 1 + 1", "2", "```",
    ]  # fmt: skip
