"""What an update sends and reuses, read from the text and the memory of its program."""

import jax
import pytest
from tiny_workload import Regression, compiled_update, tiny_config

from benchmarks.collectives import overlapped
from echo_jax.training.xla.sent import collectives, sent_bytes

# As XLA for GPUs prints it: starts and ends; a start of a gather has both in its type.
ASYNCHRONOUS = """
ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %begun = (f32[8]{0}, bf16[4,2]{1,0}) all-reduce-start(%p, %q), channel_id=1
  %between = f32[8]{0} fusion(%p), kind=kLoop
  %free = f32[8]{0} bitcast(%between)
  %more = f32[8]{0} fusion(%free), kind=kLoop
  %ended = (f32[8]{0}, bf16[4,2]{1,0}) all-reduce-done(%begun)
  %gather = (f32[8]{0}, f32[32]{0}) all-gather-start(%more), dimensions={0}
  %gathered = f32[32]{0} all-gather-done(%gather)
  ROOT %out = f32[8]{0} fusion(%gathered), kind=kLoop
}
"""
# As XLA for TPUs prints it: tiles in the layouts, and places in long types.
TILED = (
    "  %sum.1 = (f32[64,128]{1,0:T(8,128)}, /*index=1*/bf16[256]{0:T(256)(128)(2,1)}, "
    "pred[3]{0:T(512)}) all-reduce(%a, %b, %c), replica_groups={{0,1,2,3}}"
)


def piece(name, number):
    """One of the operations in which a TPU starts, goes on with and ends a sum."""
    return f"""%{name} (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  ROOT %all-reduce.{number} = f32[8]{{0}} all-reduce(%p), channel_id=3, \
frontend_attributes={{chain_id="0"}}
}}
"""


IN_PIECES = f"""{piece("begin", 1)}{piece("beside", 2)}{piece("end", 3)}
ENTRY %main (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  %async-collective-start.2 = f32[8]{{0}} fusion(%p), calls=%begin
  %fusion.1 = f32[8]{{0}} fusion(%async-collective-start.2), calls=%beside
  %copy.1 = f32[8]{{0}} copy(%p)
  %async-collective-done.2 = f32[8]{{0}} fusion(%fusion.1), calls=%end
  ROOT %all-reduce.9 = f32[4]{{0}} all-reduce(%p), channel_id=4
}}
"""


@pytest.mark.parametrize(
    ("text", "found", "between"),
    [
        (
            ASYNCHRONOUS,
            [("all-reduce", {"f32": 8, "bf16": 8}), ("all-gather", {"f32": 32})],
            [2, 0],
        ),
        (TILED, [("all-reduce", {"f32": 64 * 128, "bf16": 256, "pred": 3})], []),
        (IN_PIECES, [("all-reduce", {"f32": 8}), ("all-reduce", {"f32": 4})], [2]),
    ],
)
def test_collectives_are_counted_once(text, found, between):
    assert collectives(text) == found
    assert overlapped(text) == between


def test_bytes_follow_from_types():
    class Program:
        def as_text(self):
            return TILED

    assert sent_bytes(Program()) == 4 * 64 * 128 + 2 * 256 + 3


@pytest.mark.parametrize("where", ["host", "device"])
def test_data_parallelism_sums_every_parameter_once_and_reuses_the_state(where):
    config = tiny_config(mesh__data=4, echo__where=where, echo__after="decode")
    program = compiled_update(config)
    params = jax.eval_shape(Regression().init, jax.random.key(0))["params"]
    num_params = sum(x.size for x in jax.tree.leaves(params))
    reduced = sum(numbers["f32"] for kind, numbers in collectives(program.as_text()))
    assert num_params <= reduced <= num_params + 64  # and some losses
    # Parameters and Adam's two moments at least take the place of the old ones.
    assert program.memory_analysis().alias_size_in_bytes > 3 * 4 * num_params
    assert "callback" not in program.as_text()
