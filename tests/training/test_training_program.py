"""What a compiled update sends, keeps and hands over, as its text and jax say it."""

from contextlib import closing
from types import SimpleNamespace

import jax
import pytest
from tiny_workload import make_workload, tiny_config

from echo_jax.training.compiled import CompiledFunctions
from echo_jax.training.feeds.loader import take_sample
from echo_jax.training.feeds.of_config import open_feed
from echo_jax.training.trainer import compile_functions
from echo_jax.training.xla.hlo import Collectives, operations
from echo_jax.training.xla.program import _peak_bytes, describe_update

SPREAD = {"echo__order": "spread", "echo__factor": 2.0, "echo__buffer": 4000}
# As XLA for GPUs prints it: starts and ends; a start of a gather has both in its type.
ASYNCHRONOUS = """
HloModule jit_step, is_scheduled=true
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
TILED = """
  %sum.1 = (f32[64,128]{1,0:T(8,128)}, /*index=1*/bf16[256]{0:T(256)(128)(2,1)}, \
pred[3]{0:T(512)}) all-reduce(%a, %b, %c), replica_groups={{0,1,2,3}}
  %sent = (f32[2]{0}, u32[], token[]) send(%a, %t), channel_id=3
  %asked = f32[] custom-call(), custom_call_target="xla_ffi_python_cpu_callback"
"""


def test_what_begins_and_ends_is_counted_once():
    (gathers, reduces), host_transfers = operations(ASYNCHRONOUS)
    assert reduces == Collectives("all-reduce", 1, {"f32": 8, "bf16": 8}, (2,))
    assert gathers == Collectives("all-gather", 1, {"f32": 32}, (0,))
    assert (reduces.num_bytes, gathers.num_bytes) == (48, 128)
    assert host_transfers == 0


def test_tiles_and_comments_are_no_numbers():
    (reduces,), host_transfers = operations(TILED.replace("\\\n", ""))
    assert reduces.numbers == {"f32": 64 * 128, "bf16": 256, "pred": 3}
    assert reduces.between == ()
    assert host_transfers == 2


def test_what_is_reused_in_place_counts_once_at_the_peak():
    memory = SimpleNamespace(
        argument_size_in_bytes=100,
        output_size_in_bytes=70,
        temp_size_in_bytes=30,
        alias_size_in_bytes=60,
    )
    assert _peak_bytes(memory) == 140


@pytest.mark.parametrize("mode", ["host", "device"])
def test_data_parallelism_sums_every_parameter_once(mode):
    config = tiny_config(mesh__data=4, echo__where=mode, echo__after="decode")
    workload = make_workload(config)
    found = describe_update(config, workload)
    variables = jax.eval_shape(workload.task.init, jax.random.key(0))
    num_params = sum(x.size for x in jax.tree.leaves(variables["params"]))
    (reduces,) = (each for each in found.collectives if each.kind == "all-reduce")
    assert num_params <= reduces.numbers["f32"] <= num_params + 64  # and some losses
    assert (found.num_devices, found.kind, found.examples) == (4, "cpu", 8)
    assert found.gradient_bytes == 4 * num_params
    # The state lies whole on every device, and the new one takes its place.
    assert found.reused_bytes == found.donated_bytes > 3 * 4 * num_params
    assert found.peak_bytes > found.donated_bytes
    assert found.peak_bytes > found.temporary_bytes
    assert found.host_transfers == 0


@pytest.mark.parametrize("mode", ["host", "device"])
def test_what_is_compiled_of_shapes_is_what_a_run_compiles(mode, monkeypatch):
    texts = []
    lower = CompiledFunctions.lower

    def kept(self, *args):
        texts.append(lower(self, *args).as_text())
        return lower(self, *args)

    monkeypatch.setattr(CompiledFunctions, "lower", kept)
    config = tiny_config(mesh__data=2, echo__where=mode, echo__after="decode")
    workload = make_workload(config)
    describe_update(config, workload)
    compiled = compile_functions(config, workload)
    sample = take_sample(workload, config)
    with closing(
        open_feed(config, workload, compiled.mesh, factor=1.0, sample=sample)
    ) as feed:
        state = compiled.init(compiled.init_key)
        assert texts == [compiled.trace(state, feed).lower().as_text()]


def test_a_buffer_is_read_whole_and_written_in_place():
    fields = {"echo__where": "device", "echo__after": "decode", "mesh__data": 4}
    config = tiny_config(**fields, **SPREAD)
    found = describe_update(config, make_workload(config))
    # 1,000 items a device, of four features and a target, and the slots of a plan.
    assert 20_000 <= found.buffer_bytes < 21_000
    assert found.rewritten_bytes == found.buffer_bytes
    assert found.write_temporary_bytes < found.buffer_bytes
    assert f"reads a buffer of {found.buffer_bytes / 1e6:.3g} MB" in str(found)
    on_host = tiny_config(echo__after="decode", **SPREAD)
    of_host = describe_update(on_host, make_workload(on_host))
    assert of_host.buffer_bytes == 0 and "buffer" not in str(of_host)


def test_one_device_sends_nothing():
    config = tiny_config()
    found = describe_update(config, make_workload(config))
    assert found.collectives == ()
    assert "An update on 1 cpu device:" in str(found)
    assert "no collectives, for there is 1 device; 8 devices are here" in str(found)


def test_with_fsdp_a_device_holds_a_part_of_the_state():
    def donated(**mesh):
        config = tiny_config(**mesh)
        return describe_update(config, make_workload(config)).donated_bytes

    assert donated(mesh__fsdp=4) < donated(mesh__data=4)


def test_an_all_reduce_that_runs_in_pieces_is_one():
    """As XLA prints one for a TPU, which starts and ends in operations of their own."""

    def piece(name, number):
        return f"""%{name} (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  ROOT %all-reduce.{number} = f32[8]{{0}} all-reduce(%p), channel_id=3, \
frontend_attributes={{chain_id="0"}}
}}
"""

    text = f"""{piece("begin", 1)}{piece("beside", 2)}{piece("end", 3)}
ENTRY %main (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  %async-collective-start.2 = f32[8]{{0}} fusion(%p), calls=%begin
  %fusion.1 = f32[8]{{0}} fusion(%async-collective-start.2), calls=%beside
  %copy.1 = f32[8]{{0}} copy(%p)
  %async-collective-done.2 = f32[8]{{0}} fusion(%fusion.1), calls=%end
  ROOT %all-reduce.9 = f32[4]{{0}} all-reduce(%p), channel_id=4
}}
"""
    assert operations(text) == (
        (Collectives("all-reduce", 2, {"f32": 12}, between=(2,)),),
        0,
    )
