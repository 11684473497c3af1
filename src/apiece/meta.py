"""Meta-learning: what the methods refuse that adapt by plain gradient descent."""

from __future__ import annotations

from apiece.errors import ApieceError
from apiece.optim import Recipe, Rule


def check_plain(recipe: Recipe, name: str) -> None:
    """Refuse a recipe that does more than w ← w − lr·∇."""
    if recipe.rule != Rule(lr=recipe.lr):
        raise ApieceError(
            f"{name} must be plain gradient descent: set its lr, batch_size, epochs and steps alone"
        )


def check_support(support: float) -> None:
    """Refuse a share of examples that leaves support or query empty for everybody."""
    if not 0.0 < support < 1.0:
        raise ApieceError(f"support={support} is out of range: 0 < support < 1")
