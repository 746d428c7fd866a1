# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Echo in a trainer of your own
#
# [![Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/REPO/blob/main/notebooks/01_echo_in_your_trainer.ipynb)
#
# You have a training loop in plain JAX and a Python iterator that feeds it, and the
# iterator is slow. This notebook measures how slow (`ej.probe`). Then it repeats data
# instead of waiting: three lines on the host (`ej.echo_batches`), and again on the
# accelerator, where every repeat gets a new augmentation (`ej.device.echo_batches`). It
# compares seconds and losses. At the end, a loader stalls, and an adaptive echo
# (`ej.AdaptiveSpec`) repeats only while no fresh batch is ready.
#
# It takes about two minutes on two CPU cores. The slow storage is simulated: it sleeps.
# The images are synthetic, so that nothing has to be downloaded. The rest is real. The
# outputs below are of one run, on two cores that other work used at the same time. So
# its seconds, R and factor are not those of an idle machine.
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

# %% [markdown]
# ## A loop that waits
#
# A small convolutional network learns to tell eight shapes apart. The next two cells
# use echo_jax only to draw the images.
#
# The loader reads one record after the other. Each read takes a millisecond, as over a
# network, and then the record is a JPEG to be decoded.

# %%
import itertools
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

from echo_jax.data.images.decode import pad_crop_flip
from echo_jax.data.sources.shapes import CLASS_NAMES, ShapeRecords, decode_shape

BATCH = 16 if TINY else 64
READ_S = 1e-3  # what a read takes, in seconds: simulated
FRESH_BATCHES = 10 if TINY else 200  # the reading that every arm may do

train_records = ShapeRecords(256 if TINY else 8192, seed=0)
test_records = ShapeRecords(64 if TINY else 1024, seed=1)


def read_items():
    """Yields decoded training images, over and over, each epoch in a new order."""
    for epoch in itertools.count():
        order = np.random.default_rng(epoch).permutation(len(train_records))
        for index in order:
            time.sleep(READ_S)  # the simulated storage
            yield decode_shape(train_records[index])


def augment_on_host(item, rng):
    """Shifts an image by up to 4 pixels and mirrors it half the time."""
    seed = int(rng.integers(2**63))
    return {**item, "image": pad_crop_flip(item["image"], seed, padding=4)}


def stack(items):
    return {name: np.stack([item[name] for item in items]) for name in items[0]}


def loader(augmented=True):
    """Yields training batches without end: this is the slow iterator."""
    items, rng = read_items(), np.random.default_rng(0)
    while True:
        batch = list(itertools.islice(items, BATCH))
        if augmented:
            batch = [augment_on_host(item, rng) for item in batch]
        yield stack(batch)


# %% [markdown]
# The model and its update, in plain JAX with optax:

# %%
CHANNELS = (3, 24, 48, 96)


def init_params(seed=0):
    keys = jax.random.split(jax.random.key(seed), len(CHANNELS))
    pairs = itertools.pairwise(CHANNELS)
    kernels = [
        jax.random.normal(key, (3, 3, a, b)) * (2 / (9 * a)) ** 0.5
        for key, (a, b) in zip(keys, pairs, strict=False)
    ]
    head = jax.random.normal(keys[-1], (CHANNELS[-1], len(CLASS_NAMES))) * 0.1
    return {"kernels": kernels, "head": head}


def logits_of(params, images):
    x = images.astype(jnp.float32) / 128 - 1
    for kernel in params["kernels"]:
        x = jax.lax.conv_general_dilated(
            x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x)
    return x.max(axis=(1, 2)) @ params["head"]


