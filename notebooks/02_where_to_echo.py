# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Where to echo, and in what order
#
# [![Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/REPO/blob/main/notebooks/02_where_to_echo.ipynb)
#
# An echo can follow any stage of the input pipeline, and arrange its repeats in several
# orders. This notebook shows in pictures what a repeat looks like after each stage,
# what it costs the host, what augmentation on the accelerator does, and when each item
# is used.
#
# It takes less than a minute on two CPU cores. The images are synthetic shapes of 32 by
# 32 pixels, drawn by the program and stored as JPEG, so that nothing has to be
# downloaded. It trains no network: `docs/choose-an-echo.md` and `03_explore_results`
# have trainings with each placement and order.
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
from collections import Counter
from contextlib import closing
from itertools import islice

import matplotlib.pyplot as plt
import numpy as np

import echo_jax as ej
from echo_jax.data.images.host_colour import distort_colours
from echo_jax.data.pipeline.dataset import PipelineSpec, train_dataset
from echo_jax.data.pipeline.stages import Stages
from echo_jax.data.sources.shapes import ShapeRecords, augment_shape, decode_shape

records = ShapeRecords(64 if TINY else 1024, seed=0)

# %% [markdown]
# ## The stages of a pipeline
#
# A record is **read** (bytes), **decoded** (pixels), **augmented** at random, and put
# into a **batch**. The stages are plain functions; `echo_jax.data` runs them with
# Grain, and one word says which of them the echo follows. The augmentation: a shift of
# up to 4 pixels, a mirror image half the time, and other colours, so that it is seen.


# %%
def augment(item, seed):
    """The seed belongs to one use of one item: (run's seed, fresh index, repeat)."""
    shifted = augment_shape(item, seed)
    return {**shifted, "image": distort_colours(shifted["image"], seed)}


def batches_after(stage, spec, num_batches, stages=None, batch_size=4):
    """Returns the first batches of a pipeline with an echo after a stage."""
    stages = stages or Stages(records, decode_shape, augment)
    # Nothing is made ahead, so that only what is shown is done.
    pipeline = PipelineSpec(stage, batch_size, threads=0, prefetch=0)
    with closing(iter(train_dataset(stages, pipeline, spec))) as batches:
        return list(islice(batches, num_batches))


# %% [markdown]
# ## What a repeat looks like
#
# Every row is a training batch of four images, in the order of training. Every image is
# used twice (e = 2), and the colour of its frame says which image it is: find the two
# uses of a colour (some repeats come later than these four batches). The number in the
# corner is the use: 0 is fresh, 1 is the repeat.

# %%
PLACEMENTS = {
    "read": "other pixels,\nother neighbours",
    "decode": "other pixels,\nother neighbours",
    "augment": "the same pixels,\nother neighbours",
    "batch": "the same pixels,\nthe same neighbours",
}
FRAMES = (*plt.get_cmap("tab10").colors, (0, 0, 0))


def show_image(panel, image, item, use):
    panel.imshow(image, interpolation="nearest")
    panel.set(xticks=[], yticks=[])
    for spine in panel.spines.values():
        spine.set(color=FRAMES[item % len(FRAMES)], linewidth=4)
    panel.text(1, 30, str(use), color="white", weight="bold").set_bbox(
        {"facecolor": "black", "edgecolor": "none", "pad": 1.5}
    )


figure = plt.figure(figsize=(12, 3.9))
for part, (stage, words) in zip(
    figure.subfigures(1, len(PLACEMENTS), wspace=0.02), PLACEMENTS.items(), strict=True
):
    # After "batch", the items of the echo are batches.
    is_batch = stage == "batch"
    spec = (
        ej.EchoSpec(2)
        if is_batch
        else ej.EchoSpec(2, order="window_shuffle", buffer=12)
    )
    panels = part.subplots(4, 4)
    for row, batch in zip(panels, batches_after(stage, spec, 4), strict=True):
        for column, panel in enumerate(row):
            item = int(batch["fresh_index"][column])
            if is_batch:
                item = item * 4 + column
            show_image(panel, batch["image"][column], item, batch["repeat"][column])
    part.subplots_adjust(0.03, 0.01, 0.97, 0.82, wspace=0.08, hspace=0.08)
    part.suptitle(f"after {stage}: a repeat has\n{words}", fontsize=10)
plt.show()

