"""Echoes a Grain DataLoader, and saves it as nanodo does."""

import grain.python as grain
import orbax.checkpoint as ocp
from mine import batched_dataloader, train_step, workdir

import echo_jax as ej

spec = ej.EchoSpec(factor=4, order="spread", buffer=48, batch_size=32)
train_iter = iter(ej.grain.echo_batches(batched_dataloader, spec))

handlers = {"data": ocp.Checkpointer(grain.PyGrainCheckpointHandler())}
manager = ocp.CheckpointManager(workdir, handlers)  # of your parameters, too
first = manager.latest_step() or 0
if first:
    manager.restore(first, items={"data": train_iter})
for step, batch in enumerate(train_iter, first + 1):
    train_step(batch)
    if step % 5 == 0:
        manager.save(step, {"data": train_iter})
