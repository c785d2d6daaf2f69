"""How far a distributed training is from the same training in one process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

# What pyg_dist promises of fp32 results, which are added up in another order: max|a - b| <= RELATIVE max|b| + ABSOLUTE.
RELATIVE, ABSOLUTE = 1e-4, 1e-5

Gradients = dict[str, Tensor]


@dataclass
class History:
    """One training: the loss of every epoch, and the gradients of the first and of the last."""

    losses: list[float] = field(default_factory=list)
    gradients: list[Gradients] = field(default_factory=list)

    def record(self, loss: Tensor, model: torch.nn.Module) -> None:
        """Take down an epoch, between ``backward`` and ``step``."""
        self.losses.append(loss.item())
        self.gradients[1:] = [{name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}]

    def state_dict(self) -> dict[str, list[float] | list[Gradients]]:
        """What a checkpoint has of it."""
        return {"losses": self.losses, "gradients": self.gradients}

    def load_state_dict(self, state: dict[str, list[float] | list[Gradients]]) -> None:
        """The reverse of :meth:`state_dict`."""
        vars(self).update(state)


@dataclass(frozen=True)
class Difference:
    """What :func:`compare` found: the largest ``max|a - b| / max|b|``, and the largest share of the bound."""

    losses: float
    first_gradients: float
    last_gradients: float
    share_of_bound: float

    @property
    def is_rounding(self) -> bool:
        """Whether all differences lie within the bound."""
        return self.share_of_bound <= 1

    def __str__(self) -> str:
        return (
            "largest relative difference from single-process PyG\n"
            f"  losses of all epochs                           {self.losses:.1e}\n"
            f"  gradients of all parameters in the first epoch {self.first_gradients:.1e}\n"
            f"  gradients of all parameters in the last epoch  {self.last_gradients:.1e}\n"
            f"  {'within' if self.is_rounding else 'BEYOND'} the bound for fp32, {RELATIVE:g} max|b| + {ABSOLUTE:g}: "
            f"{self.share_of_bound:.1%} of it"
        )


def compare(ours: History, stock: History) -> Difference:
    """Compare two trainings from the same first values: losses epoch by epoch, gradients parameter by parameter."""
    losses = [(torch.tensor(a), torch.tensor(b)) for a, b in zip(ours.losses, stock.losses, strict=True)]
    first, last = (_pairs(a, b) for a, b in ((ours.gradients[k], stock.gradients[k]) for k in (0, -1)))
    return Difference(
        losses=_largest(_relative(a, b) for a, b in losses),
        first_gradients=_largest(_relative(a, b) for a, b in first),
        last_gradients=_largest(_relative(a, b) for a, b in last),
        share_of_bound=_largest(_share_of_bound(a, b) for a, b in [*losses, *first, *last]),
    )


def _pairs(ours: Gradients, stock: Gradients) -> list[tuple[Tensor, Tensor]]:
    if ours.keys() != stock.keys():
        raise ValueError(f"Expected gradients of {sorted(stock)} (got {sorted(ours)})")
    return [(ours[name], gradient) for name, gradient in stock.items()]


def _relative(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs().max() / b.abs().max()


def _share_of_bound(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs().max() / (RELATIVE * b.abs().max() + ABSOLUTE)


def _largest(values: Iterable[Tensor]) -> float:
    return torch.stack([value.double() for value in values]).max().item()  # NaN stays NaN


def draw(path: Path, ours: History, stock: History, name: str) -> None:
    """Write a picture of the two loss curves and of their difference, if matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        print("no picture of the loss curves: it takes matplotlib, pip install matplotlib")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(
        2, 1, sharex=True, figsize=(7, 5.5), height_ratios=(3, 2), layout="constrained"
    )
    epochs = range(1, len(ours.losses) + 1)
    top.plot(epochs, ours.losses, linewidth=5, alpha=0.35, label=name)
    top.plot(epochs, stock.losses, linewidth=1.2, color="black", label="stock PyG, one process")
    top.set(ylabel="training loss", yscale="log", title="Handwritten digits, 3-layer GraphSAGE, full batch")
    top.legend()
    differences = [abs(a - b) / abs(b) for a, b in zip(ours.losses, stock.losses, strict=True)]
    bottom.plot(epochs, differences, marker=".", linestyle="none")
    bottom.set(xlabel="epoch", ylabel="relative difference")
    bottom.set_yscale("symlog", linthresh=1e-8)  # from 1e-8 up logarithmic; equal losses lie at 0
    bottom.set_ylim(-2e-9, RELATIVE)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"loss curves: {path}")
