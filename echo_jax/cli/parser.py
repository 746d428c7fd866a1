"""The arguments of ``echo-jax``, and the texts of ``--help``."""

import argparse
import functools
from collections.abc import Sequence
from importlib import metadata
from typing import Any, NoReturn

from echo_jax.cli import (
    configs_command,
    model_commands,
    prepare_command,
    report_command,
)
from echo_jax.cli.command_end import WRONG_USE, add_number, path_argument
from echo_jax.terminal.printable import printable

_EPILOG = """\
examples:
  echo-jax configs
  echo-jax study --config quickstart --workdir runs/quickstart
  echo-jax train --config lm:tiny --workdir runs/lm
  echo-jax sweep --config lm:tiny --over optim.lr=log:1e-3:1e-1 \\
      --workdir runs/lr
  echo-jax probe --config quickstart
  echo-jax report runs/quickstart
  echo-jax predict runs/lm --text "def "
  echo-jax prepare images photos/ --holdout 0.05 --out data/photos

Each command has a --help of its own."""

_TRAIN_EPILOG = """\
Every field of the config is a flag: --config.FIELD=VALUE. 'echo-jax configs show lm'
prints the fields of a config with their meanings. 'echo-jax configs copy lm' copies a
config file, for changes of your own. The same command with the same workdir resumes.

Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 save the run and end it; a second signal
ends it at once. If data does not come, the run prints a message after 30 s, and ends
after --config.data.timeout_s seconds. It resumes from its last checkpoint.

Exit status: 0 if all is well, 1 if training failed, 2 if the command is wrong, 75 if
the data did not come, 134 if jax lost another process of the run, and 128 plus the
signal's number after a signal, such as 130 after Ctrl-C.

examples:
  echo-jax train --config configs/lm.py:tiny --workdir runs/fixed \\
      --config.echo.factor=3.0 --config.echo.order=spread --config.echo.buffer=512
  echo-jax train --config configs/lm.py:tiny --workdir runs/adaptive \\
      --config.echo.mode=adaptive --config.echo.buffer=512
  echo-jax train --config configs/lm.py:tiny --workdir runs/lion \\
      --config.optim.name=optax.lion --config.optim.lr=3e-4"""

_STUDY_EPILOG = """\
To search values of one config's fields from the command line, use 'echo-jax sweep'.

The variants of the study run one after another. --config.base.FIELD=VALUE sets a field
of all variants. --config.arms.VARIANT.FIELD=VALUE sets a field that the study file
changes in that variant. The same command with the same workdir resumes, and keeps
finished variants.

A study with a search space (the field search of its config) is many small trials. One
process for each core makes them, and so does every other call with the same workdir, on
this or another machine. More points, repeats or seeds keep the existing trials.

examples:
  echo-jax study --config configs/quickstart.py --workdir runs/quickstart
  echo-jax study --config configs/sweeps/s1_placement.py --workdir runs/s1"""

_SWEEP_EPILOG = """\
To compare variants that a study file lists, use 'echo-jax study'.

It trains the config at quasi-random points, then the best point with new seeds. It
shows the cost of each to reach the config's target, or its last metric. SCALE is log,
linear, or log1m: evenly over orders of magnitude of 1 minus the value. Every other
field is a flag, --config.FIELD=VALUE. The same command with the same workdir resumes,
also with more points or seeds.

examples:
  echo-jax sweep --config configs/lm.py:tiny --workdir runs/lr \\
      --over optim.lr=log:1e-3:1e-1 --points 16 --seeds 3
  echo-jax sweep --config configs/lm.py:tiny --workdir runs/two \\
      --over optim.lr=log:1e-3:1e-1 --over echo.factor=choice:1.0,2.0,4.0"""

_PROBE_EPILOG = """\
It measures the loader alone, the step alone and both together, in turns, without
the config's echo, and leaves nothing behind. Of a study it measures the base.
Every field of the config is a flag: --config.FIELD=VALUE, and of a study's base
--config.base.FIELD=VALUE.

examples:
  echo-jax probe --config configs/quickstart.py
  echo-jax probe --config configs/lm.py:bytes --seconds 60 --json probe.json"""

