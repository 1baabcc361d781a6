"""Collectives of programs that are known, and of a training step at two depths."""

# ruff: noqa: E501

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nag_jax.sharding.collectives import collectives, totals

HERE = Path(__file__).parent
LOOP = """
%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}
%body (carry: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %one = f32[8,4]{1,0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add, metadata={op_name="a/b"}
  %none = f32[8,4]{1,0} all-reduce(%x), replica_groups={{0},{1},{2},{3}}, to_apply=%add
}
%condition (carry: (s32[], f32[8,4])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}
%fused_computation.1 (x: f32[4,4]) -> (f32[8,4], u32[]) {
  %begin = f32[8,4]{1,0} all-gather(%x), channel_id=7, replica_groups=[2,2]<=[4], dimensions={0}
}
%async_collective_fusion.2 (x: (f32[8,4], u32[])) -> f32[8,4] {
  %end = f32[8,4]{1,0} all-gather(%x), channel_id=7, replica_groups=[2,2]<=[4], dimensions={0}
}
%branch (x: f32[8,4]) -> f32[8,4] {
  ROOT %rare = f32[8,4]{1,0} all-gather(%x), replica_groups=[1,4]<=[4], dimensions={0}
}
ENTRY %main (x: f32[8,4]) -> f32[8,4] {
  %choice = f32[8,4]{1,0} conditional(%i, %x, %x), branch_computations={%other, %branch}
  %loop = (s32[], f32[8,4]) while(%start), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"6"}}
  %two = bf16[8,4]{1,0} all-gather(%y), replica_groups=[1,4]<=[4], dimensions={0}
  %three = f32[2,4]{1,0} reduce-scatter(%y), replica_groups=mesh['a'=2,'b'=2] {'a','b'}, dimensions={0}
  %four = (f32[8,4], f32[8,4]) all-reduce(%y, %z), replica_groups=mesh['a'=4], device_ids=([2,2]T(1,0)) {'a':(1)2}
  %begun = (f32[8,4], u32[]) fusion(%x), kind=kCustom, calls=%fused_computation.1
  %ended = f32[8,4]{1,0} fusion(%begun), kind=kCustom, calls=%async_collective_fusion.2
  %five = f32[2,4]{1,0} collective-permute(%y), source_target_pairs={{0,1},{1,0}}
}
"""


def test_a_program_read_from_its_text():
    """Groups in all spellings, loops as often as they run, fused parts once, none of one."""
    found = collectives(LOOP, 4)
    assert [one.conditional for one in found] == [True] + 6 * [False]
    assert [(one.kind, one.devices, one.bytes, one.times) for one in found] == [
        ("all-gather", 4, 96, 1),
        ("all-reduce", 2, 128, 6),
        ("all-gather", 4, 48, 1),
        ("reduce-scatter", 4, 96, 1),
        ("all-reduce", 2, 256, 1),
        ("all-gather", 2, 64, 1),
        ("collective-permute", 4, 32, 1),
    ]
    assert totals(found)["all-reduce"] == (7, 6 * 128 + 256)
    assert found[1].source == "a/b"


@pytest.mark.parametrize(
    "line, size",
    [
        ("(f32[8,4]{1,0}, f32[8,4]{1,0}, u32[], u32[]) collective-permute-start(%x)", 128),
        (
            "((f32[8,4]{1,0}), f32[2,4]{1,0}) reduce-scatter-start(%x), replica_groups={{0,1,2,3}}",
            96,
        ),
        ("(f32[2,4]{1,0:T(8,128)}, f32[8,4]{1,0}) all-gather-start(%x), replica_groups={}", 96),
        ("((f32[8,4]), f32[8,4], u32[]) all-to-all-start(%x), replica_groups={}", 96),
        ("f32[8,4]{1,0} all-reduce-start(%x), replica_groups={}, to_apply=%add", 192),
        ("f8e4m3fn[8,4]{1,0} all-gather(%x), replica_groups={}", 24),
    ],
)
def test_asynchronous_collectives_and_small_floats(line, size):
    """Their shapes hold inputs, outputs and more; outputs count."""
    text = f"ENTRY %main (x: f32[8,4]) -> f32[8,4] {{\n  %one = {line}\n}}\n"
    assert [one.bytes for one in collectives(text, 4)] == [size]


