"""The study of docs/results.md, "What should an adaptive echo repeat?".

    python results/mixing/study.py run TRIALS RULE [WORKLOAD ...]
    python results/mixing/study.py table TRIALS ...

RULE is `mixing` or `spread`, or with a checkout of 92f5363 on PYTHONPATH `earlier`.
The loader is simulated: no time is measured, a step takes 1, and a fresh batch R.
So the batches of a trial follow from the seed, and trainings on them repeat. Data are
found by ECHO_JAX_DATA. A run goes on where it was stopped.
"""

import functools
import hashlib
import itertools
import json
import lzma
import os
import sys
import tarfile
from collections import defaultdict
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import jax
import jax.numpy as jnp
import numpy as np
import optax

ROWS, LENGTH, BUFFER = 32, 64, 2048
UPDATES = {"heat": 2400, "text": 800, "cifar": 1000}  # fresh batches of a stream
TRAINED = {"heat": (1800, 100), "text": (600, 50), "cifar": (800, 50)}
TARGET = {"heat": 0.02, "text": 2.12, "cifar": 1.55}
RATE = {"heat": 1e-3, "text": 3e-3, "cifar": 1e-3}  # of Adam
CHUNK = {"heat": 5, "text": 8, "cifar": 25}  # parts of a validation set
GRID, STEPS, SUBSTEPS = 32, 100, 10


# Sequences: which fresh example each row of a batch is, and when the batch is done.


def service_times(kind, mean, n, seed):
    rng = np.random.Generator(np.random.Philox(seed))
    if kind == "constant":
        return np.full(n, float(mean))
    return mean * np.where(rng.permutation(n) < n / 10, 6.4, 0.4)


