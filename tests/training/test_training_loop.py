"""The loop of a run: what it writes, when it ends, and what an update computes."""

import dataclasses
import io
import itertools
import json
import math
import re
import signal
from types import SimpleNamespace

import grain
import jax
import numpy as np
import pytest
from compilations import counted_compilations
from jax.profiler import ProfileData
from jax.sharding import PartitionSpec
from rich.console import Console
from slow_cases import slow_but_for
from tiny_workload import (
    Regression,
    batch_of,
    functions_of,
    make_workload,
    rows_of,
    run,
    stop_at,
    tiny_config,
)

import echo_jax as ej
from echo_jax.files import FolderInUseError, FolderLock, run_folder, unseal
from echo_jax.training import Interrupted, NonFiniteLossError, calibrate, train
from echo_jax.training.processes import make_mesh, param_shardings
from echo_jax.training.saving import Checkpoints, params_sha256
from echo_jax.training.trainer import train_checked

pytestmark = pytest.mark.usefixtures("all_compiled_soon")


def json_of(workdir, name):
    return unseal(json.loads((workdir / name).read_text()))


def evals_of(workdir):
    return [row for row in rows_of(workdir) if row["kind"] == "eval"]


def newest_checkpoint(workdir):
    checkpoints = Checkpoints(run_folder(workdir / "checkpoints"), keep=2)
    found = checkpoints.latest()
    checkpoints.close()
    return found


def test_a_run_leaves_what_its_readers_need(tmp_path):
    summary = run(tmp_path, echo__factor=2.5, updates=12)
    assert json_of(tmp_path, "summary.json") == summary
    config = tiny_config(echo__factor=2.5).to_dict()
    # How it is carried out and looked at is no part of a run.
    del config["distributed"], config["log"], config["profile"]
    for name in ("timeout_s", "check_finite", "max_bad"):
        del config["data"][name]
    assert json_of(tmp_path, "config.json") == json.loads(json.dumps(config))

    environment = json_of(tmp_path, "environment.json")
    assert environment["versions"]["jax"] == jax.__version__
    assert environment["backend"] == "cpu"
    assert environment["devices"] == ["cpu"] * 8
    assert environment["workload"] == {"synthetic_data": True}
    assert environment["xla_options"] == {}

    rows = rows_of(tmp_path)
    kinds = ["eval", "train", "eval", "train", "train", "eval"]
    wanted = [*zip(kinds, [0, 4, 6, 8, 12, 12], strict=True)]
    assert [(row["kind"], row["updates"]) for row in rows] == wanted
    # Fresh batch k is used 2, 3, 2, 3, 2 times.
    repeats = np.concatenate([np.arange(n) for n in (2, 3, 2, 3, 2)])
    for row in rows:
        assert row["wall_s"] == pytest.approx(row["train_s"] + row["wait_s"])
        assert row["fresh"] == 8 * (repeats[: row["updates"]] == 0).sum()
        assert row["updates"] * 8 == row["fresh"] + row["repeats"]
    for before, after in itertools.pairwise(rows):
        assert before["wall_s"] <= after["wall_s"]
        assert before["pause_s"] <= after["pause_s"]
    trained = [row for row in rows if row["kind"] == "train"]
    for first, row in zip((0, 4, 8), trained, strict=True):
        seen = {name for name in row if name.startswith("loss_repeat")}
        assert seen == {f"loss_repeat_{i}" for i in repeats[first : first + 4]}
    for before, after in itertools.pairwise(trained):
        busy_s = after["busy_s"] - before["busy_s"]
        wall_s = after["wall_s"] - before["wall_s"]
        assert 0 < busy_s <= wall_s + 1e-6
        assert after["idle_fraction"] == pytest.approx(1 - busy_s / wall_s, abs=1e-6)
        assert after["examples_per_s"] == pytest.approx(32 / wall_s)
        per_s = 4 * after["flops_per_update"] / wall_s
        assert after["flops_per_s"] == pytest.approx(per_s, rel=1e-6)
    # Of hidden units that dropout may drop.
    assert 0 < trained[-1]["train_kept"] < 1
    # The peak of a CPU is not known.
    assert "mfu" not in {**summary, **trained[-1]}

    assert (summary["updates"], summary["fresh"], summary["repeats"]) == (12, 40, 56)
    assert summary["final"] == {"loss": rows[-1]["eval_loss"]}
    assert summary["R"] == summary["t_up_s"] / summary["t_down_s"]
    assert summary["t_down_start_s"] > 0
    idle = 1 - summary["busy_s"] / summary["wall_s"]
    assert summary["idle_fraction"] == pytest.approx(idle)
    assert summary["train_final"] == {
        "loss": trained[-1]["loss"], "kept": trained[-1]["train_kept"]
    }  # fmt: skip
    assert summary["target"] is None
    assert not summary["reached"] and not summary["simulated_storage"]


