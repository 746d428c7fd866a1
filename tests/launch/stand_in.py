"""Stand-ins for the commands that launch_tpu.sh calls; tests put them on PATH.

``gcloud`` records its arguments. What goes over ssh really runs, in a folder that is
the home of a worker. ``echo-jax`` does what the next word of $WORLD/plan says:

    saves     waits for SIGTERM, saves and ends
    deaf      ignores SIGTERM
    7         ends with exit code 7
    7after3   does so once three trainings have started
"""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

WORLD = Path(os.environ["WORLD"])
HOMES = WORLD / "homes"


def _record(name: str, row: object) -> None:
    with open(WORLD / f"{name}.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")


def gcloud(argv: list[str]) -> int:
    if argv[:2] == ["storage", "cp"]:  # On a worker: a bucket is a folder.
        target = WORLD / argv[3].replace("gs://", "bucket/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(argv[2], target)
        return 0
    _record("gcloud", argv)
    which = next((word[9:] for word in argv if word.startswith("--worker=")), "0")
    homes = sorted(HOMES.iterdir()) if which == "all" else [HOMES / which]
    status = 0
    for home in homes:
        if "scp" in argv:
            source, target = argv[argv.index("scp") + 1 :][:2]
            shutil.copy(source, home / target.partition(":")[2])
        elif "ssh" in argv:
            (command,) = (word[10:] for word in argv if word.startswith("--command="))
            path = f"{WORLD}/worker_bin:/usr/bin:/bin"
            variables = {"PATH": path, "WORLD": str(WORLD), "WORKER": home.name}
            call = ["bash", "-c", command]
            done = subprocess.run(call, cwd=home, env=variables, check=False)
            status = done.returncode or status
        elif "describe" in argv:
            print("READY")
            break
    return status


def uv(argv: list[str]) -> int:
    _record("uv", argv)
    if argv[0] == "venv":
        Path("venv/bin").mkdir(parents=True)
        Path("venv/bin/python").symlink_to("/bin/true")
    else:
        assert Path(argv[-1].partition("[")[0], "pyproject.toml").exists()
        shutil.copy(WORLD / "worker_bin/echo-jax", "venv/bin")
    return 0


def echo_jax(argv: list[str]) -> int:
    with open(WORLD / "plan", "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        how, _, rest = file.read().partition(" ")
        file.truncate(0)
        file.write(rest)
    if how == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif how == "saves":
        signal.signal(signal.SIGTERM, _save)
    print("training", flush=True)
    npc = os.environ.get("NPROC")
    _record("train", {"argv": argv, "cwd": os.getcwd(), "pid": os.getpid(), "n": npc})
    while how in ("saves", "deaf"):
        signal.pause()
    code, _, after = how.partition("after")
    while after and (WORLD / "train.jsonl").read_text().count("\n") < int(after):
        time.sleep(0.01)
    return int(code or 0)


def _save(signum: int, frame: object) -> None:
    time.sleep(0.2)
    print("saved", flush=True)
    sys.exit(128 + signum)


def main(name: str) -> None:
    """Runs a stand-in, named as the command is."""
    sys.exit(globals()[name.replace("-", "_")](sys.argv[1:]))