_PREPARE_EPILOG = """\
It writes shards of records, and a dataset.json last. The same command goes on where it
was stopped. Train on the folder with --config.data.source=FOLDER.

examples:
  echo-jax prepare images train=train.tar.gz validation=test.tar.gz --out data/cifar10
  echo-jax prepare coco train=instances.json.gz:train.tar --out data/coco
  echo-jax prepare text train=train.txt.xz validation=valid.txt.xz --out data/wikitext2

Each kind has a --help of its own."""


class _Version(argparse.Action):
    """Prints the versions of echo-jax and jax, without importing jax."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        try:
            said = (f"{name} {metadata.version(name)}" for name in ("echo-jax", "jax"))
            print(", ".join(said))
        except metadata.PackageNotFoundError as error:
            parser.error(f"{error}; install it with pip")
        parser.exit()


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    # Subcommands, of which the first may be left out.
    words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, *more: Any, **named: Any) -> Any:
        first = next((each for each in args or () if each != "--debug"), "")
        if self.words and first not in ("-h", "--help", *self.words):
            args = [self.words[0], *args]
        return super().parse_known_args(args, *more, **named)

    def error(self, message: str) -> NoReturn:
        said = printable(f"{self.prog}: {message}; see {self.prog} --help")
        self.exit(WRONG_USE, f"{said}\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        print(end="", flush=True)  # An error at Python's exit could not be caught.
        super().exit(status, message)


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands; it leaves fields of configs unparsed."""
    parser = _Parser(
        prog="echo-jax",
        description="Train with data echoing, and compare what it is worth.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="print the versions, and exit"
    )
    # Here, as the default of a subcommand would overwrite a --debug before its name.
    parser.set_defaults(debug=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(
        name: str, about: str, epilog: str, to: Any = commands
    ) -> argparse.ArgumentParser:
        command = to.add_parser(
            name,
            help=about,
            description=about[:1].upper() + about[1:] + ".",
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            # --config.seed is a field, not an abbreviated --config.
            allow_abbrev=False,
        )
        command.set_defaults(prog=command.prog)
        command.add_argument(
            "--debug",
            action="store_true",
            default=argparse.SUPPRESS,
            help="show the traceback of a failure, and what libraries say of it",
        )
        return command

    train = add("train", "train one model", _TRAIN_EPILOG)
    study = add("study", "compare variants that a study file lists", _STUDY_EPILOG)
    about = "search values of one config's fields from the command line"
    sweep = add("sweep", about, _SWEEP_EPILOG)
    probe = add("probe", "measure whether an echo would help", _PROBE_EPILOG)
    for command in (train, study, sweep, probe):
        command.add_argument(
            "--config",
            required=True,
            metavar="CONFIG[:VARIANT]",
            help="a config file, or the name of one that 'echo-jax configs' lists, and "
            "a variant of the config",
        )
    for command in (train, study, sweep):
        command.add_argument(
            "--workdir",
            required=True,
            metavar="FOLDER",
            help="receives the results, here or in gs://BUCKET/FOLDER; resumes what "
            "it already holds",
        )
    sweep.add_argument(
        "--over",
        action="append",
        default=[],
        metavar="FIELD=SCALE:LOW:HIGH",
        help="the values of a field to try, or FIELD=choice:A,B; may be repeated",
    )
    add_number(sweep, "--points", 16, "N", "number of points to try")
    about = "number of new seeds with which the best point is trained again"
    add_number(sweep, "--seeds", 3, "N", about)
    for command in (study, sweep):
        command.add_argument(
            "--jobs",
            type=int,
            default=0,
            metavar="N",
            help="of a search: processes that make trials (default: one for each core "
            "of a CPU, or one on an accelerator)",
        )
    add_number(probe, "--seconds", 20.0, "S", "how long to measure")
    probe.add_argument(
        "--json",
        type=path_argument,
        metavar="FILE",
        help="also write the report to a file, as JSON; - prints the JSON instead",
    )
    report_command.add_command(add)
    model_commands.add_commands(add)
    configs_command.add_command(add)
    about = "turn files of yours into data to train on"
    prepare = add("prepare", about, _PREPARE_EPILOG)
    kinds = prepare.add_subparsers(dest="kind", required=True, metavar="KIND")
    prepare_command.add_kinds(functools.partial(add, to=kinds))
    return parser
