"""Reading HLO text: types, computations and their executions, in each form that XLA prints."""

import re

import pytest

from spmd_core.debugging import hlo_collectives, hlo_text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f32[8,4]{1,0}", 128),
        ("f32[]", 4),
        ("bf16[3]{0}", 6),
        ("pred[5]", 5),
        ("s4[8]", 4),
        ("f8e4m3fn[8,2]{1,0:T(8,128)}", 16),
        ("c64[2]", 16),
        ("f32[0,3]", 0),
        ("f32[<=4]", 16),
        ("(f32[2]{0}, (u32[], s64[3]))", 36),
        ("token[]", 0),
    ],
)
def test_bytes(text, expected):
    assert hlo_text.num_bytes(text) == expected


# As libtpu prints a loop: without its length, the step behind the tuple, numbers behind copies.
TPU_LOOP = """HloModule m

%body (arg: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {
  %arg = (s32[]{:T(128)}, f32[8]{0:T(8,128)}, s32[]{:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%arg), index=0
  %i.copy = s32[]{:T(128)S(6)} copy(%i)
  %step = s32[]{:T(128)} get-tuple-element(%arg), index=2
  %next = s32[]{:T(128)} add(%i.copy, %step)
  %x = f32[8]{0} get-tuple-element(%arg), index=1
  %sum = f32[8]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
  ROOT %out = (s32[]{:T(128)}, f32[8]{0:T(8,128)}, s32[]{:T(128)}) tuple(%next, %sum, %step)
}

%condition (arg.1: (s32[], f32[8], s32[])) -> pred[] {
  %limit = s32[]{:T(128)} constant(10)
  %arg.1 = (s32[]{:T(128)}, f32[8]{0:T(8,128)}, s32[]{:T(128)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%arg.1), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i.1, %limit), direction=LT
}

ENTRY %main (x.1: f32[8]) -> f32[8] {
  %x.1 = f32[8]{0} parameter(0)
  %zero = s32[]{:T(128)} constant(0)
  %zero.copy = s32[]{:T(128)} copy(%zero)
  %one = s32[]{:T(128)} constant(1)
  %start = (s32[]{:T(128)}, f32[8]{0}, s32[]{:T(128)}) tuple(%zero.copy, %x.1, %one)
  %loop = (s32[], f32[8]{0}, s32[]) while(%start), condition=%condition, body=%body
  ROOT %result = f32[8]{0} get-tuple-element(%loop), index=1
}
"""


def test_an_element_in_its_short_form_is_the_same_instruction():
    """XLA prints elements of tuples in both forms."""
    short = re.sub(r"  %\S+ = \S+ get-tuple-element\(%(?:arg\S*)\), index=\d\n", "", TPU_LOOP)
    names = {"i": "arg#0", "i.1": "arg.1#0", "step": "arg#2", "x": "arg#1"}
    for name, element in names.items():
        short = re.sub(rf"([(\s])%{re.escape(name)}(?=[),])", rf"\1%{element}", short)
    assert short.count("#") == 5
    assert short.count("get-tuple-element") == 1
    computations, entry = hlo_text.parse(short)
    assert hlo_text.executions(computations, entry)["body"] == 10
    (reduced,) = hlo_collectives.collectives(short, 2)
    assert (reduced.operand_bytes, reduced.executions) == (32, 10)


@pytest.mark.parametrize("name", ["%next#0", "%later#1"])
def test_an_element_of_what_is_no_tuple_is_refused(name):
    text = TPU_LOOP.replace("all-reduce(%x)", f"all-reduce({name})")
    with pytest.raises(ValueError, match=f"`{name[1:]}` in XLA's text reads an element of"):
        hlo_text.parse(text)


@pytest.mark.parametrize(
    ("old", "new", "length"),
    [
        ("", "", 10),
        ("constant(1)", "constant(3)", 4),
        ("%zero = s32[]{:T(128)} constant(0)", "%zero = s32[]{:T(128)} constant(-2)", 12),
        ("constant(10)", "constant(-10)", 0),
        ("add(%i.copy, %step)", "add(%step, %i.copy)", 10),
        # What depends on data, or is counted in another way.
        ("direction=LT", "direction=NE", None),
        ("add(%i.copy, %step)", "multiply(%i.copy, %step)", None),
        ("add(%i.copy, %step)", "add(%i.copy, %i.copy)", None),
        ("tuple(%next, %sum, %step)", "tuple(%next, %sum, %next)", None),
        ("constant(1)", "constant(0)", None),
        ("%one = s32[]{:T(128)} constant(1)", "%one = s32[]{:T(128)} bitcast-convert(%x.1)", None),
        ("%limit = s32[]{:T(128)} constant(10)", "%limit = s32[]{:T(128)} infeed()", None),
    ],
)
def test_a_tpus_loop_is_counted_where_its_length_is_plain(
    old: str, new: str, length: int | None
) -> None:
    text = TPU_LOOP.replace(old, new)
    assert text != TPU_LOOP or old == new
    computations, entry = hlo_text.parse(text)
    counts = hlo_text.executions(computations, entry)
    assert counts["body"] == length
    assert counts["condition"] == (None if length is None else length + 1)
    if length:
        (reduced,) = hlo_collectives.collectives(text, 2)
        assert reduced.executions == length


def test_attributes_with_line_breaks_belong_to_their_instruction():
    text = """\
HloModule f

%body (p: f32[8]) -> f32[8] {
  ROOT %p = f32[8]{0} parameter(0)
}, execution_thread="host"

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %k = f32[8]{0} custom-call(%a), frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512}"
}}, metadata={op_name="jit(f)/kernel"}
  ROOT %n = f32[8]{0} negate(%k)
}
"""
    computations, entry = hlo_text.parse(text)
    assert list(computations) == ["body", "main"]
    assert list(computations[entry]) == ["a", "k", "n"]
    assert computations[entry]["k"].op_name == "jit(f)/kernel"
    assert computations[entry]["n"].operands == ("k",)
