"""The command as its users type it, run inside the test process; real processes are in test_bad_input.py."""

from __future__ import annotations

import json
import math
import re
import shutil
import statistics
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from apiece import experiment, session, terminal
from apiece.check import Finding
from apiece.commands import flags, known
from apiece.data import DATASETS
from apiece.experiment import Experiment
from apiece.reproduce import tables
from apiece.settings import parse_seeds
from tests.command import SIZES, SMALL, apiece, interrupted, strict, table

COMMANDS = (
    "run",
    "compare",
    "resume",
    "report",
    "methods",
    "datasets",
    "download",
    "models",
    "check",
    "export",
    "personalize",
)
FILES = {
    "experiment.toml",
    "rounds.csv",
    "clients.csv",
    "partition.csv",
    "cohorts.csv",
    "engine.json",
    "summary.json",
    "checkpoint",
    "model",
}
GROUPS = ("seen", "unseen")
SCORES = ("initial", "personalized")


def described(*arguments: str) -> Experiment:
    """The experiment that `apiece run` would run."""
    found: list[Experiment] = []

    def note(experiment: Experiment, *_: object) -> None:
        found.append(experiment)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "run", note)
        outcome = apiece("run", *arguments)
    assert outcome.code == 130, outcome.err
    return found[0]


def without_seconds(folder: Path) -> dict[str, Any]:
    """The files that tell of the results."""
    rounds = [{k: v for k, v in row.items() if k != "seconds"} for row in table(folder / "rounds.csv")]
    summary = {k: v for k, v in json.loads((folder / "summary.json").read_text()).items() if k != "seconds"}
    files = {name: (folder / name).read_text() for name in ("clients.csv", "partition.csv", "cohorts.csv")}
    return {"rounds": rounds, "summary": summary, **files}


# Help


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_a_terminal_and_is_worth_reading(command: str) -> None:
    outcome = apiece(*command.split(), "--help")
    assert outcome.code == 0
    assert max(map(len, outcome.out.splitlines())) <= 80
    assert "\x1b" not in outcome.out
    if command not in ("", "datasets", "models"):
        assert f"apiece {command} " in outcome.out.split("Example")[1]


def test_the_first_help_names_every_command() -> None:
    out = apiece().out
    assert all(f"│ {command} " in out for command in COMMANDS)


# What is run


def test_the_bare_command_runs_the_embedded_default() -> None:
    assert described() == Experiment()


def test_every_key_of_an_experiment_has_a_flag_that_says_its_default() -> None:
    assert {flag.key for flag in flags.FLAGS} | {"settings"} == set(experiment.KEYS)
    text = " ".join(apiece("run", "--help").out.replace("│", " ").split())
    for flag in flags.FLAGS:
        default = getattr(Experiment(), flag.key)
        assert default in ("", ()) or f"Default: {default}." in text


def test_every_flag_arrives() -> None:
    values: dict[str, Any] = {
        "method": "reptile",
        "data": "synthetic",
        "client_column": "hospital",
        "label_column": "outcome",
        "model": "mlp(hidden=(8,))",
        "clients": 12,
        "partition": "dirichlet:0.5:3",
        "partition_seed": 4,
        "test": 0.5,
        "unseen": 0.1,
        "rounds": 7,
        "cohort": 5,
        "seed": 3,
        "engine": "sequential",
        "device": "cpu",
        "chunk": 2,
        "threads": 1,
        "store": "mapped",
        "evaluate_every": 3,
        "checkpoint_every": 2,
        "target": 0.9,
        "on_nan": "skip",
    }
    arguments = [text for key, value in values.items() for text in (f"--{key.replace('_', '-')}", str(value))]
    expected = Experiment(**values, settings={"lr": 0.2, "outer": {"lr": 0.5}})
    assert described(*arguments, "--set", "lr=0.2", "--set", "outer.lr=0.5") == expected


