import math

import numpy as np
import pytest
import torch
from torch.func import grad, vmap

from apiece import tree
from apiece.errors import ApieceError
from apiece.models import build
from apiece.params import Params
from apiece.random import as_key
from apiece.shard import Batch

SIZES = {"user": 6041, "gender": 2, "age": 7, "occupation": 21, "zip": 3439, "item": 3953}
WIDTHS = {"user": 15, "gender": 2, "age": 3, "occupation": 5, "zip": 15, "item": 15}
TASK = build("din", (), 2)


def viewers(*shape, history=4):
    """Inputs at random; the last film of every history is none."""
    draw = torch.Generator().manual_seed(0)

    def column(name, *more):
        return torch.randint(1, SIZES[name], (*shape, *more), generator=draw).short()

    x = {name: column(name) for name in SIZES}
    x["history"] = column("item", history)
    x["history"][..., -1] = 0
    return x


def relu(h):
    return np.maximum(h, 0)


def logit(w, x):
    """The logit of one example, a film of the history at a time."""

    def dense(name, h):
        return w[f"{name}.weight"] @ h + w[f"{name}.bias"]

    t = w["item.weight"][x["item"]]
    interest = np.zeros(15)
    for film in x["history"]:
        if film != 0:
            h = w["item.weight"][film]
            pair = np.concatenate([h, t, h - t, h * t])
            interest += dense("attention.2", relu(dense("attention.0", pair))) * h
    names = ("user", "gender", "age", "occupation", "zip")
    h = np.concatenate([*(w[f"profile.{name}.weight"][x[name]] for name in names), t, interest])
    return dense("head", relu(dense("body.2", relu(dense("body.0", h)))))[0]


def test_din_one_example_at_a_time():
    params, x = TASK.init(3), viewers(6)
    w = {name: p.double().numpy() for name, p in params.items()}
    rows = [{name: array[n].numpy() for name, array in x.items()} for n in range(6)]
    expected = np.array([[0.0, logit(w, row)] for row in rows])
    assert np.std(expected[:, 1]) > 1e-3
    np.testing.assert_allclose(TASK.predict(params, x), expected, atol=1e-6)


def test_the_sizes_are_fedpas():
    """Embeddings; attention 60·36 + 36 and 36 + 1; layers 70·32 + 32, 32·16 + 16 and 16 + 1."""
    tables = sum(SIZES[name] * WIDTHS[name] for name in SIZES)
    dense = 60 * 36 + 36 + 36 + 1 + 70 * 32 + 32 + 32 * 16 + 16 + 16 + 1
    assert sum(p.numel() for p in TASK.init(0).values()) == tables + dense


def test_the_loss_is_the_binary_cross_entropy_of_the_logit():
    params, x = TASK.init(0), viewers(4)
    y = torch.tensor([0, 1, 1, 0])
    z = TASK.predict(params, x)[:, 1].double()
    expected = [
        math.log1p(math.exp(-s if label else s)) for s, label in zip(z.tolist(), y.tolist(), strict=True)
    ]
    torch.testing.assert_close(TASK.losses(TASK.predict(params, x), y), torch.tensor(expected))


def test_a_history_is_a_set():
    """Neither the order nor the number of empty places counts; a history without a film is allowed."""
    params, x = TASK.init(0), viewers(5)
    turned = {**x, "history": torch.cat([x["history"], torch.zeros(5, 3, dtype=torch.int16)], -1).flip(-1)}
    torch.testing.assert_close(TASK.predict(params, turned), TASK.predict(params, x))
    assert TASK.predict(params, {**x, "history": torch.zeros_like(x["history"])}).isfinite().all()


def test_no_film_learns_nothing():
    params, x = TASK.init(0), viewers(5)
    batch = Batch(x, torch.tensor([0, 1, 1, 0, 1]), torch.ones(5), None, as_key(0))
    gradient = grad(TASK.objective)(params, batch)["item.weight"]
    assert (gradient[0] == 0).all()
    assert (gradient[x["history"][0, 0].long()] != 0).any()


def test_many_clients_at_once():
    """Each with params of its own, as one after another."""
    x, y = viewers(3, 5), torch.arange(15).reshape(3, 5) % 2
    params = tree.stack([TASK.init(seed) for seed in range(3)])

    def step(w: Params, x: tree.Tree, y: torch.Tensor) -> Params:
        return grad(TASK.objective)(w, Batch(x, y, torch.ones(5), None, as_key(0)))

    together = vmap(step)(params, x, y)
    for client in range(3):
        alone = step(*tree.take((params, x, y), client))
        for name in alone:
            torch.testing.assert_close(together[name][client], alone[name], atol=1e-7, rtol=1e-5)


def test_it_learns_who_likes_what():
    """Viewers choose films of their own parity: neither viewer nor film alone tells; the history does."""
    n, draw = 400, torch.Generator().manual_seed(1)
    x = viewers(n, history=6)
    kind = torch.randint(0, 2, (n,), generator=draw)
    films = 1 + torch.randint(0, 20, (n, 7), generator=draw)
    x["history"] = (2 * films[:, :6] + kind[:, None]).short()
    other = torch.randint(0, 2, (n,), generator=draw)
    x["item"] = (2 * films[:, 6] + (kind + other) % 2).short()
    batch = Batch(x, 1 - other, torch.ones(n), None, as_key(0))
    params = TASK.init(0)
    moments = params * 0.0
    for _ in range(150):
        gradient = grad(TASK.objective)(params, batch)
        moments = 0.9 * moments + gradient
        params = params - 0.5 * moments
    assert TASK.metrics(TASK.predict(params, x), batch)["AUC"] > 0.95


@pytest.mark.parametrize("name", ["din(hidden=3)", "din(64)"])
def test_it_has_no_options(name):
    with pytest.raises(ApieceError, match="option"):
        build(name, (), 2)
