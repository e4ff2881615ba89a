"""A replay as a picture: latencies over time and as distributions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .replay import Objectives
from .target import Outcome


def plot(outcomes: Sequence[Outcome], objectives: Objectives, path: Path) -> None:
    """Write the picture to ``path`` (.svg, .png or .pdf). ValueError where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install 'npufleet[bench]'") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    well = [one for one in outcomes if not one.error]
    begun = min((one.due for one in outcomes), default=0.0)
    figure, (times, spread) = pyplot.subplots(1, 2, figsize=(11, 4))
    times.scatter(
        [one.due - begun for one in well], [one.ttft for one in well], s=4, label="time to first token"
    )
    times.scatter([one.due - begun for one in well], [one.tpot for one in well], s=4, label="time per token")
    times.set_xlabel("sent, s")
    times.set_ylabel("s")
    if well:
        times.set_yscale("log")
        times.legend()
    for name, values, limit in (
        ("time to first token", sorted(one.ttft for one in well), objectives.ttft),
        ("time per token", sorted(one.tpot for one in well), objectives.tpot),
    ):
        line = spread.plot(values, [(at + 1) / len(values) for at in range(len(values))], label=name)[0]
        spread.axvline(limit, color=line.get_color(), linestyle="--", linewidth=1)
    spread.set_xscale("log" if well else "linear")
    spread.set_xlabel("s (dashed: objective)")
    spread.set_ylabel("share of requests")
    spread.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