def test_flags_override_a_file(tmp_path: Path) -> None:
    file = tmp_path / "e.toml"
    file.write_text(
        'method = "elastic(fedavg)"\nrounds = 9\nseed = 5\n[settings]\nalpha = 0.3\ninner.lr = 0.05\n'
    )
    settings = {"alpha": 0.3, "inner": {"lr": 0.05}}
    assert described(str(file)) == Experiment("elastic(fedavg)", settings, rounds=9, seed=5)
    changed = described(str(file), "--rounds", "2", "--set", "alpha=0.7", "--set", "inner.epochs=2")
    settings = {"alpha": 0.7, "inner": {"lr": 0.05, "epochs": 2}}
    assert changed == Experiment("elastic(fedavg)", settings, rounds=2, seed=5)
    other = described(str(file), "--method", "fedavg", "--set", "lr=0.2")
    assert other == Experiment("fedavg", {"lr": 0.2}, rounds=9, seed=5)


# The run folder, its numbers worked out again from its own files


def test_a_run_leaves_its_files(finished: Path) -> None:
    assert {path.name for path in finished.iterdir()} >= FILES
    inside = [path for name in ("checkpoint", "model") for path in (finished / name).rglob("*")]
    assert {path.suffix for path in inside if path.is_file()} == {".safetensors", ".json"}
    assert sorted(p.name for p in (finished / "checkpoint").iterdir()) == ["round-000003", "round-000004"]
    chosen = strict((finished / "engine.json").read_text())
    assert (chosen["engine"], chosen["device"], chosen["threads"]) == ("vectorized", "cpu", 1)


def test_the_saved_experiment_is_what_was_asked_with_everything_written_out(finished: Path) -> None:
    saved = experiment.read(finished / "experiment.toml")
    assert set(saved.settings) == {"local", "personal", "outer"}
    assert saved.settings["local"]["epochs"] == 1
    arguments = [text.replace("epochs=1", "local.epochs=1") for text in SMALL]
    decided = {"settings": saved.settings, "partition": "classes:4"}
    assert Experiment(**{**vars(described(*arguments)), **decided}) == saved


def test_scores_are_the_means_over_clients(finished: Path) -> None:
    summary = strict((finished / "summary.json").read_text())
    last = table(finished / "rounds.csv")[-1]
    clients = [row for row in table(finished / "clients.csv") if row["metric"] == "accuracy"]
    assert [int(row["client"]) for row in clients] == list(range(8))
    assert {row["test"] for row in clients} == {"test"}
    for group, seen in zip(GROUPS, ("1", "0"), strict=True):
        rows = [row for row in clients if row["seen"] == seen]
        figures = summary[group]
        assert figures["clients"] == figures["scored"] == len(rows) == {"seen": 6, "unseen": 2}[group]
        sizes = [int(row["n_test"]) for row in rows]
        for score in SCORES:
            values = [float(row[score]) for row in rows]
            weighted = sum(v * n for v, n in zip(values, sizes, strict=True)) / sum(sizes)
            expected = {
                "mean": statistics.fmean(values),
                "weighted": weighted,
                "std": statistics.pstdev(values),
                "worst10": min(values),  # a tenth of 6 or of 2 clients, rounded up: one
            }
            for name, value in expected.items():
                key = score if name == "mean" else f"{score}_{name}"
                assert figures[key] == pytest.approx(value)
                assert float(last[f"{group}_{score}_{name}"]) == pytest.approx(value)
        harmed = statistics.fmean(float(row["personalized"]) < float(row["initial"]) for row in rows)
        assert figures["harmed"] == float(last[f"{group}_harmed"]) == harmed


def test_an_accuracy_is_a_whole_number_of_hits(finished: Path) -> None:
    for row in table(finished / "clients.csv"):
        if row["metric"] == "accuracy":
            hits = float(row["personalized"]) * int(row["n_test"])
            assert hits == pytest.approx(round(hits), abs=1e-4)


def test_evaluated_at_the_start_every_second_round_and_at_the_end(finished: Path) -> None:
    rows = table(finished / "rounds.csv")
    assert [row["round"] for row in rows] == ["0", "1", "2", "3", "4"]
    assert [row["round"] for row in rows if row["seen_initial_mean"]] == ["0", "2", "4"]


