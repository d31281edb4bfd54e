"""The picture of a run's losses."""

import io
from collections.abc import Mapping

from jpipe.train.task import Yardstick


def draw_losses(
    losses: Mapping[int, float],
    validation: Mapping[int, float],
    yardstick: Yardstick,
    unit: str,
) -> bytes:
    """Draw the losses by step.

    Args:
        losses: training loss by step, in nats.
        validation: validation loss by step, in nats.
        yardstick: what to compare with.
        unit: what the loss is per, such as `byte`.

    Returns:
        A PNG.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(*_columns(losses), color="#4878b0", linewidth=0.8, alpha=0.7, label="training")
    axes.plot(*_columns(validation), "o-", color="#d1741c", markersize=4, label="validation")
    axes.axhline(
        yardstick.loss,
        color="0.4",
        linewidth=1,
        linestyle="--",
        label=f"{yardstick.name}, validation",
    )
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss (nats per {unit})")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
    axes.legend(frameon=False)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def _columns(values: Mapping[int, float]) -> tuple[list[int], list[float]]:
    return list(values), list(values.values())
