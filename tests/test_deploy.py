from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from apiece import ApieceError, deploy, load, session
from tests.command import SIZES, SMALL, apiece, interrupted, table


def linear(file: Path) -> nn.Linear:
    """The exported logistic regression, in plain PyTorch."""
    weights = load_file(file)
    (weight,) = [t for t in weights.values() if t.dim() == 2]
    (bias,) = [t for t in weights.values() if t.dim() == 1]
    layer = nn.Linear(64, 10)
    layer.load_state_dict({"weight": weight, "bias": bias})
    return layer.requires_grad_(False)


def examples(folder: Path, client: int, split: str) -> tuple[Tensor, Tensor]:
    data = session.reopen(folder).federation.data
    rows = torch.from_numpy(getattr(data, split)[client])
    return data.x[rows], data.y[rows]  # type: ignore[index]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def newcomer(finished: Path, tmp_path: Path) -> Path:
    """Twenty digits in a file of their own."""
    x, y = examples(finished, 0, "train")
    np.savez(tmp_path / "eve.npz", x=x[:20].numpy(), y=y[:20].numpy())
    return tmp_path / "eve.npz"


@pytest.mark.parametrize("client", [0, 5, 7])
def test_an_exported_model_scores_what_clients_csv_says(finished: Path, tmp_path: Path, client: int) -> None:
    file = tmp_path / "model.safetensors"
    outcome = apiece("export", str(finished), "--client", str(client), "-o", str(file), "--json")
    assert outcome.code == 0, outcome.err
    x, y = examples(finished, client, "test")
    outputs = linear(file)(x)
    said = {
        row["metric"]: float(row["personalized"])
        for row in table(finished / "clients.csv")
        if row["client"] == str(client)
    }
    assert float((outputs.argmax(1) == y).float().mean()) == pytest.approx(said["accuracy"])
    assert float(F.cross_entropy(outputs, y)) == pytest.approx(said["loss"], rel=1e-5)
    x, y = examples(finished, client, "train")
    assert outcome.json == {
        "client": str(client),
        "round": 4,
        "examples": len(y),
        "loss_initial": pytest.approx(float(F.cross_entropy(initial(finished)(x), y)), rel=1e-5),
        "loss_personalized": pytest.approx(float(F.cross_entropy(linear(file)(x), y)), rel=1e-5),
        "output": str(file),
    }


def initial(folder: Path) -> nn.Linear:
    return linear(folder / "model" / "initial.safetensors")


def test_the_initial_model_scores_what_clients_csv_says(finished: Path) -> None:
    for client, row in enumerate(table(finished / "clients.csv")[:8]):
        x, y = examples(finished, client, "test")
        assert float((initial(finished)(x).argmax(1) == y).float().mean()) == pytest.approx(
            float(row["initial"])
        )


def test_the_file_says_what_it_is(finished: Path, tmp_path: Path) -> None:
    file = tmp_path / "new folder" / "model.safetensors"
    outcome = apiece("export", str(finished), "--client", "3", "-o", str(file))
    assert outcome.code == 0
    assert outcome.out.startswith("client 3, after 4 rounds: loss on its own ")
    assert outcome.out.endswith(f"\nmodel: {file}\n")
    with safe_open(file, "pt") as opened:
        facts = opened.metadata()
    assert (facts["method"], facts["model"], facts["client"], facts["round"]) == (
        "fedavg",
        "logistic",
        "3",
        "4",
    )
    assert json.loads(facts["input_shape"]) == [64]
    assert json.loads(facts["label_names"]) == [str(label) for label in range(10)]


def test_reading_a_run_changes_nothing_in_it(finished: Path, newcomer: Path, tmp_path: Path) -> None:
    before = contents(finished)
    deploy.export(finished, "1", tmp_path / "a")
    deploy.personalize(finished, newcomer, tmp_path / "b")
    assert contents(finished) == before


