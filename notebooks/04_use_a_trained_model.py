# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Use a trained model
#
# [![Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/REPO/blob/main/notebooks/04_use_a_trained_model.ipynb)
#
# A run folder is enough to use what was trained: `ej.load_run` needs neither the data
# nor the devices of the training. This notebook trains two small models, loads them,
# evaluates one again, shows its predictions, continues a text, writes weights and a
# program for other tools, and starts another run from the learned weights.
#
# It takes some minutes on two CPU cores. The images are drawn, and the text is Python's
# own standard library, so that nothing has to be downloaded. The outputs below are of
# one run, on two cores that other work used at the same time.
#
# **In Colab**: replace `OWNER/REPO` in the badge's address and in the next cell by the
# address of your copy of the repository, or name a wheel. Nothing has to be cloned. If
# echo_jax is installed, for example by `pip install -e '.[notebooks,export]'` in a
# checkout, the next cell does nothing.

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
import tempfile
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np

import echo_jax as ej
from echo_jax.config import load_config
from echo_jax.inference.evaluate import evaluate_run
from echo_jax.inference.export import export_run
from echo_jax.runs import run_train
from echo_jax.workloads import build

os.chdir(tempfile.mkdtemp())  # receives what this notebook writes

# %% [markdown]
# ## Train
#
# A ResNet learns to tell eight shapes apart. Its run folder keeps the names of the
# classes, so the data is not needed later.

# %%
fields = {"optim.name": "adamw", "optim.lr": 0.01, "batch_size": 64}
if not TINY:
    fields |= {"updates": 1000, "log_every": 100, "eval_every": 200}
    fields |= {"data.train_examples": 8192, "checkpoint_every": 0}
config = load_config("shapes:tiny", fields)
summary = run_train(config, "shapes")
sorted(path.name for path in Path("shapes").iterdir())

# %% [markdown]
# ## Load, and evaluate again
#
# The evaluation of a loaded run is bit-exact the evaluation of its training.

# %%
run = ej.load_run("shapes")
found = evaluate_run(run)
assert found.metrics == summary["final"]
print(run.update, run.classes, found.metrics)

# %% [markdown]
# ## Predict
#
# `run.predict` takes files, encoded images or arrays of any size, and prepares them as
# the evaluation does. Here they are arrays, from the evaluation split.

# %%
batch = next(iter(build(run.config).eval_batches()))
probabilities = run.predict([*batch["image"][:8]])["probabilities"]
figure, axes = plt.subplots(2, 4, figsize=(9, 5.4), layout="constrained")
for ax, image, label, row in zip(
    axes.flat, batch["image"], batch["label"], probabilities, strict=False
):
    ax.imshow(image)
    named = f"{run.classes[row.argmax()]} {row.max():.0%}"
    ax.set_title(f"{named}\nis {run.classes[label]}")
    ax.set_axis_off()
plt.show()

# %% [markdown]
# From a terminal, `echo-jax predict RUN photo.jpg` does the same; a detector draws the
# boxes that it finds, and `echo-jax evaluate RUN --report FOLDER` makes a page.
#
# ## Continue a text
#
# A language model keeps its tokenizer. This one has read the standard library for
# a minute, byte by byte.

# %%
lm = load_config("lm:tiny")
if not TINY:
    lm.updates, lm.optim.lr = 1000, 0.01
    lm.log_every, lm.eval_every, lm.checkpoint_every = 200, 500, 0
run_train(lm, "lm")
reader = ej.load_run("lm")
for text in reader.generate(["def ", "import "], tokens=80, temperature=0.7):
    print(repr(text))

# %% [markdown]
# ## For other programs
#
# The weights as safetensors, and the program with its weights as StableHLO: jax alone
# runs it, on CPUs, GPUs and TPUs, for batches of any size.

# %%
weights = export_run(run, "safetensors")
program = export_run(run, "stablehlo")
called = jax.export.deserialize(bytearray(Path(program).read_bytes()))
same = called.call({"image": batch["image"][:3]})["probabilities"]
np.testing.assert_allclose(same, probabilities[:3], rtol=1e-4, atol=1e-6)
print(weights.name, program.name, called.platforms)

# %% [markdown]
# ## Begin another run with it
#
# `config.init_from` takes a run folder or a file of weights. Arrays of the same name
# and shape are taken; the run says which were not.

# %%
config = load_config("shapes:tiny", {**fields, "init_from": str(weights), "seed": 1})
config.updates = 20 if TINY else 200
tuned = run_train(config, "tuned")
before, after = (each["final"]["loss"] for each in (summary, tuned))
print(f"loss {before:.3f}, then {after:.3f}")
