"""The guard against its own definition, spelled out client by client."""

from statistics import fmean, stdev

import pytest
import torch
import torch.nn.functional as F

from apiece import ApieceError, Recipe, check_method, random, tree
from apiece.engines.sequential import Sequential
from apiece.engines.vectorized import Vectorized
from apiece.evaluate import models
from apiece.methods.fedavg import FedAvg
from apiece.wrappers.elastic import Elastic
from apiece.wrappers.guarded import Guarded
from tests.worlds import CPU, federation, servers

SIZES = (0, 1, 3, 8, 20, 33, 12, 15)


def test_it_keeps_every_rule() -> None:
    check_method(Guarded(FedAvg()))
    check_method(Guarded(Elastic(FedAvg())))
    check_method(Elastic(Guarded(FedAvg())))


@pytest.mark.parametrize("engine", [Sequential(CPU), Vectorized(CPU, 8)], ids=lambda e: e.name)
@pytest.mark.parametrize(("errors", "passed"), [(0.5, 3), (1.0, 2)])
def test_each_client_deploys_what_its_own_examples_say(
    engine: Sequential | Vectorized, errors: float, passed: int
) -> None:
    """Personalizing pays clearly for some clients, doubtfully for another, and for the others not."""
    inner = FedAvg(local=Recipe(lr=0.1, batch_size=4, epochs=2), personal=Recipe(lr=0.3))
    guard = Guarded(inner, folds=3, standard_errors=errors)
    training, server = federation(guard, engine, SIZES, 6)
    server = list(servers(training, server, 3))[-1]
    f, broadcast = training.federation, training.broadcast(server, 3)
    ids = list(range(len(SIZES)))
    with torch.no_grad():
        found = models(engine, f, broadcast, ids, 3)
        deployed = []
        for client, (initial, chosen) in zip(ids, found, strict=True):
            rows, _ = f.rows(f.data.train, [client], [client], random.fold(f.root, "personalize", 3))
            shard = f.shard(tree.take(rows, 0), True)
            falls = []
            for rest, held in shard.folds(3):
                trial = inner.personalize(f.task, broadcast, (), rest)
                for row in held._rows.place[: int(held.size)].tolist():
                    outputs = (f.task.predict(w, f.data.x[row : row + 1]) for w in (initial, trial))
                    was, is_now = (float(F.cross_entropy(o, f.data.y[row : row + 1])) for o in outputs)
                    falls.append(was**0.5 - is_now**0.5)
            count = len(falls)
            assert count == SIZES[client]
            pays = count > 1 and fmean(falls) > errors * stdev(falls) / count**0.5
            expected = inner.personalize(f.task, broadcast, (), shard) if pays else initial
            deployed.append(pays)
            for name in expected:
                torch.testing.assert_close(chosen[name], expected[name], rtol=1e-4, atol=1e-5)
    assert sum(deployed) == passed, (
        "the test must see both outcomes, and one that hangs on the standard errors"
    )


def test_settings_that_cannot_judge_are_refused() -> None:
    with pytest.raises(ApieceError, match="folds"):
        Guarded(FedAvg(), folds=1)
    with pytest.raises(ApieceError, match="standard_errors"):
        Guarded(FedAvg(), standard_errors=-1.0)
