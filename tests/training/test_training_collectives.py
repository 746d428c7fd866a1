"""Time in collectives: by hand, by counting cells, and from hand-made traces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.profiler import ProfileData

from echo_jax.training.xla.collectives import (
    Op,
    Share,
    Trace,
    covered,
    op_of,
    read_trace,
)

INTERVALS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 30)).map(
        lambda pair: (min(pair), max(pair))
    )
)
OPS = st.lists(
    st.builds(
        lambda pair, collective, behind: Op(*sorted(pair), collective, behind),
        st.tuples(st.integers(-5, 35), st.integers(-5, 35)),
        st.booleans(),
        st.booleans(),
    )
)


def cells(intervals):
    """The unit cells of a line that intervals cover."""
    return {cell for start, end in intervals for cell in range(start, end)}


@given(INTERVALS)
def test_intervals_cover_their_union(intervals):
    assert covered(intervals) == len(cells(intervals))


@given(OPS)
def test_shares_are_those_of_cells(ops):
    shares = Trace((0, 20), {"a": ops}).shares()
    window = cells([(0, 20)])
    collective = window & cells((o.start_ns, o.end_ns) for o in ops if o.is_collective)
    other = window & cells(
        (o.start_ns, o.end_ns) for o in ops if not o.is_collective and not o.is_behind
    )
    if shares:
        assert shares["a"].collective == pytest.approx(len(collective) / 20)
        assert shares["a"].exposed == pytest.approx(len(collective - other) / 20)
    else:
        assert not collective and not other


def test_shares_by_hand():
    """The window is 100 to 200 ns.

    Device a: collectives from 90 to 120, 110 to 130 and 160 to 170, so for 40 ns in the
    window; other work from 125 to 165, so that 100 to 125 and 165 to 170 are exposed.
    What is copied behind the other operations, all the time, changes nothing.
    """
    a = [
        Op(90, 120, True),
        Op(110, 130, True),
        Op(160, 170, True),
        Op(125, 165, False),
        Op(0, 300, False, is_behind=True),
        Op(200, 300, True),
    ]
    b = [Op(100, 150, False)]
    # It did nothing in the window: it does not train.
    c = [Op(0, 100, True)]
    shares = Trace((100, 200), {"a": a, "b": b, "c": c}).shares()
    assert shares == {"a": Share(0.4, 0.3), "b": Share(0.0, 0.0)}


@pytest.mark.parametrize(
    "name",
    [
        "all-reduce",
        "all-reduce.1",
        "all-reduce-start.12",
        "all-gather-done.3.clone",
        "reduce-scatter.2",
        "all-to-all",
        "collective-permute-start",
        "async-collective-done.4",
        "psum.3",
        "reduce_scatter.10",
        "all_gather.7",
        "%psum.3 = (f32[8]{0:T(128)S(1)}, f32[]) all-reduce(f32[8] %a.1, f32[] %b)",
        "%x.1 = f32[8]{0} all-gather-done(f32[8] %all-gather-start)",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_AllGather_RING_LL_Sum_int8_t",
    ],
)
def test_names_of_collectives(name):
    assert op_of(name) == "collective"


@pytest.mark.parametrize(
    "name",
    [
        "dot.3",
        "reduce.1",
        "reduce-window.2",
        "gather.5",
        "copy-start.1",
        "loop_all_reduce_fusion",
        "%fusion.1 = f32[8]{0} fusion(f32[8] %all-reduce.1), kind=kLoop",
        "%copy-done.2 = f32[8] copy-done((f32[8], u32[]) %copy-start.2)",
    ],
)
def test_names_of_other_operations(name):
    assert op_of(name) == "other"


@pytest.mark.parametrize(
    "name", ["while.2", "call", "conditional.1", "%w = (s32[]) while((s32[]) %t)"]
)
def test_what_is_inside_stands_for_itself(name):
    assert op_of(name) is None


def write_trace(path, planes):
    """Writes a trace of planes, lines, and events (name, start, end, stats) in ns."""
    text = ""
    for plane, lines in planes.items():
        names, stats, body = {}, {}, ""
        for line, events in lines.items():
            body += f'lines {{ name: "{line}" timestamp_ns: 1000 '
            for name, start, end, values in events:
                number = names.setdefault(name, len(names) + 1)
                body += f"events {{ metadata_id: {number} offset_ps: {start * 1000} "
                body += f"duration_ps: {(end - start) * 1000} "
                for key, value in values.items():
                    key = stats.setdefault(key, len(stats) + 1)
                    kind = "str_value" if isinstance(value, str) else "int64_value"
                    value = f'"{value}"' if isinstance(value, str) else value
                    body += f"stats {{ metadata_id: {key} {kind}: {value} }} "
                body += "} "
            body += "} "
        for field, known in (("event_metadata", names), ("stat_metadata", stats)):
            for name, number in known.items():
                entry = f'value {{ id: {number} name: "{name}" }}'
                body += f"{field} {{ key: {number} {entry} }} "
        text += f'planes {{ name: "{plane}" {body} }}\n'
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    return path


STEPS = {"python": [("step", 100, 150, {}), ("step", 150, 200, {})]}


def test_a_trace_of_cpu_devices(tmp_path):
    """Operations of a device lie on any thread, between those of others."""

    def op(name, device, start, end):
        return (name, start, end, {"hlo_op": name, "device_ordinal": device})

    threads = {
        "one": [op("dot.1", 0, 100, 140), op("all-reduce", 1, 120, 160)],
        "two": [
            op("all-reduce", 0, 140, 160),
            op("dot.1", 1, 100, 120),
            op("while.1", 1, 100, 200),
            # Of the host: by name alone, or by device alone, nothing is known of it.
            ("all-reduce", 100, 200, {}),
            ("ThunkExecutor::Execute", 100, 200, {"device_ordinal": 0}),
        ],
    }
    planes = {"/host:CPU": {**STEPS, **threads}, "/host:metadata": {}}
    trace = read_trace(write_trace(tmp_path / "a.xplane.pb", planes), "step")
    assert trace.window == (1100, 1200)
    assert trace.seconds == pytest.approx(1e-7)
    assert trace.shares() == {"CPU:0": Share(0.2, 0.2), "CPU:1": Share(0.4, 0.4)}


def test_a_trace_of_gpus(tmp_path):
    hlo = {"hlo_op": "loop_add_fusion"}
    nccl = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)"
    streams = {
        "Stream #13(Compute)": [("loop_add_fusion", 100, 150, hlo)],
        "Stream #22(MemcpyH2D)": [("MemcpyH2D", 100, 200, {})],
        "Stream #30": [
            (nccl, 140, 170, {}),
            ("one_shot_kernel", 180, 190, {"hlo_op": "all-gather-start.1"}),
        ],
        "XLA Modules": [("jit_update", 100, 200, hlo)],
    }
    planes = {"/host:CPU": STEPS, "/device:GPU:0": streams, "/device:GPU:1": {}}
    trace = read_trace(write_trace(tmp_path / "a.xplane.pb", planes), "step")
    assert trace.shares() == {"GPU:0": Share(0.4, 0.3)}


def test_a_trace_of_tpus(tmp_path):
    start = "%ags = (f32[8], f32[64]) all-gather-start(f32[8] %p)"
    done = "%agd = f32[64] all-gather-done((f32[8], f32[64]) %ags)"
    lines = {
        "Steps": [("1", 100, 200, {})],
        "XLA Modules": [("jit_update(1)", 100, 200, {})],
        "XLA Ops": [
            (start, 100, 101, {}),
            ("%fusion.1 = f32[8] fusion(f32[8] %p)", 101, 140, {}),
            (done, 140, 150, {}),
            ("%all-reduce.1 = f32[8] all-reduce(f32[8] %p)", 150, 170, {}),
        ],
        "Async XLA Ops": [
            ("all-gather-start", 100, 150, {}),
            ("copy-start.1", 100, 200, {}),
        ],
    }
    planes = {
        "/host:CPU": STEPS,
        "/device:TPU:0": lines,
        "/device:TPU:0 SparseCore 0": {"XLA Ops": [("x", 100, 200, {})]},
    }
    trace = read_trace(write_trace(tmp_path / "a.xplane.pb", planes), "step")
    (share,) = trace.shares().values()
    assert share.collective == pytest.approx(0.7)
    # Its start, the wait for its end, and the all-reduce.
    assert share.exposed == pytest.approx(0.31)


def test_a_trace_without_steps_tells_nothing(tmp_path):
    file = write_trace(tmp_path / "a.xplane.pb", {"/host:CPU": {"python": []}})
    assert read_trace(file, "step") is None
