"""Echoes in a trainer with pmap, before its batches are split over the devices."""

import jax
from flax.jax_utils import prefetch_to_device
from mine import devices, loader, train_step

import echo_jax as ej


def shard(batch):
    return jax.tree.map(lambda x: x.reshape(len(devices), -1, *x.shape[1:]), batch)


spec = ej.EchoSpec(factor=4, order="spread", buffer=64, batch_size=32)
batches = ej.echo_batches(loader, spec, drop_remainder=True)
for batch in prefetch_to_device(map(shard, batches), 2, devices):
    train_step(batch)