def test_a_run_is_its_updates_one_after_another(tmp_path):
    """What is measured at its start, and evaluated, changes nothing of it."""
    summary = run(tmp_path, echo__factor=2.0, updates=3, eval_every=1)
    config = tiny_config(echo__factor=2.0)
    compiled = functions_of(echo__factor=2.0)
    state = compiled.init(compiled.init_key)
    batches = make_workload(config).train_dataset(ej.EchoSpec(2.0, batch_size=1))
    for batch in itertools.islice(batches, 3):
        state, _ = compiled.step_on_batch(state, batch)
    assert params_sha256(state.params) == summary["params_sha256"]


def test_a_run_under_way_is_joined_by_no_other(tmp_path):
    refused, killed = [], tmp_path / f".summary.json.{0:016x}.new"
    killed.touch()

    def join(number):
        with pytest.raises(FolderInUseError) as error:
            run(tmp_path)
        refused.append(error)

    whole = run(tmp_path, echo__factor=2.5, on_batch=join)
    assert len(refused) >= 12 and not killed.exists()
    assert [row["updates"] for row in rows_of(tmp_path)] == [0, 4, 6, 8, 12, 12]
    # A finished run is not trained again.
    written = (tmp_path / "metrics.jsonl").stat().st_mtime_ns
    assert run(tmp_path, echo__factor=2.5) == whole
    assert (tmp_path / "metrics.jsonl").stat().st_mtime_ns == written


def test_a_run_that_has_lost_its_folder_stops_there(tmp_path):
    class Lost(FolderLock):
        calls = 0

        def check(self):
            self.calls += 1
            if self.calls == 3:
                raise FolderInUseError("taken over")

    config = tiny_config(updates=100)
    with pytest.raises(FolderInUseError, match="taken over"):
        train_checked(config, make_workload(config), run_folder(tmp_path), Lost())
    assert not (tmp_path / "summary.json").exists()
    assert not any(row["updates"] > 4 for row in rows_of(tmp_path))


def test_training_learns_and_stops_at_the_target(tmp_path):
    options = {"updates": 400, "eval_every": 20, "log_every": 100}
    options["task"] = Regression(dropout=0.0)
    run(tmp_path / "all", **options)
    evals = evals_of(tmp_path / "all")
    assert evals[-1]["eval_loss"] < evals[0]["eval_loss"] / 4
    target = evals[0]["eval_loss"] / 2
    first = next(row for row in evals if row["eval_loss"] <= target)
    assert first["updates"] < 400

    summary = run(tmp_path / "stop", target=target, stop_at_target=True, **options)
    assert summary["reached"]
    assert summary["updates"] == summary["updates_to_target"] == first["updates"]
    assert summary["fresh_to_target"] == first["fresh"]
    assert 0 < summary["seconds_to_target"] <= summary["wall_s"]
    # A finished run knows its rows: another target is looked up, not trained for.
    looked_up = run(tmp_path / "all", target=target, **options)
    assert looked_up["updates"] == 400
    assert looked_up["updates_to_target"] == first["updates"]


@pytest.mark.parametrize("log_every", [1, 100])
def test_a_loss_that_is_not_finite_ends_the_run_and_saves_nothing_of_it(
    tmp_path, log_every
):
    # Batch placement, factor 2: fresh batch 3 is used by updates 7 and 8.
    options = {"echo__factor": 2.0, "updates": 40, "eval_every": 100}
    options |= {"checkpoint_every": 4, "log_every": log_every}
    message = r"loss of update 7 is not finite; the last checkpoint, of update 4,"
    with pytest.raises(NonFiniteLossError, match=message) as caught:
        run(tmp_path, nan_at_fresh=3, **options)
    assert caught.value.update == 7
    assert newest_checkpoint(tmp_path) == 4
    assert all(np.isfinite(row.get("loss", 0)) for row in rows_of(tmp_path))
    assert not (tmp_path / "summary.json").exists()


