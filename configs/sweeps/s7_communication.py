r"""Four ways to send a quarter of the bytes between devices, every variant tuned.

    NPROC=8 JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=4 \
      echo-jax study --config configs/sweeps/s7_communication.py --workdir runs/s7

A byte-level Transformer on the Python standard library's source code learns from 16,384
examples on 4 devices (another number of devices is another study), and its last loss is
compared:

    baseline      512 updates of 32, gradients summed at each of them
    accumulate    128 updates of 128, of 4 parts each
    every         replicas that synchronise after every 4th update
    bernoulli     replicas that synchronise after each with probability 1/4
    diloco        replicas that synchronise after every 4th, with an outer step

All but the baseline send a quarter of its bytes. Every variant is searched. With
``:echo`` every example is used 4 times, by the device that has it, at a quarter of the
reads. ``:tiny`` is a smoke test.
"""

from typing import Any

from ml_collections import ConfigDict
from sweep_parts import byte_lm, check_variant, less_than, search_space

from echo_jax.config.study import default_study

_PARTS = 4

VARIANTS = ("echo", "tiny")


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``""``, ``"echo"`` or ``"tiny"``.
    """
    check_variant(variant, VARIANTS)
    is_tiny = variant == "tiny"
    base = byte_lm(8 if is_tiny else 32, updates=32 if is_tiny else 512, tiny=is_tiny)
    echo: dict[str, Any] = {"buffer_on": "device", "stage": "decode", "order": "spread"}
    if variant == "echo":
        base.echo.update({"factor": 4.0, **echo})

    def replicas(**how: Any) -> dict[str, Any]:
        return {"local": how}

    arms = {
        "baseline": {},
        "accumulate": {
            "batch_size": _PARTS * base.batch_size,
            "batch": {"accumulation_steps": _PARTS},
            "updates": base.updates // _PARTS,
            "eval_every": base.eval_every // _PARTS,
            "log_every": max(1, base.log_every // _PARTS),
            "optim": {"warmup_updates": base.optim.warmup_updates // _PARTS},
        },
        "every": replicas(sync_schedule="every", sync_every=_PARTS),
        "bernoulli": replicas(sync_schedule="bernoulli", sync_p=1 / _PARTS),
        "diloco": replicas(sync_schedule="every", sync_every=_PARTS, outer="nesterov"),
    }
    used = ", each used four times" if variant == "echo" else ""
    of = f"byte-level LM, B = {base.batch_size} on 4 devices{used}"
    study = default_study(f"A quarter of the bytes: {of}", base, arms)
    search_space(study, tiny=is_tiny)
    study.falsifiers = (
        less_than("accumulate", "every", "accumulation is worth more", 0.0),
        less_than("every", "bernoulli", "a period is better than a chance", 0.0),
        less_than("every", "baseline", "replicas are better than one model", 0.0),
    )
    return study.lock()
