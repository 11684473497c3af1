"""Message sizes against sizes counted by hand: the MLP 64-128-10 has 9610 parameters."""

import pytest

from apiece import catalog
from apiece.traffic import traffic

MODEL = 64 * 128 + 128 + 128 * 10 + 10


@pytest.mark.parametrize(
    ("name", "up", "down", "kept", "keeps"),
    [
        ("fedavg", MODEL, MODEL, 0, ()),
        ("centralized", 0, 0, 0, ()),
        ("local", 0, 0, MODEL, ("params",)),
        ("admm_fedmeta", MODEL, MODEL + 2, 2 * MODEL, ("theta", "y")),  # δ and ΣD go along
        ("fedec", MODEL, MODEL, MODEL + 1, ("theta",)),  # and a flag: is there a θ̂?
        ("elastic(admm_fedmeta)", MODEL, MODEL + 2, 3 * MODEL + 1, ("memory", "theta", "y")),
        ("apfl_ewc", MODEL + 1, 2 * MODEL, MODEL + 128 + 10 + 1, ("m", "w")),  # a loss up; importances down
    ],
)
def test_sizes_by_hand(name: str, up: int, down: int, kept: int, keeps: tuple[str, ...]) -> None:
    found = traffic(catalog.build(name, {}), "mlp")
    assert [round(part * MODEL) for part in found[:3]] == [up, down, kept]
    assert found.keeps == keeps


def test_what_is_kept_in_words() -> None:
    assert traffic(catalog.build("admm_fedmeta", {})).memory == "theta, y (2)"
    assert traffic(catalog.build("fedavg", {})).memory == "nothing"
