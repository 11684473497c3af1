import numpy as np

from apiece import Experiment, run
from tests.worlds import ragged


def test_the_pool_is_every_seen_clients_training_data() -> None:
    data = ragged((3, 5, 2))
    data.seen[1] = False
    pool = data.pool()
    assert pool.train[0].tolist() == [0, 1, 2, 8, 9]
    assert pool.population == 1


def test_it_is_scored_on_the_real_clients() -> None:
    result = run(
        Experiment(method="centralized", rounds=15, evaluate_every=15, engine="vectorized", threads=1)
    )
    scores = result.pairs["accuracy"]
    assert len(scores.initial) == 30
    assert not np.isnan(scores.initial).any()
    # 15 epochs over the pooled digits: well above FedAvg's start and any single class.
    assert result.summary["unseen"]["initial"] > 0.85
