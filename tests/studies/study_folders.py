"""Run folders made by hand, with numbers that a reader can check."""

import json

BATCH = 10
ECHO = {"stage": "augment", "order": "spread", "buffer": 512, "seed": 0}
STORAGE = {"latency_s": 0.0025, "bytes_per_s": 0.0, "distribution": "constant"}


def change(file, **fields):
    kept = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(kept | fields))


def make_run(
    folder,
    *,
    factor=1.0,
    losses=(3.0, 2.0, 1.0),
    target=1.0,
    seconds_per_update=0.5,
    bytes_per_update=None,
    synthetic_data=False,
    cores=2,
    **summary,
):
    """Writes a run that evaluates every 100 updates, at batch size 10."""
    rows = []
    for number, loss in enumerate(losses, start=1):
        updates, fresh = 100 * number, int(100 * number * BATCH / factor)
        counts = {"updates": updates, "fresh": fresh}
        counts |= {"repeats": updates * BATCH - fresh}
        counts |= {"wall_s": updates * seconds_per_update, "train_s": 0.0}
        if bytes_per_update is not None:
            counts["bytes_sent"] = updates * bytes_per_update
        rows.append({"kind": "train", **counts, "loss": loss + 0.1})
        rows.append({"kind": "eval", **counts, "eval_loss": loss})
    last = {name: value for name, value in counts.items() if name != "train_s"}
    met = next((r for r in rows[1::2] if r["eval_loss"] <= target), {})
    facts = {
        **last,
        **{"workload": "lm", "metric": "loss", "mode": "min", "target": target},
        "reached": bool(met),
        "fresh_to_target": met.get("fresh"),
        "updates_to_target": met.get("updates"),
        "seconds_to_target": met.get("wall_s"),
        "echo": {"factor": factor, **ECHO},
        **{"R": 4.0, "t_up_s": 0.08, "t_down_s": 0.02, "idle_fraction": 0.75},
        "storage": STORAGE,
        "simulated_storage": True,
    }
    folder.mkdir(parents=True)
    config = {"workload": "lm", "batch_size": BATCH, "eval_every": 100}
    change(folder / "config.json", **config)
    made = {"devices": ["TFRT_CPU_0"], "backend": "cpu", "cpu_count": cores}
    made["workload"] = {"data": {"synthetic": synthetic_data}}
    change(folder / "environment.json", **made)
    change(folder / "summary.json", **{**facts, **summary})
    # As in a real run, where JSON has no NaN.
    lines = "".join(json.dumps(row).replace("NaN", "null") + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(lines)
    return folder


def make_study(folder, arms, base=None):
    """Writes a study; `arms` maps a name to the arguments of `make_run`."""
    for name, arguments in arms.items():
        make_run(folder / name, **arguments)
    change(
        folder / "study.json",
        name="a study",
        base_config=base or {},
        arms=list(arms),
        storage={"latency_s": 0.0025},
        calibration={"t_down_s": 0.02},
    )
    return folder


def read_table(path):
    """Returns the rows of a file by their headings, and its other lines."""
    lines = path.read_text().splitlines()
    rows = [[c.strip() for c in x.split("|")[1:-1]] for x in lines if x[:1] == "|"]
    others = [line for line in lines if line[:1] not in ("|", "")]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]], others