def test_bytes_are_those_of_the_models_sent(finished: Path) -> None:
    """64 × 10 weights and 10 biases of 4 bytes; 3 clients a round, 4 rounds."""
    model = 4 * (64 * 10 + 10)
    rows = table(finished / "rounds.csv")
    summary = strict((finished / "summary.json").read_text())
    for way in ("bytes_up", "bytes_down"):
        assert [int(row[way]) for row in rows] == [0] + 4 * [3 * model]
        assert summary[way] == 4 * 3 * model


def test_rounds_to_the_target_are_those_of_the_log(finished: Path, tmp_path: Path) -> None:
    rows = table(finished / "rounds.csv")
    target = float(rows[2]["seen_personalized_mean"])  # reached at round 2 at the latest
    outcome = apiece("run", *SMALL, "--target", repr(target), "--out", str(tmp_path / "r"), "--json")
    assert outcome.json["target"] == target
    expected = {}
    for group in GROUPS:
        for score in SCORES:
            scored = [(int(row["round"]), row[f"{group}_{score}_mean"]) for row in rows]
            reached = [round for round, mean in scored if mean and float(mean) >= target]
            expected[f"{group}_{score}"] = min(reached, default=None)
    assert outcome.json["rounds_to_target"] == expected
    assert expected["seen_personalized"] is not None


def test_cohorts_are_seen_clients_and_the_partition_adds_up(finished: Path) -> None:
    clients = {row["client"]: row for row in table(finished / "clients.csv")}
    cohorts: dict[str, list[str]] = {}
    for row in table(finished / "cohorts.csv"):
        cohorts.setdefault(row["round"], []).append(row["client"])
    assert list(cohorts) == ["1", "2", "3", "4"]
    for cohort in cohorts.values():
        assert len(set(cohort)) == 3
        assert all(clients[client]["seen"] == "1" for client in cohort)
    counts: dict[tuple[str, str], int] = {}
    for row in table(finished / "partition.csv"):
        counts[row["client"], row["split"]] = counts.get((row["client"], row["split"]), 0) + int(row["count"])
    for client, row in clients.items():
        assert counts[client, "train"] == int(row["n_train"])
        assert counts[client, "test"] == int(row["n_test"])
    assert sum(counts.values()) == 1797  # all of digits


def test_the_initial_model_is_saved_with_what_one_needs_to_load_it(finished: Path) -> None:
    card = strict((finished / "model" / "model.json").read_text())
    assert card == {
        "model": "logistic",
        "input_shape": [64],
        "classes": 10,
        "label_names": [str(i) for i in range(10)],
    }
    shapes = sorted(t.numel() for t in load_file(finished / "model" / "initial.safetensors").values())
    assert shapes == [10, 640]


# Again, and from elsewhere


def test_the_saved_experiment_runs_again_to_the_same_files(finished: Path, tmp_path: Path) -> None:
    outcome = apiece("run", str(finished / "experiment.toml"), "--out", str(tmp_path / "again"))
    assert outcome.code == 0, outcome.err
    assert without_seconds(tmp_path / "again") == without_seconds(finished)


OWN = '''
from dataclasses import dataclass
from torch import nn
from apiece import Method, Model, Recipe, Reply, sgd

@dataclass(frozen=True)
class Mine(Method):
    """Mine."""
    local: Recipe = Recipe(epochs=1)
    personal: Recipe = Recipe()
    step: float = 1.0

    def init(self, task, params, key):
        return Model(params)

    def broadcast(self, server, round):
        return server

    def client_update(self, task, broadcast, client, data):
        w = sgd(task.objective, broadcast.params, data, self.local)
        return Reply(w - broadcast.params, model=w)

    def server_update(self, task, server, update, round):
        return Model(server.params + self.step * update)

    def personalize(self, task, broadcast, client, data):
        return sgd(task.objective, broadcast.params, data, self.personal)

def network(input_shape, classes):
    return nn.Sequential(nn.Linear(*input_shape, 5), nn.ReLU(), nn.Linear(5, classes))
'''