COUNTED = """
%body (carry: (u32[], f32[8,4])) -> (u32[], f32[8,4]) {
  %carry = (u32[]{:T(128)}, /*index=1*/f32[8,4]{1,0:T(8,128)}) parameter(0)
  %i = u32[]{:T(128)} get-tuple-element(%carry), index=0
  %by = u32[]{:T(128)} constant(2)
  %more = u32[]{:T(128)} add(%i, %by), metadata={op_name="a"}
  %sent = f32[8,4]{1,0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}, metadata={op_name="a/b"}
  ROOT %next = (u32[]{:T(128)}, /*index=1*/f32[8,4]{1,0:T(8,128)}) tuple(%more, /*index=1*/%sent)
}
%condition (carry: (u32[], f32[8,4])) -> pred[] {
  %carry = (u32[]{:T(128)}, /*index=1*/f32[8,4]{1,0:T(8,128)}) parameter(0)
  %n = u32[]{:T(128)} constant(9)
  %i = u32[]{:T(128)} get-tuple-element(%carry), index=0
  ROOT %less = pred[]{:T(512)} compare(%i, %n), direction=LT, metadata={op_name="a"}
}
ENTRY %main (x: f32[8,4]) -> f32[8,4] {
  %zero = u32[]{:T(128)} constant(0)
  %copied = u32[]{:T(128)} copy(%zero)
  %start = (u32[]{:T(128)}, /*index=1*/f32[8,4]{1,0:T(8,128)}) tuple(%copied, /*index=1*/%x)
  %loop = (u32[]{:T(128)}, /*index=1*/f32[8,4]{1,0:T(8,128)}) while(%start), condition=%condition, body=%body
  %two = bf16[8,4]{1,0} all-gather(%y), replica_groups=[1,4]<=[4], dimensions={0}
}
"""


@pytest.mark.parametrize(
    "old, new, times",
    [
        ("", "", 5),  # 0, 2, 4, 6, 8: a loop that the partitioner made
        ("constant(0)", "constant(3)", 3),
        ("u32[]", "s32[]", 5),
        ("%by = u32[]{:T(128)} constant(2)", "%by = u32[]{:T(128)} constant(1)", 9),
        ("constant(9)", "constant(-1)", 0),
        ("constant(9)", "parameter(1)", None),  # as often as the data say
        ("constant(0)", "parameter(1)", None),
        ("add(%i, %by)", "multiply(%i, %by)", None),
        ("direction=LT", "direction=NE", None),
    ],
)
def test_a_loop_counted_by_its_counter(old, new, times):
    """Compiled for TPU a loop does not say how often it runs, but its counter does."""
    found = collectives(COUNTED.replace(old, new), 4)
    assert [(one.kind, one.times) for one in found] == [
        ("collective-permute", times),
        ("all-gather", 1),
    ]


def test_what_cannot_be_counted_is_in_no_total():
    found = collectives(LOOP.replace("known_trip_count", "other"), 4)
    assert [one.times for one in found] == [1, None, 1, 1, 1, 1, 1]
    with pytest.raises(ValueError, match="unknown number of iterations around all-reduce of a/b"):
        totals(found)
    with pytest.raises(ValueError, match="no ENTRY"):
        collectives("nothing", 4)


@pytest.mark.parametrize("case", ["programs"])
def test_compiled_programs(case):
    """Programs of JAX with known collectives; a step's are in `tests/slow/test_all_meshes.py`."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE.parent)]),
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "count_collectives.py"), case],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
