"""planner/buffer_text.py: what XLA writes of a program's memory, for TPU and CPU."""

import numpy as np
import pytest

import spmd_core as spmd
from spmd_core.planner import buffer_text

# Shortened texts of XLA: a parameter that a result takes over, a constant, temporaries that share
# an allocation over time, and memory on a TPU's chip (color 3).
TPU = """\
BufferAssignment:
allocation 0: size 512, page 0, thread-local:
 value: <2 add.1 @0> (size=512,offset=0): f32[]{:T(128)}
allocation 1: size 4096, page 0, parameter 1, shape |f32[32,32]| at ShapeIndex {}, maybe-live-out:
 value: <9 param.1 @0> (size=4096,offset=0): f32[32,32]{1,0:T(8,128)}
 value: <12 fusion.3 @0> (size=4096,offset=0): f32[32,32]{1,0:T(8,128)}
allocation 2: size 1024, page 0, constant:
 value: <4 constant.7 @0> (size=1024,offset=0): s32[256]{0:T(256)}
allocation 3: size 64, page 0, output shape is |(f32[32,32], f32[])|, maybe-live-out:
 value: <13 tuple{} @0> (size=64,offset=0): (f32[32,32]{1,0:T(8,128)}, f32[]{:T(128)})
allocation 4: size 10000, page 0, preallocated-temp:
 value: <5 fusion.1{0} @0> (size=4000,offset=0): f32[1000]{0:T(128)}
 value: <6 fusion.2 @0> (size=4000,offset=4000): bf16[2000]{0:T(128)(2,1)}
 value: <7 negate @0> (size=4000,offset=4000): bf16[2000]{0:T(128)(2,1)}
 value: <8 dot.5 @0> (size=6000,offset=0): f32[1500]{0:T(128)}
allocation 5: size 134217728, color 3, page 0, preallocated-temp:
 value: <10 copy-start{0} @3> (size=4096,offset=0): f32[32,32]{1,0:T(8,128)S(3)}

Total bytes used: 15000 (14.6KiB)
"""
RANGES = """\
HloLiveRange (max 9):
  InstructionSequence:
    0:param.1
  BufferLiveRange:
    param.1{}:0-9
    fusion.1{0}:1-3
    fusion.2{}:2-3
    negate{}:3-5
    dot.5{}:6-8
  Live ranges at 3 (peak):
    fusion.1{0}: 4000 bytes (cumulative: 4000 bytes)
"""


@pytest.fixture
def buffers(tmp_path):
    name = "module_0000.jit_f.cl_1.after_optimizations"
    (tmp_path / f"{name}-buffer-assignment.txt").write_text(TPU)
    (tmp_path / f"{name}-live-range.txt").write_text(RANGES)
    return buffer_text.read(tmp_path)


def test_only_main_memory_that_the_program_holds_counts(buffers):
    assert [a.size for a in buffers.allocations] == [4096, 1024, 64, 10000]
    assert buffers.num_bytes == 4096 + 1024 + 64 + 10000


def test_what_allocations_are_for(buffers):
    parameter, constant, result, temporary = buffers.allocations
    assert (parameter.parameter, parameter.is_output) == (1, True)
    assert (constant.is_constant, constant.parameter) == (True, None)
    assert (result.is_output, result.parameter) == (True, None)
    assert buffers.temporaries == (temporary,)
    assert parameter.values[0].shape == "f32[32,32]"
    assert temporary.values[0].instruction == "fusion.1"


def test_arguments_and_results(buffers):
    assert buffers.argument_bytes == 4096
    assert (buffers.result_bytes, buffers.new_result_bytes) == (4096 + 64, 64)


def test_the_peak_is_where_most_is_alive_and_an_update_in_place_counts_once(buffers):
    alive = buffers.live_at_peak()
    assert [value.size for value in alive] == [4000, 4000]
    assert {value.offset for value in alive} == {0, 4000}


@pytest.mark.parametrize("seed", range(8))
def test_what_is_alive_at_the_peak_takes_the_most_bytes(seed):
    """By numpy, from the bytes of all places at each instruction."""
    draws = np.random.default_rng(seed)
    places = [(64 * i, int(size)) for i, size in enumerate(draws.integers(1, 64, size=6))]
    values, ranges = [], {}
    for i, place in enumerate(draws.integers(6, size=20)):
        offset, size = places[place]
        values.append(buffer_text.HloValue(f"v{i}", size, offset, "u8[]"))
        start = int(draws.integers(40))
        ranges[f"v{i}"] = (start, start + int(draws.integers(12)))
    held = np.zeros((6, 52), dtype=bool)
    for value in values:
        start, end = ranges[value.name]
        held[value.offset // 64, start : end + 1] = True
    sizes = held.T @ [size for _, size in places]
    temporary = buffer_text.Allocation(384, None, False, False, tuple(values))
    alive = buffer_text.Buffers((temporary,), ranges).live_at_peak()
    assert sum(value.size for value in alive) == sizes.max()
    peaks = np.flatnonzero(sizes == sizes.max())
    places_at_peak = [tuple(np.flatnonzero(held[:, t])) for t in peaks]
    assert tuple(sorted(value.offset // 64 for value in alive)) in places_at_peak
    assert [value.size for value in alive] == sorted((v.size for v in alive), reverse=True)


def test_a_compiler_that_writes_nothing(tmp_path):
    with pytest.raises(
        spmd.errors.PlanError, match=r"XLA wrote none into .* Leave xla_dump_to out of"
    ):
        buffer_text.read(tmp_path)


def test_without_live_ranges_there_is_no_peak(tmp_path):
    (tmp_path / "m.after_optimizations-buffer-assignment.txt").write_text(TPU)
    assert buffer_text.read(tmp_path).live_at_peak() == ()


@pytest.mark.parametrize(
    ("kind", "argument"),
    [
        ("parameter 7, shape |f32[8]| at ShapeIndex {}", 7),
        ("parameter 7", 7),
        ("parameter 0, shape |f32[2,128]| at ShapeIndex {12}", 12),
        ("parameter 0, shape |(f64[3], f32[2,128])|", -1),
    ],
)
def test_arguments_by_themselves_and_in_a_tuple(tmp_path, kind, argument):
    """From 2,001 arguments on, a TPU's program gets them as one tuple."""
    text = TPU.replace("parameter 1, shape |f32[32,32]| at ShapeIndex {}", kind)
    (tmp_path / "m.after_optimizations-buffer-assignment.txt").write_text(text)
    (tmp_path / "m.after_optimizations-live-range.txt").write_text(RANGES)
    assert buffer_text.read(tmp_path).allocations[0].parameter == argument