def test_own_method_model_and_data_by_relative_paths_resumed_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrapped, too. 2 × 5 + 5 and 5 × 3 + 3 parameters are sent by 2 clients in 3 rounds."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(OWN)
    draw = np.random.default_rng(0)
    lines = ["hospital,outcome,age,pressure"]
    for i in range(60):
        x = draw.normal(size=2)
        lines.append(
            f"{'nswe'[i % 4]},{('ill', 'so-so', 'well')[int(x[0] > 0) + int(x[1] > 0)]},{x[0]},{x[1]}"
        )
    Path("patients.csv").write_text("\n".join(lines))
    outcome = apiece(
        *("run", "--method", "elastic(mine.py:Mine)", "--set", "alpha=0.2", "--set", "inner.step=0.5"),
        *("--data", "patients.csv", "--client-column", "hospital", "--label-column", "outcome"),
        *("--model", "mine.py:network", "--rounds", "3", "--cohort", "2", "--checkpoint-every", "1"),
        *("--engine", "vectorized", "--threads", "1", "--unseen", "0.25", "--out", "run"),
    )
    assert outcome.code == 0, outcome.err
    assert "elastic(mine.py:Mine)" in outcome.out
    folder = tmp_path / "run"
    assert strict((folder / "summary.json").read_text())["bytes_up"] == 4 * (15 + 18) * 2 * 3
    names = [row["name"] for row in table(folder / "partition.csv")]
    assert list(dict.fromkeys(names)) == ["e", "n", "s", "w"]

    copy = interrupted(folder, tmp_path / "copy")
    monkeypatch.chdir("/")
    assert apiece("resume", str(copy)).code == 0
    assert without_seconds(copy) == without_seconds(folder)
    assert apiece("export", str(folder), "--client", "s", "-o", str(tmp_path / "s.safetensors")).code == 0