def loss_of(params, batch):
    logits = logits_of(params, batch["image"])
    labels = batch["label"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


optimizer = optax.adam(2e-3)


@jax.jit
def train_step(state, batch):
    params, moments = state
    loss, gradient = jax.value_and_grad(loss_of)(params, batch)
    updates, moments = optimizer.update(gradient, moments)
    return (optax.apply_updates(params, updates), moments), loss


test_batch = stack([decode_shape(record) for record in test_records])
test_loss = jax.jit(loss_of)


def new_state():
    params = init_params()
    return params, optimizer.init(params)


# %% [markdown]
# ## Is it starved?
#
# `ej.probe` needs the iterator and the step, nothing else. It times the loader alone,
# the step alone, and both together, and runs a short echo, too. **R** is the time of a
# fresh batch over the time of a step: with R = 4 the accelerator could make four
# updates while it waits for one batch. On an accelerator faster than this CPU, R is
# larger.

# %%
import echo_jax as ej

report = ej.probe(loader(), train_step, state=new_state(), seconds=2 if TINY else 10)
print(report)

# %% [markdown]
# Read the advice first: use more threads or processes to read, if you can. Here the
# loop stays as it is, as if the storage were at its limit. Then the advice is a factor
# of min(R, 4), a careful start. In tuned studies of small models factors up to 8 still
# saved fresh examples, and more updates than R allows cost time.
#
# (The probe timed an echo of whole batches. This shows its time, not the value of its
# repeats.)

# %%
factor = report.advised_factor
if factor == 1:
    print("On this machine the loader is not the slower side: do not echo here.")
else:
    print(f"The echo factor for this machine: {factor:g}")

# %% [markdown]
# ## Before
#
# The loop takes a batch for each update. From time to time it stops its clock and
# evaluates the loss on held-out images. The clock starts after three updates, so
# compilation is not counted.


# %%
def train(batches, eval_every):
    """Trains on all batches; returns rows of (updates, seconds, held-out loss)."""
    state, rows, seconds = new_state(), [], 0.0
    started = time.perf_counter()
    for update, batch in enumerate(batches, start=1):
        state, _ = train_step(state, batch)
        if update == 3:
            jax.block_until_ready(state)
            started = time.perf_counter()
        elif update % eval_every == 0:
            jax.block_until_ready(state)
            seconds += time.perf_counter() - started
            rows.append((update, seconds, float(test_loss(state[0], test_batch))))
            started = time.perf_counter()
    return rows


NUM_EVALS = 2 if TINY else 20


def eval_every(factor):
    """So many updates between two looks that all arms are looked at equally often."""
    return int(FRESH_BATCHES * factor) // NUM_EVALS


fresh = itertools.islice(loader(), FRESH_BATCHES)
curves = {"no echo": train(fresh, eval_every(1))}

# %% [markdown]
# ## Three lines
#
# The loader yields batches. The echo takes them apart, keeps 2,048 images, and puts new
# batches together, in which every image is used `factor` times (2.5 means 2 and 3 in
# turn), as far apart as the buffer allows (`order="spread"`). The reading stays the
# same: `FRESH_BATCHES` batches, then the loader ends, and the echo ends after it, when
# every image has had all of its uses.

# %%
spec = ej.EchoSpec(
    factor=factor, order="spread", buffer=64 if TINY else 2048, batch_size=BATCH
)
fresh = itertools.islice(loader(), FRESH_BATCHES)
with ej.echo_batches(fresh, spec, drop_remainder=True) as batches:
    curves["ej.echo_batches"] = train(batches, eval_every(factor))
print(batches.counts)

# %% [markdown]
# A repeat here has the same pixels as the first use, because the augmentation comes
# before the echo.
#
# ## On the accelerator, with every repeat augmented anew
#
# `ej.device.echo_batches` keeps the images in the accelerator's memory, as bytes. A
# fresh batch is sent there once; a repeat costs no decoding and no transfer. The same
# shifts and flips move behind the echo, into the program that draws the batch, with a
# random key for every use. It also reads ahead in a thread of its own.

# %%
from echo_jax.data.augment import Augment, Flip, PadCrop

fresh = itertools.islice(loader(augmented=False), FRESH_BATCHES)
augment = Augment((PadCrop(4), Flip()))
with ej.device.echo_batches(
    fresh, spec, augment=augment, drop_remainder=True
) as batches:
    curves["ej.device.echo_batches"] = train(batches, eval_every(factor))
print(batches.counts)

# %% [markdown]
# ## In a step of your own
#
# A loop that is compiled as a whole has no place for an iterator. `ej.device.StepEcho`
# makes the integers of all updates beforehand, and the program reads and writes by
# them: here every update of some fresh batches is in one program, by `jax.lax.scan`.
# The images in each batch are those of `ej.device.echo_batches`.

# %%
held = list(itertools.islice(loader(augmented=False), 4 if TINY else 20))
echo = ej.device.StepEcho.of(held[0], spec)
integers, taken, tags = echo.decide(len(held))


@jax.jit
def all_updates(slots, state, fresh, integers, first):
    def update(carry, inputs):
        slots = echo.write(carry[0], fresh, *inputs)
        batch = echo.read(slots, inputs[0], augment)
        state, loss = train_step(carry[1], batch)
        return (slots, state), loss

    return jax.lax.scan(update, (slots, state), (integers, first))


inputs = (stack(held), integers, np.cumsum(taken) - taken)
_, losses = all_updates(echo.init(), new_state(), *inputs)
print(f"{len(losses)} updates of {len(held)} fresh batches in one program: ", end="")
print(f"the loss falls from {losses[0]:.2f} to {losses[-1]:.2f}.")

with ej.device.echo_batches(held, spec, drop_remainder=True) as batches:
    same = [batches.tags.fresh_index for _ in batches]
print(f"The same images in each batch: {np.array_equal(tags.fresh_index, same)}")

# %% [markdown]
# ## What it was worth
#
# All three read the same number of images. Left: seconds of training, which you pay
# for. Right: the same runs against updates. An echo gains nothing on this axis, because
# a repeat is at most as good as a fresh image.

# %%
COLOURS = {
    "no echo": "black",
    "ej.echo_batches": "#D55E00",
    "ej.device.echo_batches": "#0072B2",
}

figure, panels = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True)
end_loss = curves["no echo"][-1][2]
for panel, column, label in zip(panels, (1, 0), ("seconds", "updates"), strict=True):
    for name, rows in curves.items():
        values = np.array(rows)
        panel.plot(values[:, column], values[:, 2], color=COLOURS[name], label=name)
    panel.axhline(end_loss, color="grey", linewidth=1, linestyle=":")
    panel.set_xlabel(f"{label} of training" if label == "seconds" else label)
    panel.set_xlim(left=0)
    panel.spines[["top", "right"]].set_visible(False)