def test_an_unfinished_run_gives_the_model_of_its_last_checkpoint(finished: Path, tmp_path: Path) -> None:
    folder = interrupted(finished, tmp_path / "run")
    assert deploy.export(folder, "1", tmp_path / "m").round == 3
    shutil.rmtree(folder / "checkpoint")
    outcome = apiece("export", str(folder), "--client", "1", "-o", str(tmp_path / "m"))
    assert outcome.code == 2
    assert f"has no checkpoint yet: let it run, or continue it with: apiece resume {folder}" in outcome.err


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on clients called 1, 2, 3 and x, whose ids are 0, 1, 2 and 3."""
    place = tmp_path_factory.mktemp("named")
    draw = np.random.default_rng(0)
    rows = ["who,label,a,b"]
    rows += [f"{i % 3 + 1},{'ny'[i % 2]},{draw.normal()},{draw.normal()}" for i in range(30)]
    (place / "data.csv").write_text("\n".join([*rows, "x,n,0.5,0.5"]))
    options = ("--rounds", "1", "--cohort", "2", "--unseen", "0", "--engine", "vectorized", "--threads", "1")
    data = ("--data", str(place / "data.csv"), "--client-column", "who", "--model", "logistic")
    outcome = apiece("run", *data, *options, "--out", str(place / "run"))
    assert outcome.code == 0, outcome.err
    return place / "run"


@pytest.mark.parametrize(
    ("client", "name"),
    [("x", "x"), ("0", "1"), ("3", None), ("name:3", "3"), ("id:3", "x"), ("id:0", "1"), ("1", None)],
)
def test_a_client_goes_by_its_id_or_its_name(
    named: Path, tmp_path: Path, client: str, name: str | None
) -> None:
    outcome = apiece("export", str(named), "--client", client, "-o", str(tmp_path / "m"), "--json")
    if name is None:  # both a name and the id of somebody else
        assert outcome.code == 2
        assert f"write name:{client} or id:{client}" in outcome.err
        assert not (tmp_path / "m").exists()
    else:
        assert outcome.json["client"] == name


@pytest.mark.parametrize("client", ["9", "-1", "y", "name:x2", "id:x", ""])
def test_there_is_no_such_client(named: Path, tmp_path: Path, client: str) -> None:
    outcome = apiece("export", str(named), f"--client={client}", "-o", str(tmp_path / "m"))
    assert outcome.code == 2
    assert f"no client {client!r}: ids are 0 to 3, names are 1, 2, 3, x" in outcome.err


# A client never met


def test_a_newcomer_gets_the_initial_model_trained_on_its_data(
    finished: Path, newcomer: Path, tmp_path: Path
) -> None:
    x, y = examples(finished, 0, "train")
    before = float(F.cross_entropy(initial(finished)(x[:20]), y[:20]))
    found = deploy.personalize(finished, newcomer, tmp_path / "m")
    assert (found.client, found.round, found.examples) == ("eve", 4, 20)
    assert found.loss_initial == pytest.approx(before, rel=1e-5)
    after = float(F.cross_entropy(linear(tmp_path / "m")(x[:20]), y[:20]))
    assert found.loss_personalized == pytest.approx(after, rel=1e-5)
    assert after < before
    again = deploy.personalize(finished, newcomer, tmp_path / "n")
    assert again == found
    assert torch.equal(linear(tmp_path / "m").weight, linear(tmp_path / "n").weight)


def test_a_newcomer_may_name_labels_as_the_run_does(named: Path, tmp_path: Path) -> None:
    (tmp_path / "eve.csv").write_text("a,b,label\n0.1,0.2,y\n0.3,0.4,y\n")
    outcome = apiece(
        "personalize", str(named), "--data", str(tmp_path / "eve.csv"), "-o", str(tmp_path / "m"), "--json"
    )
    assert outcome.json["examples"] == 2
    assert outcome.json["loss_personalized"] < outcome.json["loss_initial"]


def test_columns_of_a_newcomer_are_found_by_their_names(named: Path, tmp_path: Path) -> None:
    """In another order, beside the clients' names: the same model."""
    (tmp_path / "eve.csv").write_text("a,b,label\n0.1,0.9,y\n0.3,0.4,n\n")
    (tmp_path / "adam.csv").write_text("b,who,label,a\n0.9,adam,y,0.1\n0.4,adam,n,0.3\n")
    found = [deploy.personalize(named, tmp_path / f"{who}.csv", tmp_path / who) for who in ("eve", "adam")]
    assert found[0]._replace(client="adam") == found[1]
    eve, adam = (load_file(tmp_path / who) for who in ("eve", "adam"))
    assert all(torch.equal(value, adam[name]) for name, value in eve.items())


