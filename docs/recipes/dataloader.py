"""Echoes PyTorch's DataLoader."""

import torch
from mine import dataset, train_step

import echo_jax as ej

loader = torch.utils.data.DataLoader(dataset, batch_size=32)
spec = ej.EchoSpec(factor=4, order="spread", buffer=256, batch_size=32)
for batch in ej.echo_batches(loader, spec):
    train_step(batch)
