"""Collectives in HLO text: bytes, groups and executions, in each form that XLA prints."""

import numpy as np
import pytest

from spmd_core.debugging import hlo_collectives
from spmd_core.sharding.xla_text import iota

GROUPS = [
    ("replica_groups={{0,1},{2,3}}, use_global_device_ids=true", 4, ((0, 1), (2, 3))),
    ("replica_groups={{0}, {1}}", 2, ((0,), (1,))),
    ("replica_groups={}, channel_id=1", 4, ((0, 1, 2, 3),)),
    ("channel_id=1", 3, ((0, 1, 2),)),
    ("replica_groups=[2,4]<=[8], dimensions={0}", 8, ((0, 1, 2, 3), (4, 5, 6, 7))),
    ("replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}", 8, ((0, 2, 4, 6), (1, 3, 5, 7))),
    ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", 8, ((0, 2), (1, 3), (4, 6), (5, 7))),
    (
        "replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=2] {'axis_0'}, x=1",
        8,
        ((0, 2, 4, 6), (1, 3, 5, 7)),
    ),
    ("replica_groups=mesh['a'=4,'b'=2] {'b'}", 8, ((0, 1), (2, 3), (4, 5), (6, 7))),
    ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}", 4, ((0, 1, 2, 3),)),
    (
        "replica_groups=mesh['a'=2,'b'=4], device_ids=([2,2,2]T(0,2,1)) {'b':(2)2}",
        8,
        ((0, 2), (1, 3), (4, 6), (5, 7)),
    ),
    ("replica_groups=mesh['a'=8] {'a':(1)2}", 8, ((0, 4), (1, 5), (2, 6), (3, 7))),
    ("replica_groups=mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}", 4, ((3, 1), (2, 0))),
    ("replica_groups=something_new(4), x=1", 8, None),
]


@pytest.mark.parametrize(("attributes", "num", "expected"), GROUPS, ids=[g[0][:60] for g in GROUPS])
def test_groups(attributes, num, expected):
    groups, _ = hlo_collectives.replica_groups(f", {attributes}", num)
    assert (None if groups is None else {frozenset(g) for g in groups}) == (
        None if expected is None else {frozenset(g) for g in expected}
    )


def test_the_iota_form_is_numpys():
    table = iota((4, 2), (2, 2, 2), (2, 0, 1))
    assert np.array_equal(table, np.arange(8).reshape(2, 2, 2).transpose(2, 0, 1).reshape(4, 2))


