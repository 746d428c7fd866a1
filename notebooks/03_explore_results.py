# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Explore results
#
# [![Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/REPO/blob/main/notebooks/03_explore_results.ipynb)
#
# Every run leaves a folder of plain files, and every comparison reads these files. This
# notebook reads the published runs of this repository (`results/`) with plain Python
# and with `echo_jax.studies`. It compares them on three axes: fresh examples, updates
# and seconds. At the end it runs a small study of its own, with adaptive and stochastic
# echo, and repeats a run bit-exact.
#
# It takes about a minute on two CPU cores, nearly all of it for the study at the end.
# The outputs below are of one run, on two cores that other work used at the same time.
#
# **In Colab**: replace `OWNER/REPO` in the badge's address and in the next cell by the
# address of your copy of the repository, or name a wheel. Nothing has to be cloned. If
# echo_jax is installed, for example by `pip install -e '.[notebooks]'` in a checkout,
# the next cell does nothing.

# %%
import importlib.util
import os
import subprocess
import sys

# What pip installs where echo_jax is missing: of a repository, or a wheel's address.
ECHO_JAX = "echo-jax[export] @ git+https://github.com/OWNER/REPO"

# ECHO_JAX_TINY=1 in the environment makes everything small: a smoke test for CI, which
# shows that the cells work, and nothing about echoing.
TINY = os.environ.get("ECHO_JAX_TINY") == "1"

if importlib.util.find_spec("echo_jax") is None:
    if "OWNER/REPO" in ECHO_JAX:
        raise SystemExit("Set ECHO_JAX in this cell to the address, and run it again.")
    install = [sys.executable, "-m", "pip", "install", "--quiet", ECHO_JAX]
    subprocess.run(install, check=True)
    importlib.invalidate_caches()
    if "numpy" in sys.modules:  # Perhaps an older one than is installed by now.
        raise SystemExit("Installed. Restart the session, and run all cells again.")

# %%
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
from etils import epath
from IPython.display import Image, Markdown, display

from echo_jax.searches.comparison import read_search
from echo_jax.searches.statistics import relative_seconds
from echo_jax.searches.table import search_report
from echo_jax.studies.figures import write_figure
from echo_jax.studies.runs import read_study
from echo_jax.studies.table import study_report, variant_rows

# Where the published runs lie: a folder, or gs://BUCKET/FOLDER; by default `results`,
# here or above, as in a checkout.
RESULTS = os.environ.get("ECHO_JAX_RESULTS", "")
if not RESULTS:
    here = Path.cwd()
    found = [
        each for each in (here, *here.parents) if (each / "results/which").is_dir()
    ]
    if not found:
        raise SystemExit("Set RESULTS in this cell to a folder, and run it again.")
    RESULTS = found[0] / "results"
RESULTS = epath.Path(RESULTS)
OUT = Path(tempfile.mkdtemp())  # receives what this notebook writes

# %% [markdown]
# ## A run is a folder
#
# `results/which` holds twelve runs of one small byte-level language model. The storage
# was simulated: it slept, so that a fresh batch took about four times as long as a
# training step (R = 4). All variants have one seed and one learning rate, and stop at
# the same loss.

# %%
folder = RESULTS / "which/spread"
for path in sorted(folder.iterdir()):
    print(f"{path.name:20}{path.stat().length:9,} bytes")

# %% [markdown]
# - `summary.json`: what the run came to;
# - `metrics.jsonl`: what happened, one JSON object a line;
# - `environment.json`: versions, devices, the data and the commit;
# - a run of your own has `config.json` and `checkpoints/` as well.
#
# Plain Python reads them:

# %%
summary = json.loads((folder / "summary.json").read_text())
for name in ("fresh_to_target", "updates_to_target", "seconds_to_target", "R"):
    print(f"{name:20}{summary[name]:12,.1f}")