# %% [markdown]
# After **read** and **decode** a repeat gets a new augmentation, so the network sees
# another picture. After **augment** it sees the same picture among other pictures.
# After **batch** it sees the same batch, here right after the first time: the weakest
# echo.
#
# ## What a repeat costs the host
#
# The earlier the echo, the more a repeat differs from the first use, and the more of
# the pipeline runs again for it. Here the stages count how often they are called while
# 256 images are trained on, at e = 4. The counts are of this run; no clock is involved.


# %%
class CountedRecords:
    """The records, and how often one was read."""

    def __init__(self, calls):
        self.calls = calls

    def __len__(self):
        return len(records)

    def __getitem__(self, index):
        self.calls["read"] += 1
        return records[index]


def counted(calls, name, function):
    def count_and_call(*args):
        calls[name] += 1
        return function(*args)

    return count_and_call


def calls_of(stage, factor, batch_size=8, num_batches=4 if TINY else 32):
    """Counts the calls of each stage per image that is trained on."""
    calls = Counter()
    stages = Stages(
        CountedRecords(calls),
        counted(calls, "decode", decode_shape),
        counted(calls, "augment", augment),
    )
    batches_after(stage, ej.EchoSpec(factor), num_batches, stages, batch_size)
    return {name: calls[name] / (num_batches * batch_size) for name in STAGES}


STAGES = ("read", "decode", "augment")
costs = {"no echo": calls_of("batch", 1)}
costs |= {f"after {stage}": calls_of(stage, 4) for stage in PLACEMENTS}

figure, panels = plt.subplots(1, 3, figsize=(10, 2.6), sharey=True, sharex=True)
for panel, stage in zip(panels, STAGES, strict=True):
    values = [cost[stage] for cost in costs.values()]
    bars = panel.barh(list(costs), values, color="#0072B2")
    panel.bar_label(bars, [f"{value:.2f}" for value in values], padding=3)
    panel.set(title=stage, xlim=(0, 1.25), xlabel="calls per image trained on")
    panel.spines[["top", "right"]].set_visible(False)
panels[0].invert_yaxis()
figure.suptitle("Calls on the host, e = 4")
figure.tight_layout()
plt.show()

# %% [markdown]
# So the echo belongs **behind the bottleneck, and as early as the bottleneck allows**.
# If reading is slow, echo after read, as long as the cores keep up with decoding the
# repeats. If decoding is slow as well, echo after decode.
#
# ## Augmentation on the accelerator
#
# Where cores are scarce, even augmenting the repeats is too much.
# `ej.device.echo_batches` keeps decoded images in the accelerator's memory and augments
# every use there, in the program that draws the batch. A fresh image crosses to the
# accelerator once, as bytes. Below, `ej.echo_batches` and `ej.device.echo_batches`
# repeat the same decoded images.

# %%
import jax

from echo_jax.data.augment import Augment, ColourDistortion, Flip, PadCrop

NUM_IMAGES, USES = 4, 8


def fresh_batches():
    """Yields host batches of decoded images, not augmented."""
    for first in range(0, NUM_IMAGES, 2):
        items = [decode_shape(records[index]) for index in (first, first + 1)]
        yield {name: np.stack([item[name] for item in items]) for name in items[0]}


def images_by_use(batches):
    """Collects the images of (image, tags) pairs: by item and use."""
    return {
        (int(item), int(use)): np.asarray(image)
        for batch, tags in batches
        for image, item, use in zip(
            batch["image"], tags.fresh_index, tags.repeat, strict=True
        )
    }


spec = ej.EchoSpec(USES, order="window_shuffle", buffer=4, batch_size=4, seed=1)
on_host = ej.echo_batches(fresh_batches(), spec, tags=True)
augment_there = Augment((PadCrop(4), Flip(), ColourDistortion()))


def echo_on_device():
    # One part of the buffer for each device; four images are enough for one device.
    mesh = jax.sharding.Mesh(jax.devices()[:1], "data")
    return ej.device.echo_batches(
        fresh_batches(), spec, mesh=mesh, augment=augment_there, tags=True
    )


on_device = echo_on_device()
pictures = {
    "ej.echo, on the host:\nthe same pixels": images_by_use(on_host),
    "ej.device.echo_batches:\naugmented anew": images_by_use(on_device),
}

figure, panels = plt.subplots(4, USES + 1, figsize=(11, 5))
for number, (words, images) in enumerate(pictures.items()):
    for item in range(2):
        row = panels[2 * number + item]
        original = decode_shape(records[item])["image"]
        shown = [original, *(images[item, use] for use in range(USES))]
        for column, image in enumerate(shown):
            row[column].imshow(image)
            row[column].set(xticks=[], yticks=[])
        row[0].set_ylabel(words, rotation=0, ha="right", va="center", fontsize=9)