@pytest.mark.parametrize("form", ["npz", "parquet", "folder"])
def test_own_data_in_every_form_gives_the_same_run(form: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(40, 3)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    client = np.array(["a", "b", "c", "d"])[np.arange(40) % 4]
    np.savez(tmp_path / "reference.npz", x=x, y=y, client=client)
    if form == "npz":
        data = tmp_path / "named.npz"
        np.savez(data, x=x, y=y, who=client)
    elif form == "parquet":
        pa = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        data = tmp_path / "table.parquet"
        columns = {"who": client, "label": y, "x0": x[:, 0], "x1": x[:, 1], "x2": x[:, 2]}
        parquet.write_table(pa.table(columns), data)
    else:
        data = tmp_path / "folder"
        data.mkdir()
        for name in "abcd":
            np.savez(data / f"{name}.npz", x=x[client == name], y=y[client == name])
    sizes = (
        "--rounds",
        "1",
        "--cohort",
        "2",
        "--engine",
        "vectorized",
        "--threads",
        "1",
        "--model",
        "logistic",
    )
    scores = {}
    for path in (tmp_path / "reference.npz", data):
        column = "client" if path.stem == "reference" else "who"
        out = tmp_path / f"run-{path.stem}"
        outcome = apiece("run", "--data", str(path), "--client-column", column, *sizes, "--out", str(out))
        assert outcome.code == 0, outcome.err
        scores[path] = [row["personalized"] for row in table(out / "clients.csv")]
    reference, other = scores.values()
    assert other == reference


def test_without_out_every_run_gets_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("fedavg-digits-s0", "fedavg-digits-s0-2"):
        outcome = apiece("run", *SIZES, "--rounds", "1", "--set", "epochs=1")
        assert outcome.code == 0, outcome.err
        assert f"files: runs/{name}\n" in outcome.out
        assert (tmp_path / "runs" / name / "summary.json").exists()


# Resume


def test_resume_goes_on_to_the_same_files(finished: Path, tmp_path: Path) -> None:
    folder = interrupted(finished, tmp_path / "run")
    outcome = apiece("resume", str(folder), "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.json["rounds"] == 4
    assert without_seconds(folder) == without_seconds(finished)


# Compare


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compare") / "runs"
    methods = ("--methods", "fedavg,elastic(fedavg)", "--seeds", "0,1")
    settings = ("--set", "elastic(fedavg).alpha=0.1", "--set", "fedavg.lr=0.2")
    outcome = apiece("compare", *methods, *SIZES, "--rounds", "2", *settings, "--out", str(folder))
    assert outcome.code == 0, outcome.err
    assert "mean ± std over seeds" in outcome.out
    for method in ("fedavg", "elastic(fedavg)"):
        scores = []
        for seed in (0, 1):
            place = folder / f"{flags.file_name(method)}-s{seed}"
            scores.append(strict((place / "summary.json").read_text())["unseen"]["personalized"])
        cell = f"{100 * statistics.fmean(scores):.1f} ± {100 * statistics.stdev(scores):.1f}"
        (line,) = [line for line in outcome.out.splitlines() if line.split()[:1] == [method]]
        assert cell in line
    assert max(map(len, outcome.out.split("files:")[0].splitlines())) <= 80
    return folder


def test_methods_are_compared_under_the_same_cohorts_and_partition(compared: Path) -> None:
    places = ["elastic-fedavg-s0", "elastic-fedavg-s1", "fedavg-s0", "fedavg-s1"]
    assert sorted(path.name for path in compared.iterdir()) == places
    cohorts = {place: (compared / place / "cohorts.csv").read_text() for place in places}
    assert cohorts["fedavg-s0"] == cohorts["elastic-fedavg-s0"] != cohorts["fedavg-s1"]
    partitions = {(compared / place / "partition.csv").read_text() for place in places}
    assert len(partitions) == 1  # seeds change the training, not the deal


def test_a_setting_may_be_for_one_method_alone(compared: Path) -> None:
    fedavg = experiment.read(compared / "fedavg-s0" / "experiment.toml").settings
    elastic = experiment.read(compared / "elastic-fedavg-s0" / "experiment.toml").settings
    assert fedavg["local"]["lr"] == 0.2
    assert (elastic["alpha"], elastic["inner"]["local"]["lr"]) == (0.1, 0.1)


def test_what_is_finished_is_not_run_again_and_what_was_interrupted_goes_on(
    compared: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "runs"
    shutil.copytree(compared, folder)
    (folder / "fedavg-s1" / "summary.json").unlink()
    shutil.rmtree(folder / "elastic-fedavg-s1")
    kept = folder / "fedavg-s0" / "summary.json"
    written = kept.stat().st_mtime_ns
    methods = ("--methods", "fedavg,elastic(fedavg)", "--seeds", "0-1")
    settings = ("--set", "elastic(fedavg).alpha=0.1", "--set", "fedavg.lr=0.2")
    outcome = apiece("compare", *methods, *SIZES, "--rounds", "2", *settings, "--out", str(folder), "--json")
    assert outcome.code == 0, outcome.err
    assert kept.stat().st_mtime_ns == written
    for place in compared.iterdir():
        assert without_seconds(folder / place.name) == without_seconds(place)
    assert [(run["method"], run["seed"]) for run in outcome.json] == [
        ("fedavg", 0),
        ("fedavg", 1),
        ("elastic(fedavg)", 0),
        ("elastic(fedavg)", 1),
    ]


def test_another_experiment_in_the_folder_is_left_alone(compared: Path) -> None:
    outcome = apiece("compare", "--methods", "fedavg", *SIZES, "--rounds", "3", "--out", str(compared))
    assert outcome.code == 2
    assert "fedavg-s0 holds another experiment: choose another folder with --out" in outcome.err


@pytest.mark.parametrize(
    ("text", "seeds"), [("0", [0]), ("0-4", [0, 1, 2, 3, 4]), ("7,3, 7", [7, 3]), ("0-1,5", [0, 1, 5])]
)
def test_seeds(text: str, seeds: list[int]) -> None:
    assert parse_seeds(text) == seeds


def test_methods_with_commas_inside() -> None:
    assert flags.split_methods("local, a(b,c) ,fedavg,local") == ["local", "a(b,c)", "fedavg"]


def test_compare_takes_the_seed_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text("seed = 5\n")
    options = (*SIZES, "--rounds", "1", "--set", "epochs=1", "--out", str(tmp_path / "runs"), "--json")
    (run,) = apiece("compare", str(tmp_path / "e.toml"), "--methods", "fedavg", *options).json
    assert run["seed"] == 5
    assert run["folder"] == str(tmp_path / "runs" / "fedavg-s5")


def test_compare_takes_a_proxy_from_the_clients_of_all_methods(tmp_path: Path) -> None:
    options = (
        *SIZES,
        "--rounds",
        "1",
        "--set",
        "fedpa.aggregator.epochs=1",
        "--out",
        str(tmp_path),
        "--json",
    )
    apiece("compare", "--methods", "fedavg,fedpa", *options)
    shares = {
        name: experiment.read(tmp_path / f"{name}-s0" / "experiment.toml").proxy
        for name in ("fedavg", "fedpa")
    }
    assert shares["fedavg"] == shares["fedpa"] > 0


# Continual learning and adaptation


def test_continual_shows_every_model_on_every_task(tmp_path: Path) -> None:
    """Two seeds; the figures are those of the runs' summaries."""
    tasks = ("--tasks", "digits[0-4]; digits[5-9]", "--methods", "fedavg,admm_fedmeta", "--seeds", "0-1")
    options = (*SIZES, "--partition", "classes:2", "--rounds", "2", "--out", str(tmp_path))
    shown = apiece("continual", *tasks, *options, "--json").json
    assert list(shown) == ["after digits[0-4] (fedavg)", "fedavg", "admm_fedmeta"]
    for seed in (0, 1):
        summary = strict((tmp_path / f"admm_fedmeta-s{seed}-task2" / "summary.json").read_text())
        told = {task: scores[seed] for task, scores in shown["admm_fedmeta"].items()}
        assert told["digits[5-9]"] == summary["unseen"]["personalized"]
        assert told["digits[0-4]"] == summary["also"]["digits[0-4]"]["unseen"]["personalized"]
    again = apiece("continual", *tasks, *options).out
    assert again.count("±") == 6


def test_continual_needs_two_tasks() -> None:
    outcome = apiece("continual", "--tasks", "digits[0-4]")
    assert outcome.code == 2
    assert "two datasets or more" in outcome.err


def test_curves_are_left_in_the_run(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    rows = apiece("curves", str(folder), "--json").json
    written = table(folder / "adaptation.csv")
    assert [(row["along"], row["amount"]) for row in rows] == [
        (row["along"], row["amount"]) for row in written
    ]
    unseen = strict((folder / "summary.json").read_text())["unseen"]
    no_epoch = next(row for row in written if (row["along"], row["amount"]) == ("epochs", "0"))
    assert float(no_epoch["personalized_mean"]) == pytest.approx(unseen["initial"])


# Lists, checks, reports


def test_lists() -> None:
    assert {"fedavg", "local", "reptile", "elastic"} <= {
        row["name"] for row in apiece("methods", "--json").json
    }
    assert {row["name"] for row in apiece("datasets", "--json").json} == set(DATASETS)
    assert {"logistic", "svm", "mlp", "cnn"} <= {row["name"] for row in apiece("models", "--json").json}
    assert "elastic(…)" in apiece("methods").out
    assert "PATH" in apiece("datasets").out
    assert "file.py:factory" in apiece("models").out


@pytest.mark.parametrize(
    ("width", "left_out"),
    [(60, "kind, paper, up, down, keeps"), (80, "paper, up, down, keeps"), (120, "keeps"), (160, "")],
)
def test_a_narrow_terminal_shows_names_whole(
    width: int, left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column is shown with all its words or not at all; of the names none is ever missing."""
    monkeypatch.setattr(terminal.out, "_width", width)
    shown = apiece("methods").out
    assert {row["name"] for row in apiece("methods", "--json").json} <= set(shown.replace("(…)", "").split())
    assert (" personalized " in shown) == ("kind" not in left_out)
    assert ("McMahan et al. 2017" in shown) == ("paper" not in left_out)
    assert ("Left out, for the terminal is narrow: " in shown) == bool(left_out)
    assert left_out in " ".join(shown.split())
    assert set(tables(Path("experiments"))) <= set(apiece("reproduce", "list").out.split())


@pytest.mark.parametrize(
    ("width", "left_out"),
    [
        (36, "cost time, unseen harmed, seen harmed, seen initial, unseen initial"),
        (60, "cost time"),
        (120, ""),
    ],
)
def test_on_a_narrow_terminal_the_main_scores_stay(
    width: int, left_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal.out, "_width", width)
    shown = " ".join(apiece("run", *SMALL, "--out", str(tmp_path / "run")).out.split())
    assert shown.count("personalized") == 2
    assert (f"Left out, for the terminal is narrow: {left_out}" in shown) == bool(left_out)
    assert ("Left out" in shown) == bool(left_out)


def test_where_nobody_sees_a_bar_there_are_lines(tmp_path: Path) -> None:
    """The first and the last at least; a bar is for those who look."""
    lines = apiece("run", *SMALL, "--out", str(tmp_path / "run")).err.splitlines()
    assert re.fullmatch(r"fedavg 0/4  seen [\d.]+→[\d.]+  unseen [\d.]+→[\d.]+", lines[0])
    assert re.fullmatch(r"fedavg 4/4  seen [\d.]+→[\d.]+  unseen [\d.]+→[\d.]+", lines[-1])
    assert apiece("run", *SMALL, "--json", "--out", str(tmp_path / "quiet")).err == ""


def test_scores_of_another_round_are_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "APART", -1.0)
    words = ("--rounds", "3", "--evaluate-every", "2", "--out", str(tmp_path / "run"))
    lines = apiece("run", *SIZES, *words).err.splitlines()
    assert [re.sub(r"  .*unseen \S+", "", line) for line in lines] == [
        "fedavg 0/3",
        "fedavg 1/3 (round 0)",
        "fedavg 2/3",
        "fedavg 3/3",
    ]


def test_a_wrapper_around_something_shows_the_settings_of_both() -> None:
    text = apiece("methods", "guarded(ditto)").out
    assert "folds = 5" in text
    assert "[settings.inner.personal]" in text
    assert "--set inner.local.lr=0.1" in text


def test_a_second_stage_that_is_never_trained_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stages = ["--method", "stages(fedavg,reptile)", "--set", "switch=2"]
    for rounds, told in (("2", True), ("3", False)):
        caplog.clear()
        apiece("run", *SIZES, *stages, "--rounds", rounds, "--out", str(tmp_path / rounds))
        assert ("the second is never trained" in caplog.text) == told


def test_the_version() -> None:
    assert apiece("--version").out == f"apiece {version('apiece')}\n"


def test_one_method_shows_its_settings_as_a_file_has_them(tmp_path: Path) -> None:
    text = apiece("methods", "fedavg").out
    assert "McMahan et al. 2017" in text
    (tmp_path / "e.toml").write_text(text[text.index("[settings") :])
    settings = experiment.read(tmp_path / "e.toml").settings
    assert settings == apiece("methods", "fedavg", "--json").json["settings"]
    assert settings["outer"]["lr"] == 1.0
    assert "[settings.inner.local]" in apiece("methods", "elastic").out


def test_check_tells_by_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite itself is tested in test_check.py: one method that breaks a rule is enough here."""
    bad = apiece("check", f"{Path(__file__).parent}/broken.py:FloatInBroadcast")
    assert bad.code == 1
    marks = [line[0] for line in bad.out.splitlines()]
    assert set(marks) == {"✓", "✗"}
    asked: list[tuple[Any, str]] = []

    def examine(method: Any, device: str) -> list[Finding]:
        asked.append((method, device))
        return [Finding("runs", True, "")]

    monkeypatch.setattr(known, "examine", examine)
    good = apiece("check", "elastic(fedavg)", "--set", "inner.lr=0.5", "--json")
    assert good.code == 0
    assert good.json == [{"rule": "runs", "ok": True, "detail": ""}]
    ((method, device),) = asked
    assert (method.inner.local.lr, device) == (0.5, "cpu")


def test_report_of_a_folder_of_runs(compared: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    outcome = apiece("report", str(compared), "-o", str(page))
    assert outcome == (0, f"report: {page}\n", "")
    text = page.read_text()
    assert "elastic(fedavg)" in text
    assert "<html" in text


# What programs read


def test_stdout_is_the_table_and_nothing_else(tmp_path: Path) -> None:
    outcome = apiece("run", *SIZES, "--rounds", "1", "--set", "epochs=1", "--out", str(tmp_path / "r"))
    assert "\x1b" not in outcome.out + outcome.err
    assert "1/1" in outcome.err  # the bar
    assert "1/1" not in outcome.out
    assert outcome.out.endswith(f"files: {tmp_path}/r\nreport: apiece report {tmp_path}/r -o report.html\n")


def test_json_is_the_summary_and_its_folder(finished: Path, tmp_path: Path) -> None:
    outcome = apiece("run", *SMALL, "--out", str(tmp_path / "r"), "--json")
    assert outcome.err == ""
    summary = strict((tmp_path / "r" / "summary.json").read_text())
    assert outcome.json == {**summary, "folder": str(tmp_path / "r")}
    assert without_seconds(tmp_path / "r") == without_seconds(finished)


def test_what_has_no_value_is_null(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Four clients of 1, 1, 2 and 16 examples: three have nothing to be tested on, and are kept."""
    draw = np.random.default_rng(0)
    np.savez(
        tmp_path / "few.npz",
        x=draw.normal(size=(20, 2)),
        y=np.arange(20) % 2,
        client=np.array(["a", "b", "c", "c"] + 16 * ["d"]),
    )
    options = (
        "--rounds",
        "1",
        "--cohort",
        "2",
        "--unseen",
        "0.5",
        "--engine",
        "vectorized",
        "--threads",
        "1",
    )
    outcome = apiece(
        "run", "--data", str(tmp_path / "few.npz"), *options, "--out", str(tmp_path / "r"), "--json"
    )
    assert outcome.code == 0, outcome.err
    groups = [outcome.json["seen"], outcome.json["unseen"]]
    (empty,) = [group for group in groups if group["scored"] == 0]
    assert empty["clients"] == 2
    assert empty["personalized"] is None
    rows = [row for row in table(tmp_path / "r" / "clients.csv") if row["metric"] == "accuracy"]
    assert [math.isnan(float(row["personalized"])) for row in rows] == [True, True, True, False]
    assert "2 have one training example, 3 have no test example: all are kept" in caplog.text


def test_columns_in_units_of_their_own_and_stray_labels_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Sodium is 139 or 141: mean 140, standard deviation 1; one row of forty says dead."""
    rows = [
        f"{'ab'[i % 2]},{'dead' if i == 39 else 'ny'[i // 2 % 2]},{0.1 * (i % 3)},{139 + 2 * (i % 4 // 2)}"
        for i in range(40)
    ]
    file = tmp_path / "units.csv"
    file.write_text("\n".join(["client,label,share,sodium", *rows]))
    options = ("--rounds", "1", "--cohort", "2", "--unseen", "0", "--engine", "sequential", "--threads", "1")
    outcome = apiece("run", "--data", str(file), *options, "--test", "0.1", "--out", str(tmp_path / "r"))
    assert outcome.code == 0, outcome.err
    assert "columns far from 0, on which models train badly: sodium (mean 140" in (caplog.text)
    assert "share" not in caplog.text
    assert "classes with less than two training examples: dead: are they labels?" in caplog.text


def test_a_report_counts_the_clients_that_the_data_has(tmp_path: Path) -> None:
    rows = "".join(f"{name},{k},{k % 2}\n" for name in "abcd" for k in range(6))
    (tmp_path / "own.csv").write_text("client,f,label\n" + rows)
    sizes = ("--cohort", "2", "--rounds", "1", "--engine", "vectorized", "--threads", "1", "--unseen", "0")
    folder, page = tmp_path / "run", tmp_path / "report.html"
    assert apiece("run", "--data", str(tmp_path / "own.csv"), *sizes, "--out", str(folder)).code == 0
    assert apiece("report", str(folder), "-o", str(page)).code == 0
    assert "<dt>clients</dt><dd>4</dd>" in page.read_text()
