import pytest
import torch
from torch import nn
from torch.func import grad, vmap

from apiece import tree
from apiece.errors import ApieceError
from apiece.measures import text_losses
from apiece.models import build
from apiece.models.lstm import LSTM
from apiece.params import Params
from apiece.random import as_key
from apiece.shard import Batch


@pytest.mark.parametrize(
    ("inputs", "hidden", "layers", "length"), [(8, 16, 2, 80), (3, 5, 1, 1), (4, 4, 3, 7)]
)
def test_it_is_pytorchs(inputs, hidden, layers, length):
    """Same names, same outputs, same gradients."""
    torch.manual_seed(0)
    ours, theirs = LSTM(inputs, hidden, layers), nn.LSTM(inputs, hidden, layers, batch_first=True)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(4, length, inputs)
    torch.testing.assert_close(ours(x), theirs(x)[0], atol=1e-6, rtol=0)
    for model in (ours, theirs):
        out = model(x)
        (out if isinstance(out, torch.Tensor) else out[0]).square().sum().backward()
    for name, p in theirs.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name).grad, p.grad, atol=1e-5, rtol=1e-5)


def test_fresh_parameters_are_drawn_as_pytorch_draws_them():
    """Uniform in ±1/√hidden: with 64 units every matrix comes near the bound of 1/8 and not beyond."""
    torch.manual_seed(0)
    for name, p in LSTM(8, 64, 2).named_parameters():
        assert 0.12 < p.abs().max() <= 0.125, name
        assert p.mean().abs() < 0.02


TASK = build("lstm(embedding=3, hidden=6, layers=2)", (80,), 10)


def texts(*shape):
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 11, (*shape, 7), generator=draw).to(torch.int8)
    return x, torch.randint(-1, 10, (*shape, 7), generator=draw)


def reference(params, x):
    """The same model from PyTorch's layers."""
    embedding, cell, head = nn.Embedding(11, 3), nn.LSTM(3, 6, 2, batch_first=True), nn.Linear(6, 10)
    parts = {"embedding": embedding, "lstm": cell, "head": head}
    for name, part in parts.items():
        part.load_state_dict({k.removeprefix(f"{name}."): v for k, v in params.items() if k.startswith(name)})
    return head(cell(embedding(x.long()))[0])


def test_scores_of_every_place():
    params, (x, _) = TASK.init(1), texts(5)
    assert TASK.predict(params, x).shape == (5, 7, 10)
    torch.testing.assert_close(TASK.predict(params, x), reference(params, x), atol=1e-6, rtol=0)


def test_a_score_depends_on_what_stands_before_it_alone():
    params, (x, _) = TASK.init(1), texts(5)
    changed = x.clone()
    changed[:, 4:] = 1 + x[:, 4:] % 10
    before, after = TASK.predict(params, x), TASK.predict(params, changed)
    assert torch.equal(before[:, :4], after[:, :4])
    assert (before[:, 4:] != after[:, 4:]).any()


def test_the_sizes_are_tffs():
    """820,522 with 90 characters; here 81 embeddings, 80 scores, and a second bias in each LSTM layer."""
    sizes = 8 * 90 + 4 * 256 * (8 + 256 + 1) + 4 * 256 * (256 + 256 + 1) + 257 * 90
    assert sizes == 820_522
    ours = sizes - 8 * 9 - 257 * 10 + 2 * 4 * 256
    assert sum(p.numel() for p in build("lstm", (80,), 80).init(0).values()) == ours


def test_many_clients_at_once():
    """Each with params of its own, as one after another; warnings of a slow path would be errors."""
    x, y = texts(3, 4)
    params = tree.stack([TASK.init(seed) for seed in range(3)])

    def step(w: Params, x: torch.Tensor, y: torch.Tensor) -> Params:
        return grad(TASK.objective)(w, Batch(x, y, torch.ones(4), None, as_key(0)))

    together = vmap(step)(params, x, y)
    for client in range(3):
        alone = step(*tree.take((params, x, y), client))
        for name in alone:
            torch.testing.assert_close(together[name][client], alone[name], atol=1e-7, rtol=1e-5)


def test_loss_and_accuracy_are_those_of_text():
    """An example counts the mean over its characters, a client every character as much."""
    params, (x, y) = TASK.init(2), texts(5)
    batch = Batch(x, y, torch.tensor([1.0, 1, 1, 0, 1]), None, as_key(0))
    scores = reference(params, x)
    real = [0, 1, 2, 4]
    each = [torch.nn.functional.cross_entropy(scores[n][y[n] >= 0], y[n][y[n] >= 0]) for n in real]
    torch.testing.assert_close(TASK.loss(params, batch), torch.stack(each).mean())
    right = (scores.argmax(-1) == y)[real]
    share = right.sum() / (y[real] >= 0).sum()
    torch.testing.assert_close(TASK.metrics(TASK.predict(params, x), batch)["accuracy"], share)
    assert TASK.losses is text_losses


@pytest.mark.parametrize("option", ["embedding", "hidden", "layers"])
def test_sizes_are_checked(option):
    with pytest.raises(ApieceError, match=f"{option} must be at least 1, got 0"):
        build(f"lstm({option}=0)", (80,), 10)
