"""What an extended run says about its schedules."""

from echo_jax.config.applies import CHANGING
from echo_jax.config.run import RunSpec
from echo_jax.files.folders import RunPath
from echo_jax.files.json_files import read_json

# They end with the run, unless the config sets their end.
_DECAYING = ("linear", "cosine", "slow_start", "onecycle", "warmup_stable_decay")


def moved_by_updates(workdir: RunPath, config: RunSpec) -> str:
    """Returns a note if another number of updates moves the rest of a resumed run."""
    optim, local, updates = config.optim, config.local.schedule, config.updates
    old = read_json(workdir / "config.json", {"updates": int})
    before = old["updates"] if old else updates
    if before == updates:
        return ""
    moved = []
    if optim.schedule in _DECAYING and not (optim.decay_updates or optim.boundaries):
        moved.append(
            f"the {optim.schedule} schedule decays to the end of the run, so from here "
            f"on the learning rate is that of a run of {updates} updates; a run that "
            "is begun with --config.optim.decay_updates=N keeps its learning rates"
        )
    if local in CHANGING:
        moved.append(
            "replicas meet by a schedule that ends with the run, so from here "
            f"on as often as in one of {updates} updates"
        )
    elif local != "none":
        moved.append(
            f"replicas met at the end of the run, after update {before}; one that is "
            f"begun with {updates} updates may not meet there"
        )
    said = "; and ".join(moved)
    return said and f"config.updates was {before} and is {updates}: {said}"