AN_MM = 'metadata={op_name="jit(f)/aten::mm#2/x.py:1/dot"}'
A_SUM = 'metadata={op_name="jit(f)/aten::sum/reduce" stack_frame_id=1}'
# HLO as compilers for accelerators print it: asynchronous forms, loops, branches, tiled layouts.
MODULE = """HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%async_computation (p: f32[64]) -> f32[8] {
  %p = f32[64]{0} parameter(0)
  ROOT %reduce-scatter.1 = f32[8]{0:T(128)} reduce-scatter(%p), channel_id=7, \
replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%sum, METADATA_MM
}

%body (s: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %s = (s32[], f32[4,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[4,8]{1,0} get-tuple-element(%s), index=1
  %all-reduce.1 = f32[4,8]{1,0} all-reduce(%x), channel_id=1, \
replica_groups={{0,1}}, to_apply=%sum, METADATA_SUM
  ROOT %t = (s32[], f32[4,8]{1,0}) tuple(%i, %all-reduce.1)
}

%condition (s: (s32[], f32[4,8])) -> pred[] {
  %s.1 = (s32[], f32[4,8]{1,0}) parameter(0)
  ROOT %p.1 = pred[] constant(true)
}

%unknown_body (s: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %s.2 = (s32[], f32[4,8]{1,0}) parameter(0)
  %x.2 = f32[4,8]{1,0} get-tuple-element(%s.2), index=1
  %all-to-all.1 = (f32[4,1]{1,0}, /*index=1*/f32[4,1]{1,0}) all-to-all(%x.2, %x.2), \
replica_groups={{0,1}}
  ROOT %w.2 = (s32[], f32[4,8]{1,0}) while(%s.2), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"3"},"x":"{"}
}

%branch (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  ROOT %broadcast = f32[8]{0} collective-broadcast(%q), replica_groups={{0,1}}
}

%never (q: f32[8]) -> f32[8] {
  %q.1 = f32[8]{0} parameter(0)
  ROOT %all-reduce.9 = f32[8]{0} all-reduce(%q.1), replica_groups={}, to_apply=%sum
}

ENTRY %main (leaf: f32[8]) -> f32[8] {
  %leaf = f32[8]{0} parameter(0), metadata={op_name="leaves[0]"}
  %big = f32[64]{0} broadcast(%leaf), dimensions={}
  %ag = (f32[8]{0}, f32[64]{0}) all-gather-start(%leaf), channel_id=2, \
replica_groups=[1,8]<=[8], dimensions={0}, metadata={op_name="leaves[0]"}
  %ag.done = f32[64]{0} all-gather-done(%ag)
  %mul = f32[64]{0} multiply(%ag, %ag), metadata={op_name="jit(f)/aten::mul/mul"}
  %cp = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%leaf), \
source_target_pairs={{0,1},{1,0}}
  %cp.done = f32[8]{0} collective-permute-done(%cp)
  %ar = f32[64]{0} all-reduce-start(%big), replica_groups={{0,1}}, to_apply=%sum
  %ar.done = f32[64]{0} all-reduce-done(%ar)
  %rs = ((f32[64]{0}), f32[8]{0}, s32[]) async-start(%big), calls=%async_computation
  %rs.done = f32[8]{0} async-done(%rs)
  %start = (s32[], f32[4,8]{1,0}) tuple(%leaf, %big)
  %w = (s32[], f32[4,8]{1,0}) while(%start), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
  %w.1 = (s32[], f32[4,8]{1,0}) while(%w), condition=%condition, body=%unknown_body
  ROOT %c = f32[8]{0} conditional(%leaf, %leaf, %leaf), branch_computations={%branch, %branch}
}
""".replace("METADATA_MM", AN_MM).replace("METADATA_SUM", A_SUM)


def test_collectives_of_a_module():
    found = {c.name: c for c in hlo_collectives.collectives(MODULE, 8)}
    assert {
        name: (c.kind, c.result_bytes, c.operand_bytes, c.executions) for name, c in found.items()
    } == {
        "ag": ("all-gather", 256, 32, 1),
        "cp": ("collective-permute", 32, 32, 1),
        "ar": ("all-reduce", 256, 256, 1),
        "reduce-scatter.1": ("reduce-scatter", 32, 256, 1),
        # Five times, and three times in each iteration of a loop of unknown length.
        "all-reduce.1": ("all-reduce", 128, 128, None),
        "all-to-all.1": ("all-to-all", 32, 256, None),
        "broadcast": ("collective-broadcast", 32, 32, None),
    }
    assert found["cp"].groups == ((0, 1), (1, 0)) and found["ar"].groups == ((0, 1),)
    # The collective's own name, or its reader's where the own name is that of an argument.
    assert found["reduce-scatter.1"].op_names == ("jit(f)/aten::mm#2/x.py:1/dot",)
    assert found["ag"].op_names == ("jit(f)/aten::mul/mul",)
    assert found["ar"].op_names == ()


SCATTERED = """\
HloModule m

%all-reduce-scatter.1 (input.1: f32[8,4]) -> f32[2,4] {
  %input.1 = f32[8,4]{1,0} parameter(0)
  %all-reduce.3 = f32[8,4]{1,0} all-reduce(%input.1), replica_groups={{0,1,2,3}}, to_apply=%add
  %partition-id.1 = u32[] partition-id()
  %constant.1 = u32[] constant(0)
  ROOT %dynamic-slice.1 = f32[2,4]{1,0} dynamic-slice(%all-reduce.3, %partition-id.1, %constant.1)
}

ENTRY %main (x: f32[8,4]) -> (f32[2,4], f32[8,4]) {
  %x = f32[8,4]{1,0} parameter(0)
  %all-reduce.4 = f32[8,4]{1,0} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add
  %fusion.1 = f32[2,4]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %t = (f32[2,4]{1,0}, f32[8,4]{1,0}) tuple(%fusion.1, %all-reduce.4)
}
"""


def test_a_tpus_all_reduce_of_which_a_part_is_kept_is_a_reduce_scatter():
    found = hlo_collectives.collectives(SCATTERED, 4)
    assert [(c.kind, c.operand_bytes, c.result_bytes, c.executions) for c in found] == [
        ("reduce-scatter", 128, 32, 1),
        ("all-reduce", 128, 128, 1),
    ]


