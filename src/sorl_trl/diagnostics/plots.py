"""Training curves as a PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PANELS: Mapping[str, Mapping[str, str]] = {
    "reward": {"mean reward": "reward"},
    "clip fraction": {"tokens": "clip_fraction/token", "turns": "clip_fraction/turn"},
    "KL to the old policy": {"estimate": "kl_to_old"},
    "entropy": {"nats per token": "entropy"},
    "turns per trajectory": {"turns": "rollout/turns_per_trajectory", "searches": "rollout/searches_per_trajectory"},
    "gradient norm": {"before clipping": "grad_norm"},
}
"""Title of a panel -> label of a curve -> metric of docs/metrics.md."""


def plot_training(log_history: Sequence[Mapping[str, Any]], path: str | Path, title: str = "") -> Path:
    """Draw the curves of one run.

    Args:
        log_history: `trainer.state.log_history`, or that of a `trainer_state.json`.
        path: the PNG to write.
        title: above all panels.

    Returns:
        `path`.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: `log_history` holds none of the metrics.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install 'sorl-trl[plot]'") from error
    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.subplots(2, 3).flat
    drawn = 0
    for axis, (name, curves) in zip(axes, PANELS.items(), strict=True):
        for label, metric in curves.items():
            points = [(log["step"], log[metric]) for log in log_history if log.get(metric) is not None]
            drawn += len(points)
            axis.plot(*zip(*points, strict=True) if points else ([], []), label=label, linewidth=1.2)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("optimizer step", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
        if len(curves) > 1:
            axis.legend(fontsize=8)
    if not drawn:
        raise ValueError(f"`log_history` has {len(log_history)} entries, none with a metric of {list(PANELS)}.")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    return Path(path)