def sequence(spec, service, updates, ahead=2):
    """Returns index[N, B], the fresh rows read by then, and the time of its end."""
    from echo_jax.echo.plans import Lanes, make_plan

    size, plan = spec.batch_size, make_plan(spec, lanes=Lanes(spec.batch_size))
    taken_at, ready, now = [], [], 0.0

    def ready_at(k):
        while len(ready) <= k:
            j = len(ready)
            free = taken_at[j - ahead - 1] if j > ahead else 0.0
            ready.append(max(ready[j - 1] if j else 0.0, free) + service[j])
        return ready[k]

    index, fresh, time = [], [], []
    decision, at, row = None, 0, 0
    while len(index) < updates:
        if decision is None or at + size > decision.uses.size:
            plan.settle(at, row)
            rows, may, *_ = plan.need(size)
            if may and ready_at(row // size) <= now:
                rows = may
            for k in range(row // size, (row + rows) // size):
                now = max(now, ready_at(k))
                taken_at.append(now)
            decision, at = plan.decide(size, rows), 0
        stop = at + size
        row = max(row, decision.rows_for(at, stop))
        for k in range(len(taken_at), row // size):
            now = max(now, ready_at(k))
            taken_at.append(now)
        index.append(decision.uses.fresh_index[0, at:stop].copy())
        at, now = stop, now + 1.0
        plan.settle(at, row)
        fresh.append(row)
        time.append(now)
    return np.stack(index), np.array(fresh), np.array(time)


def spec_of(rule, uses, seed):
    import echo_jax as ej

    if rule == "spread":
        return ej.EchoSpec(uses, BUFFER, "spread", ROWS, seed)
    return ej.AdaptiveSpec(max_uses=uses, buffer=BUFFER, batch_size=ROWS, seed=seed)


# Streams of examples, {"x": [examples, ...], "y": [examples, ...]}; without a seed the
# validation set.


def heat_batches(seed):
    """Yields batches of the heat equation, one time step of each of 32 simulations."""
    # Implicit Euler and a sparse LU, as an online training of a surrogate has it.
    import scipy.sparse as sp
    from scipy.sparse.linalg import splu

    spacing, scale, ones = 1 / (GRID + 1), 0.1 * 5e-3 / SUBSTEPS, np.ones(GRID)
    second = sp.diags([ones[:-1], -2 * ones, ones[:-1]], [-1, 0, 1])
    whole = sp.identity(GRID)
    laplacian = (sp.kron(second, whole) + sp.kron(whole, second)) / spacing**2
    solver = splu(sp.csc_matrix(sp.identity(GRID**2) - scale * laplacian))
    edges = np.zeros((4, GRID, GRID))
    edges[0, 0, :] = edges[1, -1, :] = edges[2, :, 0] = edges[3, :, -1] = (
        scale / spacing**2
    )
    edges, random = edges.reshape(4, -1), np.random.default_rng(seed)
    kelvin = random.uniform(100, 500, (ROWS, 5))
    field, age = np.repeat(kelvin[:, :1], GRID**2, 1), np.zeros(ROWS, int)
    length = random.integers(1, STEPS + 1, ROWS)
    while True:
        for _ in range(SUBSTEPS):
            field = solver.solve((field + kelvin[:, 1:] @ edges).T).T
        age += 1
        when = age[:, None] / STEPS * 2 - 1
        x = np.concatenate([(kelvin - 300) / 115, when], 1)
        yield x.astype(np.float32), ((field - 300) / 115).astype(np.float16)
        done = np.flatnonzero(age >= length)
        kelvin[done] = random.uniform(100, 500, (len(done), 5))
        field[done], age[done], length[done] = kelvin[done, :1], 0, STEPS


def heat_stream(seed):
    places = (100, 200) if seed is None else (0, UPDATES["heat"])
    batches = heat_batches(999 if seed is None else seed)
    x, y = zip(*itertools.islice(batches, *places), strict=True)
    return {"x": np.concatenate(x), "y": np.concatenate(y).astype(np.float32)}


@functools.cache
def text_bytes(split):
    """A split of WikiText-2 as 96 symbols: printable ASCII, and 95 for other bytes."""
    path = f"{os.environ['ECHO_JAX_DATA']}/wikitext2/{split}.txt.xz"
    with lzma.open(path) as file:
        found = np.frombuffer(file.read(), np.uint8)
    return np.minimum(found - np.uint8(32), np.uint8(95))


def text_stream(seed):
    """32 cursors at random places of the text, each 64 bytes further in each batch."""
    text = text_bytes("valid" if seed is None else "train")
    if seed is None:
        places = np.linspace(0, len(text) - LENGTH - 1, 256).astype(int)
    else:
        start = np.random.default_rng([1, seed]).integers(len(text), size=ROWS)
        places = (start + LENGTH * np.arange(UPDATES["text"])[:, None]).reshape(-1)
    windows = text[(places[:, None] + np.arange(LENGTH + 1)) % len(text)]
    return {"x": windows[:, :-1], "y": windows[:, 1:]}


@functools.cache
def cifar_images(split):
    import cv2

    images, names = [], []
    path = f"{os.environ['ECHO_JAX_DATA']}/cifar10/{split}.tar.gz"
    with tarfile.open(path) as archive:
        for member in archive:
            if member.isfile() and member.name.endswith(".jpg"):
                data = np.frombuffer(archive.extractfile(member).read(), np.uint8)
                images.append(cv2.imdecode(data, cv2.IMREAD_COLOR)[:, :, ::-1])
                names.append(member.name.split("/")[-2])
    labels = np.unique(names, return_inverse=True)[1]
    return {"x": np.stack(images), "y": labels.astype(np.int32)}


def cifar_stream(seed):
    if seed is None:
        return {key: array[:1000] for key, array in cifar_images("test").items()}
    arrays, needed = cifar_images("train"), UPDATES["cifar"] * ROWS
    random, size = np.random.default_rng([2, seed]), len(arrays["y"])
    order = [random.permutation(size) for _ in range(-(-needed // size))]
    order = np.concatenate(order)[:needed]
    return {key: array[order] for key, array in arrays.items()}


@functools.lru_cache(8)
def stream(workload, seed):
    """A stream on the device."""
    streams = {"heat": heat_stream, "text": text_stream, "cifar": cifar_stream}
    return jax.tree.map(jnp.asarray, streams[workload](seed))


# Models: a list of (weight, bias); the sizes (inputs, outputs) of the layers name them.

SIZES = {
    "heat": [(6, 256), (256, 256), (256, 1024)],
    "text": [(96, 12), (8 * 12, 48), (48, 96)],
    "cifar": [(48, 8), (16 * 8, 24), (16 * 24, 48), (16 * 48, 10)],
}


def initial(workload, seed):
    keys = jax.random.split(jax.random.key(seed), len(SIZES[workload]))
    return [
        (jax.random.normal(k, (i, o)) * (2 / i) ** 0.5, jnp.zeros(o))
        for k, (i, o) in zip(keys, SIZES[workload], strict=True)
    ]


def dense(layer, x):
    return x @ layer[0] + layer[1]


def heat_loss(params, x, y):
    for layer in params[:-1]:
        x = jax.nn.relu(dense(layer, x))
    return jnp.mean((dense(params[-1], x) - y) ** 2)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(
        logits, labels.astype(jnp.int32)
    ).mean()


def text_loss(params, x, y):
    """A causal convolution over 8 bytes between an embedding and a softmax."""
    x = dense(params[0], jax.nn.one_hot(x, 96))
    x = jnp.pad(x, ((0, 0), (7, 0), (0, 0)))
    x = jnp.concatenate([x[:, k : k + LENGTH] for k in range(8)], -1)
    return cross_entropy(dense(params[2], jax.nn.relu(dense(params[1], x))), y)


def halved(layer, x):
    """A convolution of 4 x 4 at stride 2, as one matrix product, which is faster."""
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    rows, height, width, channels = x.shape
    x = x.reshape(rows, height // 2, 2, width // 2, 2, channels).transpose(
        0, 1, 3, 2, 4, 5
    )
    x = x.reshape(rows, height // 2, width // 2, 4 * channels)
    x = jnp.concatenate(
        [x[:, :-1, :-1], x[:, :-1, 1:], x[:, 1:, :-1], x[:, 1:, 1:]], -1
    )
    return jax.nn.relu(dense(layer, x))


def cifar_loss(params, x, y):
    x = x.astype(jnp.float32) / 64 - 2
    for layer in params[:-1]:
        x = halved(layer, x)
    return cross_entropy(dense(params[-1], x.reshape(len(x), -1)), y)


LOSS = {"heat": heat_loss, "text": text_loss, "cifar": cifar_loss}


@functools.partial(jax.jit, static_argnums=0)
def run(workload, carry, data, index):
    """Updates on the batches of rows that index[every, 32] names."""
    optimizer = optax.adam(RATE[workload])

    def update(carry, rows):
        params, state = carry
        batch = {key: array[rows] for key, array in data.items()}
        changes, state = optimizer.update(
            jax.grad(LOSS[workload])(params, **batch), state
        )
        return (optax.apply_updates(params, changes), state), None

    return jax.lax.scan(update, carry, index)[0]


@functools.partial(jax.jit, static_argnums=0)
def validate(workload, params, data):
    """The mean loss, in chunks that stay in the processor's cache."""
    size = len(data["y"]) // CHUNK[workload]
    chunks = {
        key: array.reshape(CHUNK[workload], size, *array.shape[1:])
        for key, array in data.items()
    }
    return jax.lax.map(lambda chunk: LOSS[workload](params, **chunk), chunks).mean()


def train(workload, index, seed, every):
    """Returns the validation losses after each ``every`` updates."""
    data, held_out = stream(workload, seed), stream(workload, None)
    params, losses = initial(workload, seed), []
    carry = params, optax.adam(RATE[workload]).init(params)
    for start in range(0, len(index) - every + 1, every):
        carry = run(
            workload, carry, data, jnp.asarray(index[start : start + every], jnp.int32)
        )
        losses.append(validate(workload, carry[0], held_out))
    return [float(loss) for loss in losses]


def run_all(path, rule, workloads):
    """Runs the trials that a file lacks, and adds a line for each."""
    path, made = Path(path), {}
    rows = [json.loads(line) for line in path.open()] if path.exists() else []
    done = {tuple(row["key"]) for row in rows}
    order = itertools.product(
        range(8), (6, 10, 4, 2, 0.5), (4, 8), ("constant", "bursty")
    )
    for seed, ratio, uses, kind in order:
        service = service_times(kind, ratio, 4000, seed)
        index, fresh, time = sequence(spec_of(rule, uses, seed), service, 1800)
        for workload in workloads:
            key = (workload, rule, kind, ratio, uses, seed)
            if key in done:
                continue
            n, every = TRAINED[workload]
            part, at = index[:n], np.arange(every, n + 1, every) - 1
            digest = hashlib.sha256(part.tobytes()).hexdigest() + f"{workload}{seed}"
            if digest not in made:
                losses = train(workload, part, seed, every)
                made[digest] = [round(loss, 5) for loss in losses]
            row = {"key": key, "every": every, "loss": made[digest]}
            row |= {"fresh": (fresh[at] // ROWS).tolist(), "time": time[at].tolist()}
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(*key, row["loss"][-1], flush=True)


def table(paths):
    """Prints updates and fresh batches to the target, and the last loss."""
    found = defaultdict(dict)
    lines = "".join(Path(path).read_text() for path in paths).splitlines()
    for row in map(json.loads, lines):
        workload, rule, kind, ratio, uses, seed = row["key"]
        hit = [k for k, x in enumerate(row["loss"]) if x <= TARGET[workload]][:1]
        reached = [row["every"] * (k + 1) for k in hit], [row["fresh"][k] for k in hit]
        busy = row["every"] * len(row["loss"]) / row["time"][-1]
        last = np.log(np.mean(row["loss"][-3:]))
        found[workload, kind, ratio, uses][rule, seed] = *reached, busy, last
    print(
        "| data | loader | R | uses | rule | reached | updates | fresh | busy | loss |"
    )
    print("| --- | --- | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: |")
    for where, trials in sorted(found.items()):
        for rule in ("mixing", "earlier", "spread"):
            each = {seed: x for (name, seed), x in trials.items() if name == rule}
            hits = [x for x in each.values() if x[0]]
            part = f"{len(hits)} of {len(each)}"
            reached = [[*x[0], *x[1]] or [np.inf] * 2 for x in each.values()]
            middle = [f"{x:.0f}" for x in np.median(reached, axis=0)]
            busy = f"{np.mean([x[2] for x in each.values()]):.3f}"
            gap = [x[3] - trials["earlier", s][3] for s, x in each.items()]
            half = 2.365 * np.std(gap, ddof=1) / len(gap) ** 0.5  # Student, 7 degrees
            ratio, low, high = np.exp(np.mean(gap) + np.array([0, -half, half]))
            loss = (
                f"{ratio:.3f} ({low:.3f} to {high:.3f})" if rule != "earlier" else "1"
            )
            cells = *where, rule, part, *middle, busy, loss
            print("|", " | ".join(map(str, cells)), "|")


if __name__ == "__main__":
    command, path, *rest = sys.argv[1:]
    if command == "table":
        table([path, *rest])
    else:
        run_all(path, rest[0], rest[1:] or list(TRAINED))
