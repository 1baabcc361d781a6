"""Where a program's time goes, on the text of a small one."""

from rich.console import Console

from nag_jax.planning import report
from nag_jax.planning.places import Place, places
from nag_jax.planning.plans import Plan

TEXT = """HloModule jit_step

%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %inner = f32[8]{0} add(%p, %p), backend_config={"estimated_cycles":"99"}
}

%body (state: (s32[], f32[8])) -> (s32[], f32[8]) {
  %state = (s32[], f32[8]{0}) parameter(0)
  %counter = s32[] get-tuple-element(%state), index=0
  %x = f32[8]{0} get-tuple-element(%state), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%counter, %one)
  %f = f32[8]{0} fusion(%x), calls=%fused, FORWARD, backend_config={"estimated_cycles":"10"}
  %g = f32[8]{0} fusion(%f), calls=%fused, BACKWARD, backend_config={"estimated_cycles":"20"}
  %h = f32[8]{0} fusion(%g), calls=%fused, AGAIN, backend_config={"estimated_cycles":"1"}
  ROOT %out = (s32[], f32[8]{0}) tuple(%next, %h)
}

%condition (state: (s32[], f32[8])) -> pred[] {
  %state = (s32[], f32[8]{0}) parameter(0)
  %counter = s32[] get-tuple-element(%state), index=0
  %limit = s32[] constant(5)
  ROOT %go = pred[] compare(%counter, %limit), direction=LT
}

%branch (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %b = f32[8]{0} add(%p, %p), backend_config={"estimated_cycles":"1000"}
}

ENTRY %main (a: f32[8], which: pred[]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %which = pred[] parameter(1)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8]{0}) tuple(%zero, %a)
  %loop = (s32[], f32[8]{0}) while(%start), condition=%condition, body=%body
  %x = f32[8]{0} get-tuple-element(%loop), index=1
  %c = f32[8]{0} conditional(%which, %x, %x), true_computation=%branch, false_computation=%branch
  ROOT %copy = f32[8]{0} copy(%c), backend_config={"estimated_cycles":"7"}
}
"""
NAMES = {
    "FORWARD": "jit(step)/jvp()/while/body/attention/query/dot_general",
    "BACKWARD": "jit(step)/transpose(jvp())/while/body/checkpoint/attention/query/dot_general",
    "AGAIN": "jit(step)/transpose(jvp())/while/body/checkpoint/rematted_computation/add",
}
for short, whole in NAMES.items():
    TEXT = TEXT.replace(f" {short},", f' metadata={{op_name="{whole}"}},')


def test_operations_count_as_often_as_they_run():
    """What is fused is a part of its fusion, and branches may not run."""
    assert places(TEXT) == [
        Place("query/dot_general, backward", 100, 5),
        Place("query/dot_general", 50, 5),
        Place("without a name", 7, 1),
        Place("add, again", 5, 5),
    ]


def test_the_table_names_the_slowest(capsys):
    plan = Plan(None, None, places=tuple(places(TEXT)))
    Console(width=100).print(report._places(plan, 2))
    out = capsys.readouterr().out
    assert "61.7%" in out and "30.9%" in out and "without a name" not in out
