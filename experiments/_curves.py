"""Numbers read off curves."""

from collections.abc import Sequence


def upto(curve: Sequence[tuple[float, float]], round: int) -> float:
    """The last value measured up to a round."""
    return [y for x, y in curve if x <= round][-1]