# As libtpu prints a gather that goes on while a product is computed, and another gather.
IN_STEPS = """\
HloModule m

%fused_computation.1 (p.1: f32[2,4]) -> (f32[2,4], f32[8,4], u32[]) {
  %p.1 = f32[2,4]{1,0} parameter(0)
  %all-gather.1 = f32[8,4]{1,0} all-gather(%p.1), channel_id=5, replica_groups={{0,1,2,3}}, \
dimensions={0}, metadata={op_name="jit(f)/aten::t/transpose"}
  ROOT %custom-call.1 = (f32[2,4]{1,0}, f32[8,4]{1,0}, u32[]) custom-call(%p.1, %all-gather.1)
}

%async_collective_fusion.1 (p.2: f32[2,4], q.2: f32[4,4]) -> (f32[4,4], f32[8,4]) {
  %p.2 = f32[2,4]{1,0} parameter(0)
  %q.2 = f32[4,4]{1,0} parameter(1)
  %convolution.2 = f32[4,4]{1,0} convolution(%q.2, %q.2), dim_labels=bf_io->bf
  %all-gather.2 = f32[8,4]{1,0} all-gather(%p.2), channel_id=5, replica_groups={{0,1,2,3}}, \
dimensions={0}
  ROOT %t.2 = (f32[4,4]{1,0}, f32[8,4]{1,0}) tuple(%convolution.2, %all-gather.2)
}

%fused_computation.3 (p.3: f32[2,4]) -> f32[8,4] {
  %p.3 = f32[2,4]{1,0} parameter(0)
  ROOT %all-gather.3 = f32[8,4]{1,0} all-gather(%p.3), channel_id=5, replica_groups={{0,1,2,3}}, \
dimensions={0}
}

%fused_computation.4 (p.4: f32[2,4]) -> f32[8,4] {
  %p.4 = f32[2,4]{1,0} parameter(0)
  ROOT %all-gather.4 = f32[8,4]{1,0} all-gather(%p.4), channel_id=6, replica_groups={{0,1,2,3}}, \
dimensions={0}
}

ENTRY %main (x: f32[2,4], y: f32[4,4]) -> f32[8,4] {
  %x = f32[2,4]{1,0} parameter(0)
  %y = f32[4,4]{1,0} parameter(1)
  %async-collective-start = (f32[2,4]{1,0}, f32[8,4]{1,0}, u32[]) fusion(%x), kind=kCustom, \
calls=%fused_computation.1, metadata={op_name="jit(f)/aten::t/transpose"}
  %fusion.1 = (f32[4,4]{1,0}, f32[8,4]{1,0}) fusion(%x, %y), kind=kCustom, \
calls=%async_collective_fusion.1
  %async-collective-done = f32[8,4]{1,0} fusion(%x), kind=kCustom, calls=%fused_computation.3
  %fusion.4 = f32[8,4]{1,0} fusion(%x), kind=kCustom, calls=%fused_computation.4
  ROOT %add.1 = f32[8,4]{1,0} add(%async-collective-done, %fusion.4)
}
"""


def test_a_tpus_collective_in_several_steps_is_one():
    found = hlo_collectives.collectives(IN_STEPS, 4)
    assert [(c.name, c.kind, c.result_bytes, c.executions) for c in found] == [
        ("all-gather.1", "all-gather", 128, 1),
        ("all-gather.4", "all-gather", 128, 1),
    ]
    assert found[0].op_names == ("jit(f)/aten::t/transpose",)


def _transfer(name, kind, target, sent, received):
    """A send and a recv of the hosts between TPU slices."""
    named = (
        f'is_host_transfer=true, frontend_attributes={{_xla_host_transfer_rendezvous="{name}_0",'
        f'_xla_megascale_target={target},_xla_megascale_transfer_type="{kind}"}}'
    )
    return f"""\
  %send.{name} = ({sent}, u32[]{{:S(2)}}, token[]) send(%p, %token), channel_id=2, {named}
  %recv.{name} = ({received}, u32[]{{:S(2)}}, token[]) recv(%token), channel_id=1, {named}
  %done.{name} = ({received}, token[]) recv-done(%recv.{name}), channel_id=1
  %{name} = {received} get-tuple-element(%done.{name}), index=0
"""


