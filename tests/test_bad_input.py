"""Mistakes: a message that says what is wrong and what to do, exit code 2, no traceback, nothing lost."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from apiece.folder import locked
from tests.command import SIZES, SMALL, apiece, interrupted, strict, table


def refused(*arguments: str, message: str) -> None:
    outcome = apiece(*arguments)
    assert outcome.code == 2, outcome
    assert outcome.out == ""
    assert outcome.err.startswith("error: ")
    assert message in outcome.err
    assert "Traceback" not in outcome.err


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Names and numbers


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--method fedavgg", "unknown method 'fedavgg': did you mean 'fedavg'? known: "),
        ("--method mine.py", "method 'mine.py' is a file: say which class of it, mine.py:MyMethod"),
        ("--method elastic(fedavg", "method 'elastic(fedavg': parentheses are opened or closed too often"),
        ("--data digit", "unknown dataset 'digit': did you mean 'digits'? known: "),
        ("--data nowhere.csv", "no such file or folder: nowhere.csv"),
        ("--model mpl", "unknown model 'mpl': did you mean 'mlp'? known: "),
        ("--model mlp(hiden=8)", "unknown option of model 'mlp' 'hiden': did you mean 'hidden'?"),
        ("--set lrr=0.1", "unknown setting of fedavg 'lrr': did you mean 'lr'? known: "),
        ("--set optimizer=adm", "unknown optimizer 'adm': did you mean 'adam'? known: "),
        ("--set outer.optimizer=adm", "unknown optimizer 'adm': did you mean 'adam'? known: "),
        ("--engine vectorised", "unknown engine 'vectorised': did you mean 'vectorized'? known: "),
        ("--device gpu", "unknown device 'gpu': auto, cpu, cuda or cuda:N"),
        ("--store disk", "unknown store 'disk': known: auto, mapped, memory"),
        ("--on-nan ski", "unknown on_nan 'ski': did you mean 'skip'?"),
        ("--partition clases:2", "unknown partition 'clases': did you mean 'classes'?"),
        ("--partition classes", "write classes:K"),
        ("--partition dirichlet", "write dirichlet:ALPHA[:MIN]"),
        ("--partition classes:two", "K in partition 'classes:two' must be a whole number >= 1, got 'two'"),
        ("--partition natural", "the data has no clients of its own for 'natural'"),
        ("--set lr", "--set takes KEY=VALUE, got 'lr'; for example --set lr=0.1"),
        ("--set lr=fast", "local.lr must be of type float, got 'fast'"),
        ("--set lr=nan", "local.lr must be of type float, got nan"),
        ("--set local=3", "local is a table: set its entries"),
        ("--method fedrep --set head=fc", "head must be a list, written [...], got 'fc'"),
        ('--method fedrep --set head=["fc"]', "unknown layer 'fc': known: head"),
        ("--method local --set personal=3", "personal is a table: set its entries"),
        ("--method elastic(fedavg) --set lr=0.1", "write inner.lr"),
        ("--method elastic(local)", "Local replies without a model: nothing to be elastic to"),
        # Impossible sizes
        ("--cohort 20", "a cohort of 20 cannot be drawn from 6 seen clients (8 clients, 2 of them unseen)"),
        ("--cohort 0", "cohort must be at least 1, got 0"),
        ("--rounds 0", "rounds must be at least 1, got 0"),
        ("--clients 0", "clients must be at least 1, got 0"),
        ("--clients 5000", "1797 examples cannot be dealt to 5000 clients: ask for fewer clients"),
        ("--partition classes:11", "classes:11 asks for more classes than the 10 in the data"),
        ("--partition classes:1", "would leave classes undealt: ask for more clients or more classes"),
        ("--partition dirichlet:0.5:500", "1797 examples cannot give 8 clients 500 each: lower MIN"),
        ("--chunk 0", "chunk must be at least 1, got 0"),
        ("--threads -1", "threads must be at least 0, got -1"),
        ("--evaluate-every 0", "evaluate_every must be at least 1, got 0"),
        ("--set epochs=-1", "local.epochs must not be negative, got -1"),
        ("--set personal.batch_size=-1", "personal.batch_size must not be negative, got -1"),
        ("--test 1.5", "the test share must lie in [0, 1), got 1.5"),
        ("--test 0", "digits has no test examples of its own: give a share to hold out, --test 0.25"),
        ("--unseen 1.5", "unseen must be a share in [0, 1) or a whole number of clients, got 1.5"),
        ("--unseen 0.99", "unseen = 0.99 leaves none of 8 clients to train with"),
        ("--unseen 8", "unseen = 8 leaves none of 8 clients to train with"),
        ("--testers seen", "unknown testers 'seen'"),
        ("--unseen-pick first", "unknown unseen_pick 'first'"),
        ("--target 80", "target is a score between 0 and 1, 0.8 for 80 %, got 80"),
        ("--data digits[0-20]", "classes [0-20]: there are 10, from 0 to 9"),
    ],
)
def test_refused_before_anything_is_written(here: Path, arguments: str, message: str) -> None:
    refused("run", *SIZES, *arguments.split(), message=message)
    left = [path for path in here.rglob("*") if path.name != "runs"]
    assert left == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("compare --seeds a-b", "--seeds takes 0-4 or 0,3,7, got 'a-b'"),
        ("compare --seeds 3-1", "--seeds takes 0-4 or 0,3,7, got '3-1'"),
        ("compare --methods local,", "--methods takes names separated by commas, got 'local,'"),
        ("compare --methods local,fedav", "unknown method 'fedav': did you mean 'fedavg'?"),
        ("compare --methods fedavg --set mu=1", "unknown setting of fedavg 'mu'"),
        ("run nowhere.toml", "cannot read the experiment nowhere.toml: No such file or directory"),
        ("run .", "cannot read the experiment .: Is a directory"),
        ("resume nowhere", "there is no folder nowhere"),
        ("resume .", ". holds no run: there is no experiment.toml in it"),
        ("report nowhere", "nowhere is no run folder"),
        ("report .", ". holds no run"),
        ("run own.csv", "own.csv describes no experiment: for data of your own there is --data own.csv"),
        ("run mine.py", "for a method of your own there is --method mine.py:ITS_CLASS"),
        ("export . --client 1 -o m", ". holds no run: there is no experiment.toml in it"),
        ("personalize . --data m.npz -o m", ". holds no run: there is no experiment.toml in it"),
        ("methods fedavgg", "unknown method 'fedavgg': did you mean 'fedavg'?"),
        ("check fedavgg", "unknown method 'fedavgg': did you mean 'fedavg'?"),
        ("check fedavg --device cud", "unknown device 'cud': auto, cpu, cuda or cuda:N"),
    ],
)
def test_refused_by_the_other_commands(here: Path, arguments: str, message: str) -> None:
    refused(*arguments.split(), message=message)
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rounds = [", "e.toml is not valid TOML: "),
        ("methd = 'fedavg'", "unknown key of an experiment 'methd': did you mean 'method'?"),
        ("rounds = '50'", "rounds must be of type int, got '50'"),
        ("rounds = 1.5", "rounds must be of type int, got 1.5"),
        ("settings = 3", "settings must be a table, got 3"),
        ("[settings]\nlocal = 3", "local is a table: set its entries"),
        ("[settings.local]\nlrr = 3", "unknown setting of local 'lrr': did you mean 'lr'?"),
        ("[settings]\nlr = 2020-01-01", "local.lr must be of type float, got datetime.date"),
        ("[settings]\nlr = 0.1\n[settings.lr]\nx = 1", "e.toml is not valid TOML: "),
    ],
)
def test_mistakes_in_a_file(here: Path, text: str, message: str) -> None:
    (here / "e.toml").write_text(text)
    refused("run", "e.toml", *SIZES, message=message)


def test_a_word_that_the_command_line_cannot_read_is_told_as_well() -> None:
    for arguments in (("run", "--rounds", "many"), ("runn",), ("run", "--roundz", "3"), ("export", ".")):
        outcome = apiece(*arguments)
        assert outcome.code == 2
        assert "Usage: apiece" in outcome.err
        assert "Traceback" not in outcome.err


def test_a_place_that_cannot_be_written(finished: Path, here: Path) -> None:
    (here / "file").write_text("")
    refused("run", *SIZES, "--out", "file", message="file is a file: choose another folder with --out")
    refused("run", *SIZES, "--out", "file/run", message="file/run: Not a directory")
    refused("export", str(finished), "--client", "1", "-o", "file/m", message="file: File exists")


# Data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": [[1.0, np.nan]] + 5 * [[1.0, 2.0]]}, "x must be finite: row 0 (from 0) holds NaN or infinity"),
        ({"x": [[1.0, np.inf]] + 5 * [[1.0, 2.0]]}, "x must be finite: row 0 (from 0) holds NaN or infinity"),
        ({"y": [0, 1, 0, -1, 0, 1]}, "labels out of range: -1 in row 3"),
        ({"y": [0.5, 1, 0, 1, 0, 1]}, "y must be all ints or all strings"),
        ({"y": [0, 1]}, "x, y and clients must have equally many rows, got 6, 2, 6"),
        ({"client": None}, "no 'client': the file has x, y"),
    ],
)
def test_data_that_cannot_be_learned_from(here: Path, change: dict[str, object], message: str) -> None:
    arrays = {"x": np.ones((6, 2)), "y": [0, 1, 0, 1, 0, 1], "client": list("aabbcc"), **change}
    np.savez(here / "own.npz", **{k: v for k, v in arrays.items() if v is not None})  # type: ignore[arg-type]
    refused("run", "--data", "own.npz", "--cohort", "1", message=f"own.npz: {message}")


# Runs that cannot go on


def cut_tensors(folder: Path) -> None:
    path = folder / "checkpoint" / "round-000003" / "server.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def scramble_state(folder: Path) -> None:
    (folder / "checkpoint" / "round-000003" / "state.json").write_text("garbage")


def scramble_engine(folder: Path) -> None:
    (folder / "engine.json").write_text("{")


def scramble_experiment(folder: Path) -> None:
    (folder / "experiment.toml").write_text("method = ")


def unknown_key(folder: Path) -> None:
    path = folder / "experiment.toml"
    path.write_text(path.read_text().replace("rounds", "rouns"))


def other_experiment(folder: Path) -> None:
    path = folder / "experiment.toml"
    path.write_text(path.read_text().replace("\nseed = 0", "\nseed = 1"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_tensors, "round-000003 is damaged: server.safetensors is not what was saved. Delete the folder"),
        (scramble_state, "round-000003 is damaged"),
        (scramble_engine, "engine.json is damaged"),
        (scramble_experiment, "experiment.toml is not valid TOML"),
        (unknown_key, "unknown key of an experiment 'rouns': did you mean 'rounds'?"),
        (other_experiment, "round-000003 belongs to another experiment"),
    ],
)
def test_a_damaged_or_foreign_run(
    finished: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    folder = interrupted(finished, tmp_path / "run")
    shutil.copytree(folder / "checkpoint" / "round-000003", folder / "checkpoint" / "round-000002")
    damage(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    refused("resume", str(folder), message=message)
    refused("export", str(folder), "--client", "1", "-o", str(tmp_path / "m"), message=message)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_the_advice_for_a_damaged_checkpoint_works(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / "summary.json").unlink()
    newest = folder / "checkpoint" / "round-000004"
    (newest / "server.safetensors").write_bytes(b"")
    refused("resume", str(folder), message=f"Delete the folder {newest} to continue from round-000003.")
    shutil.rmtree(newest)
    assert apiece("resume", str(folder)).code == 0
    assert (folder / "clients.csv").read_bytes() == (finished / "clients.csv").read_bytes()


def test_another_runs_checkpoints_are_refused(finished: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert apiece("run", *SMALL, "--seed", "1", "--out", str(other)).code == 0
    (other / "summary.json").unlink()
    shutil.rmtree(other / "checkpoint")
    shutil.copytree(finished / "checkpoint", other / "checkpoint")
    refused("resume", str(other), message="belongs to another experiment")


def test_a_finished_run_is_not_resumed(finished: Path) -> None:
    message = f"{finished} is finished: see it with: apiece report {finished} -o report.html"
    refused("resume", str(finished), message=message)


def test_a_folder_that_holds_something_is_not_written_to(finished: Path, tmp_path: Path) -> None:
    message = f"{finished} already holds a run: choose another folder with --out"
    refused("run", *SMALL, "--out", str(finished), message=message)
    begun = interrupted(finished, tmp_path / "begun")
    refused("run", *SMALL, "--out", str(begun), message=f"or continue it with: apiece resume {begun}")
    letters = tmp_path / "letters"
    letters.mkdir()
    (letters / "dear.txt").write_text("x")
    refused("run", *SMALL, "--out", str(letters), message="is not empty and holds no run")
    assert [path.name for path in letters.iterdir() if path.name != ".lock"] == ["dear.txt"]


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert apiece("run", *SIZES, "--rounds", "1", "--out", str(tmp_path / "run")).code == 0


def test_data_that_changed_since_the_run_began(tmp_path: Path) -> None:
    """A feature alone is enough; restored, the run goes on."""
    draw = np.random.default_rng(0)
    x, y, client = draw.normal(size=(40, 2)), np.arange(40) % 2, np.arange(40) // 10
    data, folder = tmp_path / "own.npz", tmp_path / "run"
    np.savez(data, x=x, y=y, client=client)
    options = ("--rounds", "2", "--cohort", "2", "--engine", "vectorized", "--threads", "1")
    outcome = apiece("run", "--data", str(data), *options, "--checkpoint-every", "1", "--out", str(folder))
    assert outcome.code == 0, outcome.err
    (folder / "summary.json").unlink()
    np.savez(data, x=x + (x == x.max()), y=y, client=client)
    message = (
        f"the data has changed since {folder} was begun. Restore the data of '{data}', or start a new run."
    )
    refused("resume", str(folder), message=message)
    np.savez(data, x=x, y=1 - y, client=client)
    refused("resume", str(folder), message=message)
    data.unlink()
    refused("resume", str(folder), message=f"no such file or folder: {data}")
    np.savez(data, x=x, y=y, client=client)
    assert apiece("resume", str(folder)).code == 0


# A loss that becomes NaN


def test_a_nan_stops_the_run_and_names_round_and_clients(here: Path) -> None:
    outcome = apiece("run", *SIZES, "--rounds", "4", "--set", "lr=1e20", "--model", "mlp", "--out", "run")
    assert outcome.code == 2
    assert "round 1: the update of client 1, 4, 7 is not finite" in outcome.err
    assert table(here / "run" / "cohorts.csv") == []  # a round that failed is no round
    assert "Lower the learning rate (--set lr=...), or drop such updates with --on-nan skip." in outcome.err
    assert "There was no checkpoint yet." in outcome.err


LATE = '''
from dataclasses import dataclass
import torch
from apiece import Method, Model, Recipe, Reply, sgd

@dataclass(frozen=True)
class Late(Method):
    """All updates are 1, but NaN on positive features once the ten biases have been moved twice."""
    local: Recipe = Recipe(epochs=1)
    personal: Recipe = Recipe()

    def init(self, task, params, key):
        return Model(params.zeros())

    def broadcast(self, server, round):
        return server

    def client_update(self, task, broadcast, client, data):
        late = broadcast.params["head.bias"].sum() > 15
        bad = torch.where(late & (data.all().x[0, 0] > 0), torch.nan, 1.0)
        return Reply(broadcast.params.zeros().map(lambda t: t + bad), model=broadcast.params)

    def server_update(self, task, server, update, round):
        return Model(server.params + update)

    def personalize(self, task, broadcast, client, data):
        return broadcast.params
'''


@pytest.fixture
def late(here: Path) -> tuple[str, ...]:
    """In the third round the two clients whose features are positive fail."""
    (here / "late.py").write_text(LATE)
    x = np.repeat([1.0, -1.0, 1.0, -1.0], 4)[:, None] * np.ones((16, 3))
    np.savez(here / "own.npz", x=x, y=np.arange(16) % 10, client=np.repeat(list("abcd"), 4))
    data = ("--data", "own.npz", "--model", "mlp(hidden=())", "--unseen", "0", "--test", "0.01")
    sizes = ("--rounds", "4", "--cohort", "4", "--checkpoint-every", "1", "--engine", "vectorized")
    return ("run", "--method", "late.py:Late", *data, *sizes, "--threads", "1", "--out", "run")


def test_a_late_nan_leaves_the_last_good_checkpoint(here: Path, late: tuple[str, ...]) -> None:
    outcome = apiece(*late)
    assert outcome.code == 2
    assert "round 3: the update of client 0, 2 is not finite" in outcome.err
    assert "The last good checkpoint stays in run/checkpoint." in outcome.err
    assert sorted(p.name for p in (here / "run" / "checkpoint").glob("round-*")) == [
        "round-000001",
        "round-000002",
    ]
    assert apiece("export", "run", "--client", "a", "-o", "a.safetensors").code == 0


def test_such_updates_may_be_skipped_and_are_counted(here: Path, late: tuple[str, ...]) -> None:
    outcome = apiece(*late, "--on-nan", "skip")
    assert outcome.code == 0, outcome.err
    assert "skipped: 4 updates that were not finite" in outcome.out
    rows = table(here / "run" / "rounds.csv")[1:]
    assert [(row["replies"], row["skipped"]) for row in rows] == [
        ("4", "0"),
        ("4", "0"),
        ("2", "2"),
        ("2", "2"),
    ]
    assert strict((here / "run" / "summary.json").read_text())["skipped"] == 4
    assert not any("nan" in path.read_text() for path in (here / "run").glob("checkpoint/*/state.json"))


def test_a_round_without_any_finite_update_changes_nothing(here: Path) -> None:
    outcome = apiece(
        *("run", *SIZES, "--rounds", "2", "--evaluate-every", "1", "--model", "mlp", "--set", "lr=1e20"),
        *("--set", "personal.lr=0.1", "--on-nan", "skip", "--out", "run", "--json"),
    )
    assert outcome.code == 0, outcome.err
    assert outcome.json["skipped"] == 6
    rows = table(here / "run" / "rounds.csv")
    assert len({row["seen_initial_mean"] for row in rows}) == 1


# Real processes


def shell(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    command = [sys.executable, "-c", "from apiece.cli import main; main()", *arguments]
    return subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_a_checkpoint(run: Path, process: subprocess.Popen[str]) -> None:
    """Any: the first is gone again within a few rounds."""
    end = time.monotonic() + 120
    while not any(run.glob("checkpoint/round-*")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)


def test_exit_code_and_streams_of_a_real_process(tmp_path: Path) -> None:
    process = shell("run", "--method", "fedavgg", cwd=tmp_path)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    assert err.startswith("error: unknown method 'fedavgg': did you mean 'fedavg'? known: ")
    assert len(err.splitlines()) == 1  # however long: a program may read it by lines


def test_a_run_in_progress_is_locked_and_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    process = shell("run", *SMALL, "--rounds", "100000", "--out", "run", cwd=tmp_path)
    try:
        wait_for_a_checkpoint(tmp_path / "run", process)
        message = "is being run by another process: wait for it, or stop it"
        refused("resume", str(tmp_path / "run"), message=message)
        assert apiece("export", str(tmp_path / "run"), "--client", "1", "-o", str(tmp_path / "m")).code in (
            0,
            2,
        )
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert (process.returncode, out) == (130, "")
    assert err.endswith("interrupted; go on with: apiece resume run\n")
    assert "Traceback" not in err


def test_a_lock_ends_with_its_block(tmp_path: Path) -> None:
    for _ in range(2):
        with locked(tmp_path):
            refused("run", *SMALL, "--out", str(tmp_path), message="is being run by another process")


def test_warnings_and_the_bar_go_to_stderr(tmp_path: Path) -> None:
    """A client of one example is kept and counted."""
    rows = ["client,label,a"] + [f"{i // 8},{i % 2},{i}" for i in range(24)] + ["9,0,1"]
    (tmp_path / "own.csv").write_text("\n".join(rows))
    options = ("--rounds", "1", "--cohort", "2", "--engine", "vectorized", "--threads", "1", "--json")
    process = shell("run", "--data", "own.csv", *options, "--out", "run", cwd=tmp_path)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert strict(out)["seen"]["clients"] + strict(out)["unseen"]["clients"] == 4
    told = " ".join(err.split())
    assert "1 have one training example, 1 have no test example: all are kept" in told
    assert "\x1b" not in out + err