def read_rows(folder, kind):
    """Returns the rows of a run: of kind "train" or "eval"."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


for kind in ("train", "eval"):
    print(f"\nThe last row of kind {kind}:")
    print(json.dumps(read_rows(folder, kind)[-1], indent=2))

# %% [markdown]
# Fresh examples, repeats and updates are counted, each for itself. `wall_s` is the time
# of training and of waiting for input, `wait_s` the part of it that the host waited;
# evaluation, saving and compiling count as `pause_s`.
#
# ## One study, three axes
#
# A study is a folder of runs that are compared. `results/quickstart` is the one of the
# config `quickstart:storage`: no echo; every batch four times in a row; every example
# four times, at random within a buffer; every example four times, evenly far apart.

# %%
study = read_study(RESULTS / "quickstart")
png, _ = write_figure(study, OUT / "quickstart")
display(Image(str(png)))

# %% [markdown]
# From left to right: with an echo, the training needs fewer fresh examples to the
# target (dashed), as many updates or more, and fewer seconds. The additional updates
# take the place of waiting. At R below 1 nothing waits, and an echo saves no seconds
# (`results/fed`).
#
# The same as a table:

# %%
display(Markdown(study_report(study).markdown()))

# %% [markdown]
# ## Many variants
#
# The rows of the table are data, too, for figures of your own. Here: what each of the
# twelve variants took, relative to the baseline. To the left of the line is cheaper.

# %%
which = read_study(RESULTS / "which")
rows = sorted(variant_rows(which), key=lambda row: row.relative[2])
names = [row.name for row in rows]

figure, panels = plt.subplots(
    1, 3, figsize=(12, 4.2), sharey=True, layout="constrained"
)
axes = ("fresh examples", "updates", "seconds")
for number, (panel, axis) in enumerate(zip(panels, axes, strict=True)):
    values = [row.relative[number] for row in rows]
    panel.hlines(names, 1, values, color="#bbbbbb", linewidth=2)
    panel.plot(values, names, "o", color="#0072B2")
    panel.axvline(1, color="black", linewidth=1)
    for name, value in zip(names, values, strict=True):
        side = 1 if value >= 1 else -1
        panel.annotate(
            f"{value:.2f}",
            (value, name),
            (7 * side, 0),
            textcoords="offset points",
            ha="left" if side == 1 else "right",
            va="center",
            fontsize=9,
        )
    panel.set(title=axis, xlabel="relative to the baseline")
    panel.set_xlim(0, 1.2 * max(values))
    panel.spines[["top", "right"]].set_visible(False)
panels[0].invert_yaxis()
figure.suptitle(f"{which.name} ({', '.join(which.caveats)})")
plt.show()

# %% [markdown]
# Fresh examples and updates are exact, to the ten updates between two evaluations.
# Seconds are not: by the summaries (`t_down_s`), the same step took 19 ms in most runs
# and 30 ms in some, because the machine changed its speed. So the seconds of the
# variants from 0.27 to 0.34 do not differ significantly. `batch_echo` is slower,
# because its repeats are worth little. `spread_e2` is slower, because at R = 4 it
# leaves the accelerator waiting.
#
# To compare a few variants as curves, take them out of the study. The first is drawn in
# black:

# %%
variants = {run.name: run for run in which.runs}
few = ("baseline", "batch_echo", "spread_buffer_96", "spread")
some = replace(which, runs=[variants[name] for name in few])
png, _ = write_figure(some, OUT / "some")
display(Image(str(png)))

# %% [markdown]
# ## Every variant tuned
#
# Those variants share one learning rate and one seed. `results/s2_32` is of a study in
# which every factor was searched, and then trained with new seeds: its trials are
# files, too. Below, the fresh examples and updates of each factor over the baseline's,
# with 95 % intervals.

# %%
search = read_search(RESULTS / "s2_32")
for each in search.variants[1:]:
    fresh, updates = each.fresh, each.updates
    print(
        f"{each.name:4} fresh {fresh.value:.3f} ({fresh.low:.3f} to {fresh.high:.3f})"
        f"   updates {updates.value:.2f} ({updates.low:.2f} to {updates.high:.2f})"
    )

# %% [markdown]
# Which factor is best for which loading speed? The loader needs R steps' time for a
# fresh batch. A training takes as long as the slower of loader and accelerator. So the
# counts give the seconds for every R, here divided by the baseline's at the same R.
# Choose the factor with the lowest line.

# %%
ratios = [0.25 * k for k in range(2, 65)]


def times(variant):
    """Returns how long a variant takes at each R, in steps."""
    fresh, updates = variant.mean("fresh_to_target"), variant.mean("updates_to_target")
    size = search.base["batch_size"]
    return [
        relative_seconds(fresh, updates, batch_size=size, ratio=ratio)
        for ratio in ratios
    ]


baseline = times(search.variants[0])
figure, ax = plt.subplots(figsize=(7, 4), layout="constrained")
for variant in search.variants:
    relative = [a / b for a, b in zip(times(variant), baseline, strict=True)]
    ax.plot(ratios, relative, label=variant.name)
ax.set(xlabel="R", ylabel="time over the baseline's", title=search.name)
ax.set_ylim(bottom=0)
ax.legend()
plt.show()

# %% [markdown]
# And how much does the learning rate matter? Every trial of the searches, with a ring
# around the best of each:

# %%
search_report(search).write(OUT / "s2_32")
display(Image(str(OUT / "s2_32" / "trials.png")))

# %% [markdown]
# ## Does it learn the repeats by heart?
#
# The loop logs the training loss of first uses and of repeats apart: `loss_repeat_0` is
# the loss of fresh examples, and `loss_repeat_3` the loss of fourth uses. Their
# difference shows how much better the model knows examples that it has seen.

# %%
ARMS = {
    "batch_echo": "each batch 4 times in a row",
    "spread_buffer_96": "spread, buffer of 96 examples",
    "spread": "spread, buffer of 512",
}

figure, panels = plt.subplots(
    1, 3, figsize=(12, 3.4), sharey=True, layout="constrained"
)
for panel, (variant, words) in zip(panels, ARMS.items(), strict=True):
    rows = read_rows(RESULTS / "which" / variant, "train")
    updates = [row["updates"] for row in rows]
    for use, colour in ((0, "black"), (3, "#D55E00")):
        losses = [row[f"loss_repeat_{use}"] for row in rows]
        label = "first uses" if use == 0 else "fourth uses"
        panel.plot(updates, losses, "o-", markersize=4, color=colour, label=label)
    gap = rows[-1]["loss_repeat_0"] - rows[-1]["loss_repeat_3"]
    panel.set_title(f"{words}\ngap at the end: {gap:.2f}", fontsize=11)
    panel.set(xlabel="updates", xlim=(0, None))
    panel.spines[["top", "right"]].set_visible(False)
panels[0].set_ylabel("training loss")
panels[0].legend(frameon=False)
plt.show()

# %% [markdown]
# Hardly: the gap is 0.1 to 0.2 at a loss of 2.3. If the gap grew, the model would be
# learning the buffer by heart. Then use a smaller factor, a larger buffer or an echo
# before augmentation. (A point is the mean of 50 updates. First and fourth uses are of
# different examples, so the gap jumps. At the first point, fourth uses also come later
# than first uses, when the loss is already lower.)
#
# ## A study of your own
#
# A study is a config: a base, and what differs in each variant. This is the
# quickstart's smoke test, with a small model and an easy target, so it ends within a
# minute, and its numbers mean nothing. Two variants decide while they run. In all
# others `echo.mode` is `fixed`. `echo-jax study` does the same from the command line. A
# second call with the same folder would resume.

# %%
from echo_jax.config import load_config
from echo_jax.runs import run_study, run_train

ADAPTIVE = {"mode": "adaptive", "max_uses": 4, "buffer": 64, "buffer_on": "host"}
STOCHASTIC = {"mode": "stochastic", "buffer": 64, "fetch": {"start": 0.25, "end": 0.25}}

config = load_config("quickstart:tiny")
with config.unlocked():
    if TINY:
        config.arms = {"baseline": config.arms.baseline}
        config.base.target, config.base.updates = 0.75, 20
    config.arms.adaptive = {"echo": ADAPTIVE}
    config.arms.stochastic = {"echo": STOCHASTIC}

run_study(config, OUT / "study")

# %%
own = read_study(OUT / "study")
display(Markdown(study_report(own).markdown()))

# %% [markdown]
# ## A run again
#
# The decisions of an adaptive run depend on the clock. Its folder keeps them in
# `decisions.json`, a `DecisionLog`. A run whose `echo.replay` names this file repeats
# the run bit-exact.

# %%
import echo_jax as ej

decisions = OUT / "study/adaptive/decisions.json"
print(ej.DecisionLog.from_text(decisions.read_text()))

again = config.base.copy_and_resolve_references()
again.echo.update({**ADAPTIVE, "replay": str(decisions)})
run_train(again, OUT / "again")

for name in ("study/adaptive", "again"):
    summary = json.loads((OUT / name / "summary.json").read_text())
    print(
        f"{name:16}{summary['updates']} updates, {summary['fresh']} fresh examples, "
        f"parameters {summary['params_sha256'][:16]}…"
    )

# %% [markdown]
# `study_report(study).write(FOLDER)` writes table, figure and a `report.html` that
# opens offline; so does `echo-jax report FOLDER`, also of runs that belong to no study.