def test_a_written_model_can_be_used(named: Path, tmp_path: Path) -> None:
    """Logistic regression by hand: x wᵀ + b of what was written."""
    (tmp_path / "eve.csv").write_text("a,b,label\n0.1,0.9,y\n0.3,0.4,n\n")
    deploy.personalize(named, tmp_path / "eve.csv", tmp_path / "m.safetensors")
    model, raw = load(tmp_path / "m.safetensors"), load_file(tmp_path / "m.safetensors")
    x = np.array([[0.1, 0.9], [0.5, 0.5]], dtype=np.float32)
    expected = torch.from_numpy(x) @ raw["head.weight"].T + raw["head.bias"]
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(model(x.astype(np.float64)), expected)
    assert model.label_names == ("n", "y")
    assert repr(model) == "<a model of 6 parameters for n, y>"


def test_what_is_no_written_model(named: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("none")
    for path in (tmp_path / "text", tmp_path / "absent", named / "model" / "initial.safetensors"):
        with pytest.raises(ApieceError, match=r"cannot read a model|does not say which model"):
            load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b,label\n0.1,0.2,maybe\n", "labels out of range: 'maybe' in row 0 (from 0); known: n, y"),
        (
            "a,label\n0.1,y\n",
            "the newcomer's feature columns are a, the run's are a, b: give the same features",
        ),
        ("c,a,b,label\n7,0.1,0.1,y\n", "feature columns are c, a, b, the run's are a, b"),
        ("a,b\n0.1,0.1\n", "no 'label': the file has a, b"),
        ("a,b,label\n", "there are no examples"),
        ("a,b,label\n0.1,inf,y\n", "line 2, column 'b': 'inf' is not a finite number"),
    ],
)
def test_a_newcomers_mistakes(named: Path, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "eve.csv").write_text(text)
    outcome = apiece(
        "personalize", str(named), "--data", str(tmp_path / "eve.csv"), "-o", str(tmp_path / "m")
    )
    assert outcome.code == 2
    assert message in outcome.err
    assert not (tmp_path / "m").exists()


def test_a_client_without_examples_has_no_loss(tmp_path: Path) -> None:
    """A folder's file without rows is a client: it is given the initial model."""
    data = tmp_path / "clients"
    data.mkdir()
    draw = np.random.default_rng(0)
    for name, size in (("a", 9), ("b", 9), ("none", 0)):
        np.savez(data / f"{name}.npz", x=draw.normal(size=(size, 2)), y=np.arange(size) % 2)
    options = ("--rounds", "1", "--cohort", "2", "--unseen", "0", "--engine", "vectorized", "--threads", "1")
    run = tmp_path / "run"
    outcome = apiece("run", "--data", str(data), *options, "--model", "logistic", "--out", str(run))
    assert outcome.code == 0, outcome.err
    file = tmp_path / "m.safetensors"
    outcome = apiece("export", str(run), "--client", "none", "-o", str(file))
    assert outcome.out == f"client none, after 1 rounds: it has no examples\nmodel: {file}\n"
    initial = load_file(run / "model" / "initial.safetensors")
    assert all(torch.equal(value, initial[name]) for name, value in load_file(file).items())
    outcome = apiece("export", str(run), "--client", "none", "-o", str(file), "--json")
    assert outcome.json["loss_personalized"] is None


NET = """from apiece.models.linear import logistic


def net(input_shape, classes):
    return logistic(input_shape, classes)
"""


def test_a_run_whose_code_has_changed_is_refused(tmp_path: Path) -> None:
    """Comments and layout aside: models of two methods would be taken for one's."""
    file, folder = tmp_path / "mine.py", tmp_path / "run"
    file.write_text(NET)
    outcome = apiece("run", *SMALL, "--model", f"{file}:net", "--out", str(folder))
    assert outcome.code == 0, outcome.err
    file.write_text("# mine\n" + NET)
    assert deploy.export(folder, "1", tmp_path / "m").round == 4
    file.write_text(NET.replace("classes)\n", "1 * classes)\n"))
    outcome = apiece("export", str(folder), "--client", "1", "-o", str(tmp_path / "n"))
    assert outcome.code == 2
    assert f"has changed since {folder} was begun" in outcome.err
    assert not (tmp_path / "n").exists()


def test_so_is_one_that_is_finished_when_it_is_compared(tmp_path: Path) -> None:
    file, folder = tmp_path / "mine.py", tmp_path / "runs"
    words = ("compare", "--methods", "fedavg", *SIZES, "--rounds", "1", "--model", f"{file}:net")
    for text, told in ((NET, ""), (NET + "\n", ""), (NET.replace("classes)\n", "1 * classes)\n"), "changed")):
        file.write_text(text)
        outcome = apiece(*words, "--out", str(folder))
        assert (outcome.code == 2) == bool(told), outcome.err
        assert told in outcome.err
