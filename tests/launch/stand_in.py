"""Stand-ins for the commands that launch_tpu.sh calls; tests put them on PATH.

``gcloud`` records its arguments and acts on a folder, $WORLD, as on a cloud: a VM is
the file vm.json, and the home folder of worker N is vm/N. What goes over ssh
really runs there, with stand-ins for what a worker has and tests do without.

    gcloud.jsonl    the arguments of every call of gcloud; uv.jsonl, those of uv
    train.jsonl     what every echo-jax was given: arguments, folder, environment
    plan.json       what is to go otherwise than well, in lists: see `_planned`

A test starts dozens of them, so they import little.
"""

import fcntl
import json
import os
import signal
import sys
import time

WORLD = os.environ["WORLD"]
VM = f"{WORLD}/vm.json"
HOMES = f"{WORLD}/vm"
LOST = ("PREEMPTED", "SUSPENDED", "TERMINATED")


def _write(path: str, text: str, mode: str = "w") -> None:
    with open(path, mode) as file:
        file.write(text)


def _record(name: str, row: object) -> None:
    _write(f"{WORLD}/{name}.jsonl", json.dumps(row) + "\n", "a")


def _vm() -> dict:
    with open(VM) as file:
        return json.load(file)


def _planned(what: str) -> str | None:
    """Takes the next entry of a list in plan.json; None if there is none left."""
    path = f"{WORLD}/plan.json"
    if not os.path.exists(path):
        return None
    with open(path, "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        plan = json.load(file)
        entry = plan[what].pop(0) if plan.get(what) else None
        file.seek(0)
        file.truncate()
        json.dump(plan, file)
    return entry


def _run(argv: list[str], environment: dict[str, str] | None = None) -> int:
    pid = os.posix_spawn(argv[0], argv, environment or dict(os.environ))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def gcloud(argv: list[str]) -> int:
    if argv[:2] == ["storage", "rsync"]:  # On a worker: the bucket is a folder.
        source, target = argv[3:]
        target = f"{WORLD}/{target.replace('gs://', 'bucket/')}"
        _run(["/bin/mkdir", "-p", target])
        return _run(["/bin/cp", "-R", f"{source}/.", target])
    _record("gcloud", argv)
    verb = next(word for word in argv if word in _VERBS)
    if error := _planned(verb):
        print(f"ERROR: (gcloud.{verb}) {error}", file=sys.stderr)
        return 1
    return _VERBS[verb](argv)


def _create(argv: list[str]) -> int:
    assert not os.path.exists(VM), "it is there already"
    num_workers = 1 if "instances" in argv else 2
    _write(VM, json.dumps({"num_workers": num_workers}))
    for worker in range(num_workers):
        os.makedirs(f"{HOMES}/{worker}")
    return 0


def _delete(argv: list[str]) -> int:
    assert "--quiet" in argv
    # First, so that nobody starts anything there again once it is killed.
    os.remove(VM)
    _lose()
    return 0


def _start(argv: list[str]) -> int:
    _write(VM, json.dumps({"num_workers": 1}))
    return 0


def _describe(argv: list[str]) -> int:
    if not os.path.exists(VM):
        print("ERROR: NOT_FOUND: the resource was not found.", file=sys.stderr)
        return 1
    vm = _vm()
    of_kind = {"tpu-vm": "READY", "queued-resources": "ACTIVE", "instances": "RUNNING"}
    usual = next(state for kind, state in of_kind.items() if kind in argv)
    state = vm.get("lost") or _planned("states") or usual
    if state in LOST:
        _lose(disk=state != "TERMINATED")
        _write(VM, json.dumps({**vm, "lost": state}))
    print("WARNING: something to be ignored", file=sys.stderr)
    print(state)
    return 0


def _lose(disk: bool = True) -> None:
    """Kills what runs on the workers, and takes their disks away."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                variables = file.read().split(b"\0")
            if b"ON_WORKER_OF=" + os.fsencode(WORLD) in variables:
                os.kill(int(pid), signal.SIGKILL)
        except OSError:
            continue
    if disk:
        _run(["/bin/rm", "-rf", HOMES])


def _ssh(argv: list[str]) -> int:
    (command,) = (word[10:] for word in argv if word.startswith("--command="))
    status = 0
    for worker in _workers(argv):
        os.chdir(f"{HOMES}/{worker}")
        environment = {
            "HOME": os.getcwd(),
            "PATH": f"{WORLD}/worker_bin:/usr/bin:/bin",
            "WORLD": WORLD,
            "ON_WORKER_OF": WORLD,
            "WORKER": worker,
        }
        status = _run(["/bin/bash", "-c", command], environment) or status
    return status


def _scp(argv: list[str]) -> int:
    source, target = argv[argv.index("scp") + 1 :][:2]
    for worker in _workers(argv):
        _run(["/bin/cp", source, f"{HOMES}/{worker}/{target.partition(':')[2]}"])
    return 0


def _workers(argv: list[str]) -> list[str]:
    which = next((word[9:] for word in argv if word.startswith("--worker=")), "all")
    num_workers = _vm()["num_workers"]
    return [str(i) for i in range(num_workers)] if which == "all" else [which]


def python3(argv: list[str]) -> int:
    """Builds a wheel at once, of one file; anything else goes to a real Python."""
    if argv[:3] != ["-m", "pip", "wheel"]:
        os.execv(sys.executable, [sys.executable, "-IS", *argv])
    folder = argv[argv.index("--wheel-dir") + 1]
    wheel = f"{folder}/echo_jax-0.1.0-py3-none-any.whl"
    return _run(["/bin/cp", f"{argv[-1]}/pyproject.toml", wheel])


def uv(argv: list[str]) -> int:
    _record("uv", argv)
    if argv[0] == "venv":
        os.makedirs("venv/bin")
        return _run(["/bin/cp", "/bin/true", "venv/bin/python"])
    if error := _planned("uv"):
        print(error, file=sys.stderr)
        return 1
    assert os.path.exists(argv[-1].partition("file://")[2])
    program = f"{WORLD}/worker_bin/stand_in_echo-jax"
    return _run(["/bin/cp", program, "venv/bin/echo-jax"])


def echo_jax(argv: list[str]) -> int:
    """Ends as plan.json says in `train`: how it takes a signal, or an exit code.

    ``"1 after 3"`` is exit code 1 once three trainings have started.
    """
    how, _, after = (_planned("train") or "0").partition(" after ")
    row = {"argv": argv, "cwd": os.getcwd(), "pid": os.getpid()}
    row["env"] = {key: os.environ.get(key) for key in ("NPROC", "JAX_PLATFORMS")}
    row["ignores_ctrl_c"] = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    for signum in (signal.SIGTERM, signal.SIGINT):
        if how == "deaf":
            signal.signal(signum, signal.SIG_IGN)
        elif how == "saves":
            signal.signal(signum, _save)
    print("training", flush=True)
    if how == "leaves":  # A worker process that outlives it.
        row["left"] = os.posix_spawn("/bin/sleep", ["sleep", "600"], dict(os.environ))
        how = "0"
    _record("train", row)
    while how in ("saves", "deaf"):
        signal.pause()
    while after:
        with open(f"{WORLD}/train.jsonl") as rows:
            if len(rows.readlines()) >= int(after):
                break
        time.sleep(0.01)
    return int(how)


def _save(signum: int, frame: object) -> None:
    time.sleep(0.2)
    print("saved", flush=True)
    sys.exit(128 + signum)


_VERBS = {"create": _create, "delete": _delete, "start": _start}
_VERBS |= {"describe": _describe, "ssh": _ssh, "scp": _scp}


def main(name: str) -> None:
    """Runs a stand-in, named as the command is."""
    sys.exit(globals()[name.replace("-", "_")](sys.argv[1:]))