for column, panel in enumerate(panels[0]):
    panel.set_title(f"use {column - 1}" if column else "as stored", fontsize=9)
figure.tight_layout()
plt.show()

counts = on_device.counts
print(
    f"{counts.uses} uses of {counts.fresh} images; to the device went "
    f"{counts.fresh * original.nbytes:,} bytes of pixels, not "
    f"{counts.uses * original.nbytes:,}"
)

# %% [markdown]
# The picture of a use follows from (seed, fresh index, use) alone, so the same seed
# gives bit-exact pictures again:

# %%
first, second = (images_by_use(echo_on_device()) for _ in range(2))
print(
    f"{len(first)} pictures, equal in both runs:",
    sum(np.array_equal(first[key], second[key]) for key in first),
)

# %% [markdown]
# ## When is an item used?
#
# The **order** of an `ej.EchoSpec` arranges the uses of an item in time: one after
# another (`consecutive`), at random within a bounded delay (`window_shuffle`), through
# the paper's own shuffle buffer (`shuffle_buffer`), or evenly far apart (`spread`). The
# items may be anything: here they are just numbers. Each dot is one use; the colour is
# the use's number.

# %%
FACTOR, BATCH = 4, 8
NUM_ITEMS = 200 if TINY else 2000


def uses_of(spec, num_items=NUM_ITEMS):
    """Returns (update, item, use) of every use, as an array of three columns."""
    rows = [
        (number // BATCH, tags.fresh_index, tags.repeat)
        for number, (_, tags) in enumerate(ej.echo(range(num_items), spec, tags=True))
    ]
    return np.array(rows)


def fixed(order, buffer):
    return ej.EchoSpec(FACTOR, order=order, buffer=buffer, batch_size=BATCH)


def show_uses(panels, specs):
    """Draws a dot for each use of 120 items, in a panel for each spec."""
    most = 0
    for panel, (name, spec) in zip(panels, specs.items(), strict=True):
        update, item, use = uses_of(spec, num_items=120).T
        most = max(most, use.max())
        colours = plt.get_cmap("viridis_r", 4)
        dots = panel.scatter(update, item, c=use, s=9, cmap=colours, vmin=0, vmax=3)
        panel.set(title=name, xlabel="update (batches of 8)")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("item, as it was read")
    bar = panels[0].figure.colorbar(dots, ax=panels, pad=0.02, label="use of the item")
    last = "3" if most == 3 else "3 or more"
    bar.set_ticks(np.arange(4) * 0.75 + 0.375, labels=["0 (fresh)", "1", "2", last])


orders = {
    "consecutive": fixed("consecutive", 1),
    "window_shuffle, 32 items": fixed("window_shuffle", 32),
    "shuffle_buffer, 32 uses": fixed("shuffle_buffer", 32),
    "spread, 32 items": fixed("spread", 32),
}
figure, panels = plt.subplots(
    1, 4, figsize=(14, 4), sharex=True, sharey=True, layout="constrained"
)
show_uses(panels, orders)
plt.show()

# %% [markdown]
# Follow an item from left to right. With `consecutive` its four uses are in one batch,
# and one dot hides the others. `window_shuffle` moves them apart by chance, and some
# stay close. So does `shuffle_buffer`, whose buffer holds uses and not items: here
# eight items' worth. An item may stay in it for long, since nothing bounds how long.
# `spread` draws lines: each use comes one lag after the one before. And once its buffer
# is full every batch takes equally many fresh items, here two of eight, so that the
# loader is asked at a constant rate.
#
# ## Who decides: three modes
#
# An `ej.EchoSpec` decides by an item's number, so a loader that stalls is waited for.
# An `ej.AdaptiveSpec` decides by what is ready: a fresh batch if there is one, else the
# items that were unused for longest, none more often than `max_uses` times. An
# `ej.StochasticSpec` tosses a coin: it loads a fresh batch with a probability that may
# change while it trains, and else repeats at random from the last `buffer` items.
#
# The decisions of an adaptive echo depend on the clock, and its `log` keeps them. Here
# it replays the log of a loader that sometimes stalls for twelve updates, so this
# picture is always the same.

# %%
log = ej.DecisionLog(([True] * 5 + [False] * 12) * 3)
load = ej.FetchSchedule(start=1 / FACTOR, end=1 / FACTOR)
modes = {
    "fixed (spread, e = 4)": fixed("spread", 32),
    "adaptive (max_uses=4)": ej.AdaptiveSpec(
        max_uses=4, buffer=32, batch_size=BATCH, replay=log
    ),
    "stochastic (p = 1/4)": ej.StochasticSpec(load, buffer=32, batch_size=BATCH),
}
figure, panels = plt.subplots(
    1, 3, figsize=(12, 4), sharex=True, sharey=True, layout="constrained"
)
show_uses(panels, modes)
plt.show()

# %% [markdown]
# Adaptive: five fresh batches in a row while the loader is fast, then the repeats of
# the last four of them, which are what the buffer holds, while it stalls. Stochastic:
# some items are used once and others often. The number of fresh items is known only on
# average.
#
# `docs/choose-an-echo.md` says which one when; `01_echo_in_your_trainer` shows an
# adaptive echo in a loop, and `03_explore_results` one in a config.
#
# ## Lags
#
# The **lag** is the number of updates between two uses of an item. In the paper's
# figure 7 (Choi et al. 2019; e = 2, a language model) a repeat is worth more at a
# longer lag.


# %%
def lags_of(uses):
    """Returns the updates between each use of an item and its next use."""
    update, item, use = uses.T
    by_item = np.lexsort((use, item))
    same_item = np.diff(item[by_item]) == 0
    return np.diff(update[by_item])[same_item]


buffer = 32 if TINY else 256
sizes = {
    "consecutive": 1,
    "window_shuffle": buffer,
    "shuffle_buffer": buffer,
    "spread": buffer,
}
lags = {order: lags_of(uses_of(fixed(order, size))) for order, size in sizes.items()}
longest = max(lag.max() for lag in lags.values())
bins = np.arange(-0.5, longest + 1, max(1, longest // 40))  # whole updates

figure, panels = plt.subplots(
    1, 4, figsize=(14, 3.4), sharex=True, layout="constrained"
)
for panel, (order, lag) in zip(panels, lags.items(), strict=True):
    panel.hist(lag, bins=bins, color="#0072B2")
    panel.axvline(np.median(lag), color="#D55E00", linewidth=1.5)
    close = np.mean(lag <= 1)
    panel.set_title(
        f"{order}: median {np.median(lag):g},\n{close:.0%} within one update",
        fontsize=11,
    )
    panel.set(xlabel="lag in updates", yticks=[])
    panel.spines[["top", "right", "left"]].set_visible(False)
panels[0].set_ylabel("uses, scaled to the highest")
figure.suptitle(f"e = {FACTOR}, batches of {BATCH}, buffer of {buffer}")
plt.show()

# %% [markdown]
# ## What the buffer does
#
# The buffer is counted in fresh items that are kept; for `shuffle_buffer` in uses, of
# fewer items. A long lag costs memory. The line is the median lag, and the shade has
# nine lags in ten.

# %%
buffers = (32, 64) if TINY else (32, 64, 128, 256, 512)

figure, panel = plt.subplots(figsize=(6.5, 4))
COLOURS = {
    "shuffle_buffer": "#009E73",
    "window_shuffle": "#D55E00",
    "spread": "#0072B2",
}
for order, colour in COLOURS.items():
    quantiles = [
        np.quantile(lags_of(uses_of(fixed(order, b))), (0.05, 0.5, 0.95))
        for b in buffers
    ]
    low, middle, high = np.transpose(quantiles)
    panel.plot(buffers, middle, "o-", color=colour, label=order)
    panel.fill_between(buffers, low, high, color=colour, alpha=0.15, linewidth=0)
panel.set_xscale("log", base=2)
panel.set_xticks(buffers, [str(b) for b in buffers])
panel.set(
    xlabel="buffer in items, or in uses (shuffle_buffer)",
    ylabel="lag in updates",
    ylim=0,
)
panel.set_title(f"e = {FACTOR}, batches of {BATCH}, {NUM_ITEMS:,} items")
panel.spines[["top", "right"]].set_visible(False)
panel.legend(frameon=False, loc="upper left")
plt.show()

# %% [markdown]
# With the same memory `spread` has the longest lag: about twice that of
# `window_shuffle`, and nearly M·e / ((e − 1)·B) updates, which is what M items allow at
# factor e and batch size B. With 512 items that is 85; counted are a median of 73 with
# `spread`, of 36 with `window_shuffle`, and of 23 with `shuffle_buffer`, whose 512 uses
# are of fewer items. (Nothing is timed here, so that these are the same on every
# machine. The short lags of `spread` are from the beginning, while its buffer fills.)
#
# In a config all of this is five fields: `echo.stage`, `echo.buffer_on`, `echo.mode`,
# `echo.order` and `echo.buffer`. `docs/choose-an-echo.md` says how to choose them from
# what `ej.probe` finds.
