"""What an echo on the CPU's device costs a step, by its slots; beside a busy host.

``JAX_PLATFORMS=cpu python results/no_spec/slots.py`` in the project's folder. Values
are seconds of an update over those on one held batch, in turns of 50 updates.
"""

import itertools
import statistics
import time

import echo_jax as ej
from benchmarks import starved
from benchmarks.harness import drive

trainer, batch = starved._Trainer("one core"), starved._batch()


def on(batches):
    def step():
        trainer.weights = trainer._plain(trainer.weights, next(batches))
        return trainer.weights

    return step


def busy(held, us):
    parts = [{"a": number} for number in range(50)]

    def step():
        end = time.perf_counter() + us * 1e-6
        while time.perf_counter() < end:
            [dict(part) for part in parts]
        return held()

    return step


def echoed(slots):
    spec = ej.EchoSpec(1, slots, "window_shuffle", 32)
    fresh = itertools.repeat(batch)
    return on(ej.device.echo_batches(fresh, spec, prefetch=0))


held = on(itertools.repeat(trainer._held))
loops = {"held": held, "busy for 400 us": busy(held, 400)}
loops |= {f"{slots} slots": echoed(slots) for slots in (64, 512, 2048, 16384, 131072)}
for step in loops.values():
    drive(step, 100)
took = {name: [] for name in loops}
for turn in range(15):
    first = turn % len(loops)
    for name in [*loops, *loops][first:][: len(loops)]:
        took[name].append(drive(loops[name], 50))
for name, seconds in took.items():
    ratios = [a / b for a, b in zip(seconds, took["held"], strict=True)]
    middle, least, most = statistics.median(ratios), min(ratios), max(ratios)
    print(f"{name}: {middle:.3f} ({least:.3f} to {most:.3f})")