class Overflows(Regression):
    """Its losses are finite, and its gradient is not."""

    def loss(self, variables, batch, key):
        losses, state, metrics = super().loss(variables, batch, key)
        bias = variables["params"]["bias"]
        # sqrt has an infinite slope at 0, where the bias starts.
        return losses + jax.numpy.sqrt(bias * bias).sum(), state, metrics


def test_a_state_that_is_not_finite_is_not_saved(tmp_path):
    message = "the state after update 1 is not finite; use another"
    with pytest.raises(NonFiniteLossError, match=message):
        run(tmp_path, task=Overflows(), updates=1)
    assert newest_checkpoint(tmp_path) is None


def test_a_run_of_an_earlier_version_is_refused_in_a_sentence(tmp_path):
    earlier = {"inner": {"strategy": "loop", "updates": 0}}
    (tmp_path / "config.json").write_text(json.dumps(earlier))
    message = "earlier echo_jax, whose config.inner is config.dispatch now; .* another"
    with pytest.raises(ValueError, match=message):
        run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_another_config_or_other_data_in_the_folder_are_refused(tmp_path):
    def trained(updates, metadata, **overrides):
        config = tiny_config(updates=updates, **overrides)
        workload = dataclasses.replace(make_workload(config), metadata=metadata)
        return train(config, workload, tmp_path)

    saved = {"sha256": "a", "source": "here"}
    trained(2, saved)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.json*")}
    with pytest.raises(ValueError, match=r"echo\.factor \(1\.0 -> 2\.0\)"):
        trained(2, saved, echo__factor=2.0)
    for found in ({"sha256": "b"}, {"train": {"sha256": "b"}}, {}):
        with pytest.raises(ValueError, match="of update 2 was trained on other data"):
            trained(4, found)
    after = {path.name: path.read_bytes() for path in tmp_path.glob("*.json*")}
    assert after == before
    # The same data may lie elsewhere.
    assert trained(4, saved | {"source": "there"})["updates"] == 4


def test_data_that_ends_is_an_error(tmp_path):
    config = tiny_config()
    workload = make_workload(config)
    endless = workload.train_dataset
    some = grain.MapDataset.source(list(itertools.islice(endless(ej.EchoSpec()), 40)))
    # One is made to see whether it can be, one to be measured, one to train.
    for lengths, when in [((40, 40, 7), "after 7 upd"), ((40, 7, 40), "while it was")]:
        datasets = iter([some[:length].to_iter_dataset() for length in lengths])
        ending = dataclasses.replace(
            workload, train_dataset=lambda *_, made=datasets: next(made)
        )
        with pytest.raises(ValueError, match=f"'regression' ended {when}.* repeat"):
            train(config, ending, tmp_path)


@pytest.mark.parametrize(
    ("seen", "corrected"),
    [((20.0, 30.0), 20.0), ((0.0, 1e-9), 1e-9), ((0.0, math.inf), None)],
)
def test_what_a_fresh_batch_takes_is_corrected_by_what_the_run_sees(
    tmp_path, seen, corrected
):
    """No batch of this workload takes 20 seconds, and none a nanosecond."""
    config = tiny_config(updates=2, log_every=1)
    workload = make_workload(config)

    def watched(*args):
        dataset = workload.train_dataset(*args)
        dataset.fresh_time = SimpleNamespace(bounds=lambda: seen, held_batches=0)
        return dataset

    watching = dataclasses.replace(workload, train_dataset=watched)
    summary = train(config, watching, tmp_path)
    assert summary["t_up_s"] == (corrected or summary["t_up_start_s"])
    assert 1e-9 < summary["t_up_start_s"] < 20
    assert summary["R"] == summary["t_up_s"] / summary["t_down_s"]
    rows = [row for row in rows_of(tmp_path) if row["kind"] == "train"]
    assert [row["t_up_s"] for row in rows] == [summary["t_up_s"]] * 2


