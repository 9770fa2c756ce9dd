"""How a run is going: progress bar and curves."""

from sorl_trl.diagnostics.plots import plot_training
from sorl_trl.diagnostics.progress import TurnProgressCallback

__all__ = ["TurnProgressCallback", "plot_training"]
