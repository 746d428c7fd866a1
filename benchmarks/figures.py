"""Pictures of what the benchmarks measured, and of what the paper did.

``python -m benchmarks.figures docs/which_echo.png`` draws the one of
docs/choose-an-echo.md.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.harness import Result
from echo_jax.studies.figures import own_style

_STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "figure.titlesize": 9,
    "legend.fontsize": 8,
    "legend.frameon": False,
}
_PAPER = Path(__file__).parents[1] / "results" / "paper" / "choi2019_figures.json"


@own_style(_STYLE)
def draw_free_echo(results: Sequence[Result], path: Path) -> None:
    """Draws P2 beside the wall-clock study of the paper.

    Left: what an echo adds to the time of a fresh example. Right: the speed-up to the
    target that follows where fresh examples are saved as in the paper: its reduction
    of fresh examples, divided by our growth of the time of each.

    Args:
      results: Those of P2.
      path: Receives the figure, as PNG.
    """
    paper = json.loads(_PAPER.read_text())
    wall = {row["e"]: row["seconds"] for row in paper["4-wall"]}
    fresh = {row["e"]: row["mean"] for row in paper["4-fresh"]}
    reduction = {e: fresh[1] / fresh[e] for e in fresh}
    their_growth = {e: wall[e] / fresh[e] / (wall[1] / fresh[1]) for e in fresh}
    ours = {int(result.id.rpartition("e")[2]): result for result in results}
    growth = {1: 1.0} | {e: result.value for e, result in ours.items()}
    factors = sorted(growth)
    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.axhline(1, color="0.8", linewidth=1)
    left.plot(
        factors, [their_growth[e] for e in factors], "s--", color="C1", label="paper"
    )
    low = [growth[e] - min(ours[e].repeats) if e > 1 else 0 for e in factors]
    high = [max(ours[e].repeats) - growth[e] if e > 1 else 0 for e in factors]
    left.errorbar(
        factors,
        [growth[e] for e in factors],
        [low, high],
        marker="o",
        capsize=3,
        color="C0",
        label="echo_jax (median, min to max)",
    )
    left.set_ylabel("seconds per fresh example, over e = 1")
    left.set_ylim(0.95, None)
    right.plot(
        factors,
        [reduction[e] for e in factors],
        ":",
        color="0.4",
        label="fresh examples saved (paper): no overhead",
    )
    right.plot(
        factors,
        [reduction[e] / growth[e] for e in factors],
        "o-",
        color="C0",
        label="these, at echo_jax's measured overhead",
    )
    right.plot(
        factors,
        [wall[1] / wall[e] for e in factors],
        "s--",
        color="C1",
        label="measured by the paper",
    )
    right.set_ylabel("speed-up to the target, over e = 1")
    for axes in (left, right):
        axes.set_xlabel("echo factor e")
        axes.set_xticks(factors)
        axes.legend()
    figure.suptitle(
        "Fresh data six times slower than a step (R = 6). Paper: ResNet-50 on "
        "ImageNet; echo_jax: simulated storage"
    )
    figure.savefig(path, dpi=150)


@own_style(_STYLE)
def draw_which_echo(path: Path) -> None:
    """Draws what decides about a factor and about a buffer, from the paper's figures.

    Left: the speed-up to the target by factor, that is the paper's reduction of fresh
    examples (figure 5, LM1B, batch 1024) times the time per fresh example that Eq. 1
    gives. Right: the reduction at e = 2 by the steps between two uses of an item
    (figure 7; the buffer over the batch).

    Args:
      path: Receives the figure, as PNG.
    """
    paper = json.loads(_PAPER.read_text())
    reduction = {row["e"]: row["speedup_fresh"] for row in paper["5a"]}
    factors = sorted(reduction)
    lags = {
        "batches": [
            (int(row["variant"].split("=")[1].split()[0]), row["speedup_fresh"])
            for row in paper["7a"]
            if row["e"] > 1
        ],
        "examples": [
            (float(row["variant"].split("=")[1]) / row["batch"], row["speedup_fresh"])
            for row in paper["7b"]
            if row["e"] > 1
        ],
    }
    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for ratio in (1, 2, 4, 8):
        gain = [reduction[e] * ratio / max(ratio, e) for e in factors]
        left.plot(factors, gain, "o-", label=f"R = {ratio}")
    left.axhline(1, color="0.8", linewidth=1)
    left.set_xscale("log", base=2)
    left.set_xticks(factors, [str(e) for e in factors])
    left.set_xlabel("echo factor e")
    left.set_ylabel("speed-up to the target")
    left.set_title("best at e = min(R, 4)")
    for what, points in lags.items():
        right.plot(*zip(*points, strict=True), "o-", label=f"{what} are echoed")
    right.axhline(2, color="0.8", linewidth=1)
    right.set_xscale("log")
    right.set_xlabel("steps between two uses of an item")
    right.set_ylabel("fewer fresh examples, at e = 2")
    right.set_title("2 would be a repeat as good as fresh data")
    for axes in (left, right):
        axes.legend()
    figure.suptitle(
        "A Transformer on LM1B at batch 1024 (Choi et al. 2019, figures 5 and 7; "
        "time by their Eq. 1)"
    )
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    draw_which_echo(Path(sys.argv[1]))