def test_the_loader_is_measured_without_the_echo():
    config = tiny_config(echo__factor=3.0)
    workload = make_workload(config)
    repeats = []

    def spied(spec, part):
        dataset = workload.train_dataset(spec, part)
        return dataset.map(lambda batch: (repeats.extend(batch["repeat"]), batch)[1])

    rates = calibrate(config, dataclasses.replace(workload, train_dataset=spied))
    assert repeats and not any(repeats)
    assert rates.ratio == rates.t_up_s / rates.t_down_s


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_stops_after_the_update_and_saves(tmp_path, signum):
    before = signal.getsignal(signum)
    message = rf"{signum.name} after update 3, and saved; .* same command"
    with pytest.raises(Interrupted, match=message) as caught:
        run(tmp_path, echo__factor=2.0, on_batch=stop_at(3, signum))
    assert caught.value.update == 3
    assert caught.value.exit_code == 128 + signum
    assert signal.getsignal(signum) is before
    assert newest_checkpoint(tmp_path) == 3


def test_a_signal_that_a_program_handles_by_itself_stays_its_own(tmp_path):
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda signum, frame: heard.append(signum))
    try:
        run(tmp_path, echo__factor=2.0, on_batch=stop_at(3, signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == [signal.SIGUSR1]


def test_a_second_ctrl_c_aborts_at_once(tmp_path):
    def twice(number):
        if number == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, echo__factor=2.0, on_batch=twice)
    assert newest_checkpoint(tmp_path) is None


def shown(tmp_path, *, on_batch=None, made=None, fields=None, **options):
    text, config = io.StringIO(), tiny_config(**fields or {})
    workload = make_workload(
        config, on_batch=on_batch and (lambda n: on_batch(n, text))
    )
    workload = dataclasses.replace(workload, **made or {})
    console = Console(file=text, width=200, **options)
    train(config, workload, tmp_path, console=console)
    return text.getvalue()


def test_progress_is_plain_lines_in_a_file(tmp_path):
    *about, lines = shown(tmp_path).split("\n", 2)
    assert [line[10:] for line in about] == [
        "model: 96 parameters in 3 arrays: first 64, bias 16, second 16; see model.txt",
        "no echo: every batch is used once",
    ]
    lines = lines.splitlines()
    assert len(lines) == 6
    assert re.fullmatch(r"\d\d:\d\d:\d\d  update 0  eval_loss \S+", lines[0])
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d  update 8/12  loss \d+\.\d{4}  \d+ examples/s  idle \d+%  "
        r"kept 0\.\d+  ETA \d+:\d\d:\d\d",
        lines[3],
    )


def test_progress_counts_the_updates_that_are_computed(tmp_path):
    """Not those that were sent to the device, of which two may be in flight."""
    seen = []

    def look(number, text):
        seen.append(len(re.findall(r"update \d+/12", text.getvalue())))

    shown(tmp_path, on_batch=look, fields={"log_every": 1, "echo__factor": 2.0})
    # Batch 7 is made after an evaluation, which waits for all.
    assert seen == [0, 0, 0, 1, 2, 3, 6, 6, 6, 7, 8, 9]


def test_progress_is_a_bar_on_a_terminal(tmp_path):
    text = shown(tmp_path, force_terminal=True)
    assert all(part in text for part in ("12/12", "━", "ETA", "eval_loss"))


def test_a_run_says_what_its_data_and_its_devices_mean(tmp_path):
    counts = {"num_examples": 1024, "num_evaluated": 20}
    data = "data: here, 1,024 examples of train; evaluated on 20 of validation\n"
    every = {"local__schedule": "every"}
    for number, (fields, made, says) in enumerate(
        [
            ({"data__source": "here"}, counts, data),
            (every, {}, "local.schedule='every' changes nothing"),
            ({"batch__statistics": "device"}, {}, "statistics='device' changes"),
            ({**every, "mesh__data": 2}, {}, "2 replicas, one on each"),
        ]
    ):
        fields = {"updates": 1, **fields}
        assert says in shown(tmp_path / str(number), fields=fields, made=made)


