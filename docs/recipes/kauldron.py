"""Echoes a data source of kauldron, for ``train_ds`` of a ``kd.train.Trainer``."""

import dataclasses

from kauldron import kd

import echo_jax as ej


@dataclasses.dataclass(frozen=True)
class Echoed(kd.data.py.DataSource):
    def _make_root_ds(self, *, num_workers):
        batches = super()._make_root_ds(num_workers=num_workers)
        spec = ej.EchoSpec(
            4, order="spread", buffer=2048, batch_size=self.host_batch_size
        )
        return ej.grain.echo_batches(batches, spec)