def test_transfers_between_slices_are_collectives():
    product, listed = '"{1,2}x{0:3}"', "{{100000,200000},{100001,200001}}"
    text = f"""HloModule m

ENTRY %main (p: f32[8]) -> f32[16] {{
  %p = f32[8]{{0}} parameter(0)
  %token = token[] after-all()
{_transfer("g", "ALL_GATHER", product, "f32[8]{0}", "f32[16]{0}")}
{_transfer("s", "REDUCE_SCATTER", listed, "f32[8]{0}", "f32[4]{0}")}
{_transfer("n", "NEW_KIND", product, "f32[8]{0}", "f32[8]{0}")}
  %host = (f32[8]{{0}}, u32[]{{:S(2)}}, token[]) send(%p, %token), is_host_transfer=true
  %ar = f32[8]{{0}} all-reduce(%p), to_apply=%add
  ROOT %mm = f32[16]{{0}} add(%g, %g), metadata={{op_name="jit(f)/aten::add#1/x.py:2/add"}}
}}
"""
    found = {c.name: c for c in hlo_collectives.collectives(text, 4)}
    assert {name: (c.kind, c.operand_bytes, c.result_bytes) for name, c in found.items()} == {
        "send.g": ("all-gather", 32, 64),
        "send.s": ("reduce-scatter", 32, 16),
        "send.n": ("new-kind", 32, 32),
        "ar": ("all-reduce", 32, 32),
    }
    assert (found["send.g"].groups, found["send.g"].groups_text) == (None, product)
    assert found["send.s"].groups_text == listed
    assert found["send.g"].op_names == ("jit(f)/aten::add#1/x.py:2/add",)
    assert [c.is_between_slices for c in found.values()] == [True, True, True, False]
    assert found["ar"].groups == ((0, 1, 2, 3),)


def test_a_gather_of_the_partitioner_is_named_after_what_reads_it():
    """XLA names it after what it gathers, which does not need it."""
    text = """HloModule m

ENTRY %main (p: f32[2,8]) -> f32[4,8] {
  %p = f32[2,8]{1,0} parameter(0)
  %relu = f32[2,8]{1,0} maximum(%p, %p), metadata={op_name="jit(f)/aten::relu#0/x.py:1/max"}
  %GATHER
  ROOT %mm = f32[4,8]{1,0} dot(%gathered, %p), metadata={op_name="jit(f)/aten::mm#1/x.py:2/dot"}
}
"""
    attributes = (
        "dimensions={0}, replica_groups={{0,1}}%s, "
        'metadata={op_name="jit(f)/aten::relu#0/x.py:1/max"}'
    )
    inserted = attributes % ', frontend_attributes={is_spmd_generated="true"}'
    gathered = f"gathered = f32[4,8]{{1,0}} all-gather(%relu), {inserted}"
    started = (
        f"start = (f32[2,8], f32[4,8]) all-gather-start(%relu), {inserted}\n"
        f"  %gathered = f32[4,8]{{1,0}} all-gather-done(%start), {inserted}"
    )
    asked = f"gathered = f32[4,8]{{1,0}} all-gather(%relu), {attributes % ''}"
    for line, name in [
        (gathered, "jit(f)/aten::mm#1/x.py:2/dot"),
        (started, "jit(f)/aten::mm#1/x.py:2/dot"),
        (asked, "jit(f)/aten::relu#0/x.py:1/max"),
    ]:
        (found,) = hlo_collectives.collectives(text.replace("GATHER", line), 2)
        assert found.op_names == (name,), line
    # Nothing reads it but the result: its own name is the only one.
    (found,) = hlo_collectives.collectives(
        text.replace("GATHER", gathered).replace(', metadata={op_name="jit(f)/aten::mm', ", {"), 2
    )
    assert found.op_names == ("jit(f)/aten::relu#0/x.py:1/max",)


def test_loops_multiply():
    without_unknown = MODULE.replace(
        "body=%unknown_body", 'body=%unknown_body, backend_config={"known_trip_count":{"n":"2"}}'
    )
    counts = {c.name: c.executions for c in hlo_collectives.collectives(without_unknown, 8)}
    assert counts["all-reduce.1"] == 5 + 2 * 3 and counts["all-to-all.1"] == 2