def test_the_window_counts_losses_by_repeat_and_starts_anew_after_every_log():
    compiled = functions_of(log_every=3)
    state, counts = compiled.init(compiled.init_key), []
    for i in range(4):
        repeat = [0, 1, 0, 6, 7, 8, 1000, i % 2]
        batch = {**batch_of(8 * i), "repeat": np.array(repeat, np.int32)}
        state, report = compiled.step_on_batch(state, batch)
        counts.append(report.window.count.tolist())
    assert counts == [
        [3, 1, 0, 0, 0, 0, 1, 3],
        [5, 3, 0, 0, 0, 0, 2, 6],
        [8, 4, 0, 0, 0, 0, 3, 9],
        [2, 2, 0, 0, 0, 0, 1, 3],
    ]
    row = report.row()
    means = [row[f"loss_repeat_{i}"] for i in (0, 1, 6, "7_and_later")]
    assert np.dot(means, [2, 2, 1, 3]) / 8 == pytest.approx(row["loss"])


def test_randomness_is_a_function_of_seed_and_update():
    def after_one(seed, start):
        compiled = functions_of(seed=seed, optim__lr=0.1)
        state = compiled.init(jax.random.key(0))
        state = state.replace(update=state.update + start)
        state, _ = compiled.step_on_batch(state, batch_of())
        return params_sha256(state.params)

    assert after_one(0, 0) == after_one(0, 0)
    assert len({after_one(0, 0), after_one(1, 0), after_one(0, 1)}) == 3


@pytest.mark.parametrize(
    ("data", "fsdp"), slow_but_for([(4, 2)], [(8, 1), (4, 2), (1, 8)])
)
def test_equal_loss_on_any_mesh(data, fsdp):
    seen = []
    for shape in ((1, 1), (data, fsdp)):
        compiled = functions_of(mesh__data=shape[0], mesh__fsdp=shape[1])
        state = compiled.init(compiled.init_key)
        for i in range(8):
            state, report = compiled.step_on_batch(state, batch_of(8 * i))
            seen.append(float(report.window.loss.sum()))
    np.testing.assert_allclose(seen[8:], seen[:8], rtol=1e-5)
    first = state.params["first"]
    assert first.sharding.num_devices == 8
    assert first.addressable_shards[0].data.shape == (4, 16 // fsdp)
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.shape == first.shape]
    assert len(moments) == 2
    assert all(x.sharding == first.sharding for x in moments)


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((12, 16), PartitionSpec(None, "fsdp")),
        ((16, 16), PartitionSpec("fsdp")),
        ((18, 8), PartitionSpec(None, "fsdp")),
        ((3, 5), PartitionSpec()),
        ((), PartitionSpec()),
    ],
)
def test_the_largest_divisible_axis_is_split(shape, spec):
    array = jax.ShapeDtypeStruct(shape, np.float32)
    assert param_shardings({"a": array}, make_mesh(2, 4, 8))["a"].spec == spec


def test_a_mesh_that_does_not_fit_is_refused():
    assert dict(make_mesh(-1, 2, 8).shape) == {"data": 4, "fsdp": 2}
    with pytest.raises(ValueError, match=r"data=3 times .*fsdp=4 does not fit 8 dev"):
        make_mesh(3, 4, 12)
    with pytest.raises(ValueError, match=r"fsdp=16 does not fit 8 devices"):
        make_mesh(-1, 16, 16)
    with pytest.raises(ValueError, match=r"batch_size=12 is not a multiple of the 8"):
        make_mesh(-1, 1, 12)


def test_the_hash_sees_every_bit_and_no_mesh():
    params = {"a": np.arange(8, dtype=np.float32), "b": np.ones((2, 4), np.float32)}
    nudged = {**params, "a": np.nextafter(params["a"], np.float32(9))}
    swapped = {"a": params["b"], "b": params["a"]}
    split = jax.device_put(params, param_shardings(params, make_mesh(2, 4, 8)))
    shaped = {**params, "b": params["b"].ravel()}
    same, *others = map(params_sha256, (params, nudged, swapped, shaped))
    assert params_sha256(split) == same not in others


