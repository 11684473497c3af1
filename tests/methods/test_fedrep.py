"""FedRep against Algorithm 1 in plain PyTorch."""

import pytest

from apiece import ApieceError, Recipe, check_method, random
from apiece.engines.base import Engine
from apiece.methods.fedavg import FedAvg
from apiece.methods.fedrep import FedRep
from apiece.methods.reptile import Reptile
from apiece.wrappers.elastic import Elastic
from tests.methods.test_fedper import (
    BODY,
    ENGINES,
    EPOCHS,
    HEAD,
    LOCAL,
    PERSONAL,
    PERSONAL_EPOCHS,
    Client,
    assert_equals_plain,
    assert_same_run,
)

HEAD_EPOCHS = 3


def fit_head(client: Client, epochs: int, lr: float = 0.2) -> None:
    client.train(HEAD, epochs, lr, shard=client.shard.at(random.fold(0, "head")))


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_equals_algorithm_1(engine: Engine) -> None:
    """The head for the body that was sent, then the body for that head; each phase its own SGD; 1/(rn)."""

    def trains(client: Client) -> None:
        fit_head(client, HEAD_EPOCHS)
        client.train(BODY, EPOCHS)

    assert_equals_plain(
        FedRep(head_epochs=HEAD_EPOCHS, local=LOCAL, personal=PERSONAL),
        engine,
        private=HEAD,
        trains=trains,
        counts=lambda n: float(n > 0),
        personalizes=lambda client: fit_head(client, PERSONAL_EPOCHS, lr=0.1),
    )


ADAM = LOCAL._replace(optimizer="adam", lr=0.01)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
@pytest.mark.parametrize("recipe", [LOCAL, ADAM], ids=["sgd", "adam"])
def test_without_a_head_it_is_fedavg(recipe: Recipe, engine: Engine) -> None:
    """Of clients of one size, where FedAvg's mean is plain too: a power of two, so that bits are equal.

    FedRep has no head to fit before it deploys; FedAvg fine-tunes all, so its epochs are set to 0.
    """
    nothing = Recipe(epochs=0)
    fedrep = FedRep(head=(), local=recipe, personal=nothing)
    assert_same_run(fedrep, FedAvg(local=recipe, personal=nothing), engine, sizes=(16,) * 5)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_without_a_head_the_mean_is_plain(engine: Engine) -> None:
    """Of clients of all sizes: FedAvg without its weights, which is Reptile with epochs."""
    nothing = Recipe(epochs=0)
    fedrep = FedRep(head=(), local=LOCAL, personal=nothing)
    assert_same_run(fedrep, Reptile(local=LOCAL, personal=nothing), engine, sizes=(23, 9, 12, 7, 1, 16))


def test_a_client_that_trains_in_steps_still_fits_its_head_in_epochs() -> None:
    """`head_epochs` says how long the head is fitted, whatever `local` says of the body."""
    method = FedRep(head_epochs=HEAD_EPOCHS, local=LOCAL._replace(steps=2), personal=PERSONAL)

    def trains(client: Client) -> None:
        fit_head(client, HEAD_EPOCHS)
        client.train(BODY, EPOCHS, steps=2)

    assert_equals_plain(
        method,
        ENGINES[0],
        private=HEAD,
        trains=trains,
        counts=lambda n: float(n > 0),
        personalizes=lambda client: fit_head(client, PERSONAL_EPOCHS, lr=0.1),
    )


def test_elastic_fedrep_keeps_every_rule() -> None:
    check_method(Elastic(FedRep(head_epochs=1)))


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ApieceError, match="head_epochs must not be negative, got -1"):
        FedRep(head_epochs=-1)
