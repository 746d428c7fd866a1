"""Every echo variant of the classification configs trains, and counts what it used."""

import importlib.util
import itertools
import json
from pathlib import Path

import pytest
from image_folders import prepare

import echo_jax as ej
from echo_jax.config import load_config
from echo_jax.config.check import check_config
from echo_jax.runs import run_study, run_train

CONFIGS = Path(__file__).parents[2] / "configs"
UPDATES, BATCH = 5, 8

SMALL = {
    "cifar": {"model.width": 4},
    "imagenet": {
        "data.train_examples": 0,
        "data.eval_split": "validation",
        "data.image_size": 32,
        "data.resize": 36,
        "data.augment": ("crop", "flip"),
        "model.stage_sizes": (1,),
        "model.width": 4,
        "model.virtual_batch": 4,
    },
}
RUN = {
    "updates": UPDATES,
    "batch_size": BATCH,
    "log_every": 5,
    "eval_every": 5,
    "data.eval_examples": 8,
    "echo.buffer": 32,
    "optim.warmup_updates": 2,
    "mesh.data": 1,
}


def echo_variants():
    file = CONFIGS / "echo_variants.py"
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ECHO_VARIANTS


VARIANTS = echo_variants()
SWEEPS = [
    path.stem
    for path in sorted(CONFIGS.glob("sweeps/*.py"))
    if path.stem.partition("_")[0] in SMALL
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    sizes = {"cifar": [(32, 32)] * 40, "imagenet": [(40, 50), (64, 36)] * 20}
    return {
        name: prepare(tmp_path_factory.mktemp(name), of, of[:10])
        for name, of in sizes.items()
    }


def expected_repeats(echo):
    """Of the same echo of plain integers: what the library says about the counts."""
    in_batches = echo.after == "batch"
    spec = ej.EchoSpec(
        factor=echo.factor,
        buffer=echo.buffer,
        order=echo.order,
        batch_size=1 if in_batches else BATCH,
        seed=echo.seed,
    )
    uses = UPDATES if in_batches else UPDATES * BATCH
    tagged = itertools.islice(ej.echo(itertools.count(), spec, tags=True), uses)
    repeats = sum(tags.repeat > 0 for _, tags in tagged)
    return repeats * (BATCH if in_batches else 1)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("file", SMALL)
def test_a_variant_sets_the_echo_alone(file, variant):
    plain = load_config(f"{CONFIGS / file}.py:tiny").to_dict()
    config = load_config(f"{CONFIGS / file}.py:tiny,{variant}")
    check_config(config)
    changed = config.to_dict()
    echo = changed.pop("echo")
    assert changed == {k: v for k, v in plain.items() if k != "echo"}
    assert echo == {**plain["echo"], **VARIANTS[variant]}


def test_an_order_keeps_the_placement_before_it():
    echo = load_config(f"{CONFIGS / 'cifar.py'}:tiny,after,spread").echo
    assert (echo.after, echo.order, echo.factor) == ("augment", "spread", 2.0)


@pytest.mark.parametrize("file", SMALL)
def test_an_unknown_variant_is_named_among_others(file):
    with pytest.raises(ValueError, match=r"'evrey' is unknown; use tiny, .*baseline, "):
        load_config(f"{CONFIGS / file}.py:tiny,evrey")


# A variant sets the echo alone, whatever the config: all are trained with one of them.
TRAINED = [("cifar", variant) for variant in VARIANTS]
TRAINED += [("imagenet", variant) for variant in ("batch", "device")]


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_soon")
@pytest.mark.parametrize(("file", "variant"), TRAINED)
def test_a_variant_trains_and_counts(tmp_path, folders, file, variant):
    fields = {**RUN, **SMALL[file], "data.source": folders[file]}
    if variant == "batch":
        fields["echo.buffer"] = 1
    config = load_config(f"{CONFIGS / file}.py:tiny,{variant}", fields)
    summary = run_train(config, tmp_path)
    repeats = expected_repeats(config.echo)
    assert (variant == "baseline") == (repeats == 0)
    assert summary["updates"] == UPDATES and summary["finished"]
    assert (summary["fresh"], summary["repeats"]) == (
        UPDATES * BATCH - repeats,
        repeats,
    )
    assert summary["echo"]["after"] == config.echo.after
    assert 0 <= summary["final"]["accuracy"] <= 1


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_soon")
@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_trains(tmp_path, folders, name):
    file = name.partition("_")[0]
    study = load_config(f"{CONFIGS / 'sweeps' / name}.py:tiny")
    small = {
        **RUN,
        **SMALL[file],
        "data.source": folders[file],
        "target": 2.0,
    }  # Never met.
    study.base.update_from_flattened_dict(small)
    for arm in study.arms.values():
        if "echo" in arm and "buffer" in arm.echo:
            arm.echo.buffer = min(arm.echo.buffer, 32)
    # What the storage adds is measured, and other tests do that.
    study.storage_ratio = 0.0
    run_study(study, tmp_path)
    for arm in study.arms:
        summary = json.loads((tmp_path / arm / "summary.json").read_text())
        assert summary["updates"] == UPDATES