panels[0].set_ylabel("loss on held-out images")
panels[0].legend(frameon=False)
figure.suptitle(
    f"{FRESH_BATCHES} fresh batches, R = {report.ratio:.1f}, e = {factor:g} "
    "(simulated storage, synthetic images)"
)
figure.tight_layout()
plt.show()

# %%
print(f"{'':16}{'updates':>9}{'seconds':>9}{'lowest loss':>13}   to {end_loss:.2f}")
for name, rows in curves.items():
    updates, seconds, _ = rows[-1]
    lowest = min(loss for *_, loss in rows)
    reached = [at for _, at, loss in rows if loss <= end_loss]
    when = f"{reached[0]:.1f} s" if reached else "not reached"
    print(f"{name:16}{updates:9}{seconds:9.1f}{lowest:13.3f}   {when}")

# %% [markdown]
# The last column is the time at which a variant first reached the final loss of the
# loop without an echo. The losses depend on the factor and the seeds, not on the speed
# of a machine. At e = 4, with three initial networks, the held-out loss ended at 1.65
# to 1.81 without an echo, at 1.18 to 1.26 with `ej.echo_batches`, and at 0.92 to 0.98
# with `ej.device.echo_batches`. Repeats with a new augmentation stay useful for longer.
#
# ## A loader that stalls
#
# The loader above is slow at a constant rate, and a fixed factor fits it. Others come
# in bursts: a shared file system answers at once for a while, then it stalls. The next
# loader does this: nine batches at once, then a stall of forty updates' time. Its mean
# R is 4. (Its batches are in memory, and it sleeps.)

# %%
STEP_S = report.t_down_s
SECONDS = 1 if TINY else 8

stored = list(itertools.islice(loader(), 4 if TINY else 50))


def bursts(stall_s):
    """Yields fresh batches without end; every tenth comes late."""
    for number in itertools.count():
        if number % 10 == 9:
            time.sleep(stall_s)
        yield stored[number % len(stored)]


def train_for(batches, seconds):
    """Trains for some time; returns updates, the loss at the end, and who was used."""
    state, used, started = new_state(), [], time.perf_counter()
    for batch in batches:
        state, _ = train_step(state, batch)
        jax.block_until_ready(state)
        used.append(batches.tags.fresh_index)
        if time.perf_counter() - started > seconds:
            break
    return len(used), float(test_loss(state[0], test_batch)), used


# %% [markdown]
# Three ways, for the same time. Without an echo, but two batches read ahead
# (`prefetch=2`; an `EchoSpec` of factor 1 passes everything on). With a fixed factor of
# 4. And adaptive: a fresh batch if one is ready; else the images that were unused for
# longest, none more than `max_uses` times; else it waits. No R is needed for it.

# %%
buffer = 64 if TINY else 1024
specs = {
    "prefetching": ej.EchoSpec(batch_size=BATCH),
    "fixed, e = 4": ej.EchoSpec(
        factor=4, order="spread", buffer=buffer, batch_size=BATCH
    ),
    "adaptive, max_uses 4": ej.AdaptiveSpec(
        max_uses=4, buffer=buffer, batch_size=BATCH
    ),
}
print(f"{'':16}{'updates':>9}{'fresh batches':>15}{'loss':>8}")
for name, spec in specs.items():
    late = bursts(40 * STEP_S)
    with ej.echo_batches(late, spec, prefetch=2) as batches:
        updates, loss, used = train_for(batches, SECONDS)
    print(f"{name:16}{updates:9}{batches.counts.fresh / BATCH:15.0f}{loss:8.3f}")

# %% [markdown]
# The fixed echo asks for its next fresh batch at a constant rate. While the loader is
# fast it takes none in advance, and when the loader stalls it soon waits. The adaptive
# echo has taken all batches that came, and repeats them.
#
# `docs/choose-an-echo.md` says when adaptive is the right mode; if R is constant and
# known, use a fixed factor, because its repeats are further apart.
#
# The decisions of an adaptive echo depend on the clock, so it keeps them: `log` has a
# bit for each batch. It is also part of `get_state()`, if the loader has a state. An
# echo that replays the log makes the same batches, however fast its loader is:

# %%
log = batches.log
print(log)

spec = ej.AdaptiveSpec(max_uses=4, buffer=buffer, batch_size=BATCH, replay=log)
with ej.echo_batches(bursts(0), spec) as batches:
    again = [batches.tags.fresh_index for _ in itertools.islice(batches, len(used))]
print(f"{len(again)} batches, the same images in all: {np.array_equal(again, used)}")

# %% [markdown]
# This notebook has one seed, one learning rate for all variants, a small network, and a
# storage that sleeps. It shows what happens when a loop that waits gets an echo.
# Measure the gain in your own training. `02_where_to_echo` shows the choices, and
# `docs/choose-an-echo.md` says how to choose.