def test_evaluation_refuses_what_it_cannot_merge(tmp_path):
    config = tiny_config(mesh__data=8)
    workload = make_workload(config)
    (first, _) = workload.eval_batches()
    short = {name: x[:6] for name, x in first.items()}
    for batch, message in (
        ({**first, "mask": np.zeros(8, np.float32)}, "split has no example"),
        (short, "batch of 6 does not divide over the 8 dev"),
    ):
        batches = dataclasses.replace(workload, eval_batches=lambda shard, b=batch: [b])
        with pytest.raises(ValueError, match=message):
            train(config, batches, tmp_path)


def test_nothing_is_compiled_after_the_second_step(tmp_path):
    """Nor by the evaluations and the checkpoints after the first."""
    times = {"updates": 8, "log_every": 3, "eval_every": 2, "checkpoint_every": 2}
    config = tiny_config(**times, echo__factor=2.5)
    workload, counts = make_workload(config), []

    def eval_batches(*args, **kwargs):
        counts.append(len(compiled))
        return workload.eval_batches(*args, **kwargs)

    # Another test may have compiled the programs of an equal task.
    jax.clear_caches()
    with counted_compilations() as compiled:
        watched = dataclasses.replace(workload, eval_batches=eval_batches)
        train(config, watched, tmp_path)
    # After updates 0, 2, 4, ...
    assert len(counts) == 5 and counts[0] > 0
    assert {*counts[2:], len(compiled)} == {counts[2]}


def test_other_numbers_are_no_other_program(tmp_path):
    """So a thousand learning rates, and the arms of a study, are one compilation."""
    start = {"updates": 6, "optim__clip_norm": 1.0, "optim__schedule": "cosine"}
    others = [
        {"optim__lr": 0.02, "optim__b1": 0.8, "optim__weight_decay": 0.1},
        {"optim__clip_norm": 0.5, "optim__warmup_updates": 3},
        {"optim__decay_updates": 7, "seed": 3, "log_every": 3},
        {"echo__factor": 2.5, "echo__after": "decode", "checkpoint_every": 2},
    ]
    found = {run(tmp_path / "start", **start)["params_sha256"]}
    with counted_compilations() as compiled:
        for number, numbers in enumerate(others):
            summary = run(tmp_path / str(number), **{**start, **numbers})
            found.add(summary["params_sha256"])
    assert compiled == []
    # The numbers count nevertheless.
    assert len(found) == 1 + len(others)


WINDOW = {"echo__factor": 2.5, "profile__start": 2, "profile__updates": 3}


def traces(workdir):
    return sorted(workdir.glob("profile/process-0/plugins/profile/*/*.xplane.pb"))


def test_a_profile_holds_its_updates_and_changes_nothing_of_the_run(tmp_path, capsys):
    plain = run(tmp_path / "plain", **{**WINDOW, "profile__updates": 0})
    profiled = run(tmp_path / "profiled", **WINDOW)
    assert "profiled update 3 to 5; see" in capsys.readouterr().out
    (file,) = traces(tmp_path / "profiled")
    planes = ProfileData.from_file(str(file)).planes
    # Not which ones: to read an event's numbers ends the process in jax 0.12.
    events = [e.name for plane in planes for line in plane.lines for e in line.events]
    assert events.count("training update") == 3
    assert not (tmp_path / "plain" / "profile").exists()
    assert profiled["params_sha256"] == plain["params_sha256"]


@pytest.mark.slow
def test_a_profile_holds_whole_groups_and_is_kept_unless_a_run_stops_within(
    tmp_path, capsys
):
    groups = {"dispatch__steps": 4}
    # Groups of 4 are the first and the last; between them it is one by one.
    for start, says in ((7, "profiled update 8 to 12"), (9, "nothing was profiled")):
        fields = {"profile__start": start, "profile__updates": 2, **groups}
        run(tmp_path / str(start), **fields)
        assert says in capsys.readouterr().out
    for folder, update, kept in (("behind", 8, 1), ("within", 4, 0)):
        with pytest.raises(Interrupted):
            run(tmp_path / folder, on_batch=stop_at(update), **WINDOW)
        before = traces(tmp_path / folder)
        assert len(before) == kept
        run(tmp_path / folder, **WINDOW)
        assert traces(tmp_path / folder) == before
