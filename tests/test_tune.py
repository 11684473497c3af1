"""Tuning, with the real optuna, on trainings of a few steps."""

from __future__ import annotations

import ast
import json
import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import apiece
from apiece import ApieceError, Experiment, catalog, random, tune
from apiece.data import Examples, federate, load
from apiece.experiment import read
from apiece.method import Span
from apiece.methods.fedec import FedEC
from apiece.prepare import load_data, prepare
from apiece.session import carry_out
from apiece.settings import nested
from apiece.wrappers.personalized_fedavg import PersonalizedFedAvg
from tests.command import apiece as command

# 6 clients, of whom 5 are seen; a step per client and round.
SMALL: dict[str, Any] = {
    "clients": 6,
    "cohort": 2,
    "rounds": 2,
    "model": "logistic",
    "engine": "vectorized",
    "threads": 1,
}
BASE = Experiment(**SMALL, settings={"batch_size": 0})
FLAGS = [text for key, value in SMALL.items() for text in (f"--{key}", str(value))]


def same(found: tune.Found) -> Any:
    """All but the times."""
    return found._replace(trials=[trial._replace(seconds=0.0) for trial in found.trials])


def logged(log: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def count_runs(monkeypatch: pytest.MonkeyPatch) -> list[Experiment]:
    """The trainings that take place from now on."""
    found: list[Experiment] = []

    def noted(experiment: Experiment, *rest: Any, **more: Any) -> Any:
        found.append(experiment)
        return prepare(experiment, *rest, **more)

    monkeypatch.setattr(tune, "prepare", noted)
    return found


# The split


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(any),
    st.floats(0.01, 0.99),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([0.0, 0.5]),
    st.integers(0, 2**32),
)
def test_validation_shares_out_each_seen_clients_training_rows(
    sizes: list[int], share: float, proxy: float, unseen: float, key: int
) -> None:
    """Row i holds i + 1, so that rows can be told apart after they were put together anew."""
    assume(round(unseen * len(sizes)) < len(sizes))
    total = sum(sizes)
    x = np.arange(1, total + 1, dtype=np.float32)[:, None]
    parts = np.split(np.arange(total), np.cumsum(sizes)[:-1])
    examples = Examples(x, np.arange(total, dtype=np.int64) % 3, 3, ("a", "b", "c"))
    names = [f"c{i}" for i in range(len(sizes))]
    whole = federate(examples, parts, names, key, 0.25, unseen, proxy)
    data = whole.validation(share, key)

    def rows(some: Any) -> list[int]:
        return [int(data.x[i, 0]) - 1 for i in some]

    assert data.names == tuple(whole.names[i] for i in whole.seen_ids)
    assert data.seen.all()
    for client, old in enumerate(whole.seen_ids):
        train, test = rows(data.train[client]), rows(data.test[client])
        assert sorted(train + test) == whole.train[old].tolist()
        n = len(whole.train[old])
        assert len(test) == min(round(share * n), max(n - 1, 0))
    held = [row for old in whole.seen_ids for row in whole.train[old]]
    assert sorted(rows(range(data.padding))) == sorted([*held, *whole.proxy])
    assert data.y[:-1].tolist() == [row % 3 for row in rows(range(data.padding))]
    assert (data.x[-1], data.y[-1]) == (0, 0)
    assert rows(data.proxy) == whole.proxy.tolist()

    again = whole.validation(share, key)
    assert again.test.rows.tolist() == data.test.rows.tolist()


def test_the_split_is_by_its_key() -> None:
    whole = load_data(BASE)
    splits = {tuple(whole.validation(0.25, key).test.rows.tolist()) for key in range(4)}
    assert len(splits) == 4


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1])
def test_a_share_of_nothing_or_all_is_refused(share: float) -> None:
    with pytest.raises(ApieceError, match="validation share"):
        tune.search(BASE, 1, validation=share)


def test_clients_too_small_to_validate_on_are_told_of() -> None:
    with pytest.raises(ApieceError, match="leaves no client an example to validate on"):
        tune.search(BASE, 1, validation=0.001)


def test_test_examples_are_never_read(tmp_path: Path) -> None:
    """With NaN in every test row, and in all rows of unseen clients, the trials are the same bit for bit."""
    clean = load("digits", clients=6, key=0)
    data = load_data(BASE, clean)
    spoilt = clean.x.copy()
    spoilt[data.test.rows] = np.nan
    for client in np.flatnonzero(~data.seen):
        spoilt[data.train[client]] = np.nan
    found = [
        tune.search(BASE, 2, log=tmp_path / name, data=replace(clean, x=x))
        for name, x in (("clean", clean.x), ("spoilt", spoilt))
    ]
    assert same(found[0]) == same(found[1])
    assert logged(tmp_path / "clean") == logged(tmp_path / "spoilt")
    assert all(0.1 < trial.score < 1 for trial in found[0].trials)


def test_the_split_depends_on_the_partition_seed_alone(tmp_path: Path) -> None:
    seen = []
    for experiment in (BASE, replace(BASE, seed=5), replace(BASE, partition_seed=1)):
        bench = tune._Bench(experiment, None, 0.25, None)
        seen.append(bench._data.test.rows.tolist())
    assert seen[0] == seen[1] != seen[2]


# Trials


def test_the_first_trial_is_the_defaults_scored_as_a_run_would_be() -> None:
    """On the split data, seen clients, mean over clients; and over seeds, if there are more."""
    data = load_data(BASE).validation(0.25, random.fold(0, "partition"))
    scores: dict[str, list[float]] = {"initial": [], "personalized": []}
    for seed in (0, 3):
        session = prepare(replace(BASE, seed=seed), None, None, dealt=data)
        group = carry_out(session, lambda done, groups: None)[0].summary["seen"]
        for score, values in scores.items():
            values.append(group[score])
    for score, values in scores.items():
        found = tune.search(BASE, 1, [0, 3], score=score)
        assert found.trials[0].settings == found.settings == {}
        assert found.score == pytest.approx(np.mean(values), abs=1e-7)
        assert found.experiment == BASE


def test_defaults_outside_the_space_come_first_all_the_same() -> None:
    found = tune.search(BASE, 3, space={"lr": Span(0.2, 0.3)})
    assert found.trials[0] == tune.search(BASE, 1).trials[0]._replace(seconds=found.trials[0].seconds)
    assert all(0.2 <= trial.settings["local.lr"] <= 0.3 for trial in found.trials[1:])


def test_the_sampler_learns_from_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(optuna.Study, "add_trial", lambda study, trial: told.append(trial))
    found = tune.search(BASE, 1, space={"lr": Span(0.01, 0.5), "optimizer": ("adam", "sgd")})
    assert [(trial.params, trial.value) for trial in told] == [
        ({"local.lr": 0.1, "local.optimizer": 1}, found.score)
    ]


def test_what_a_run_does_besides_a_trial_does_not() -> None:
    """It scores no other dataset, and has no folder for a mapped store."""
    more = replace(BASE, also=("digits[0-4]",), store="mapped")
    found = tune.search(more, 1)
    assert found.score == tune.search(BASE, 1).score
    assert found.experiment == more


def test_defaults_that_a_setting_would_undo_stay() -> None:
    """Reptile takes steps; to name its epochs would switch them off."""
    reptile = replace(BASE, method="reptile", settings={"steps": 2})
    found = tune.search(reptile, 1, space={"local.epochs": (1, 2)})
    assert same(found) == same(tune.search(reptile, 1))


def test_the_best_trial_is_found_and_can_be_run_again(whole: tuple[tune.Found, Path]) -> None:
    found, _ = whole
    assert [trial.number for trial in found.trials] == list(range(7))
    best = max(found.trials, key=lambda trial: trial.score)
    assert (found.settings, found.score) == (best.settings, best.score)
    assert found.score > found.trials[0].score
    flags = tune.flags(found.settings)
    assert nested(flags) == {"local": {"lr": found.settings["local.lr"]}}
    assert found.experiment.settings == {"batch_size": 0, **nested(flags)}
    assert tune.search(found.experiment, 1, [0, 1]).score == found.score


def test_values_have_three_digits_and_lie_in_their_ranges() -> None:
    space = {"lr": Span(0.01234, 0.5678), "epochs": Span(1, 4), "optimizer": ("sgd", "adam")}
    found = tune.search(replace(BASE, rounds=1), 8, space=space)
    rates = {trial.settings["local.lr"] for trial in found.trials[1:]}
    assert all(
        0.01234 <= rate <= 0.5678 and float(f"{rate:.3g}") == rate for rate in rates - {0.01234, 0.5678}
    )
    assert len(rates) == 7
    epochs = [trial.settings["local.epochs"] for trial in found.trials[1:]]
    assert all(type(n) is int and 1 <= n <= 4 for n in epochs)
    assert {trial.settings["local.optimizer"] for trial in found.trials[1:]} == {"sgd", "adam"}


def test_the_sampler_is_seeded_by_the_first_seed_alone(whole: tuple[tune.Found, Path]) -> None:
    """So that methods with equal ranges try equal values. That the rest is fixed: see the log cut to 0."""
    values = [trial.settings for trial in whole[0].trials]
    assert [t.settings for t in tune.search(replace(BASE, method="reptile"), 3).trials] == values[:3]
    assert tune.search(BASE, 2, [1]).trials[1].settings != values[1]


def test_without_anything_to_search_the_defaults_are_all() -> None:
    assert len(tune.search(BASE, 5, space={}).trials) == 1


# The log


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[tune.Found, Path]:
    log = tmp_path_factory.mktemp("tune") / "trials.jsonl"
    return tune.search(BASE, 7, [0, 1], log=log), log


def test_the_log_tells_every_training(whole: tuple[tune.Found, Path]) -> None:
    found, log = whole
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["trial"], line["seed"]) for line in lines] == [(n, s) for n in range(7) for s in (0, 1)]
    assert len({line["id"] for line in lines}) == 14
    for trial in found.trials:
        mine = [line for line in lines if line["trial"] == trial.number]
        assert all(line["method"] == "fedavg" and line["settings"] == trial.settings for line in mine)
        assert trial.score == pytest.approx(np.mean([line["personalized"] for line in mine]))
        assert trial.seconds == pytest.approx(sum(line["seconds"] for line in mine))
        assert not any(line["diverged"] for line in mine)


@pytest.mark.parametrize(("lines", "more"), [(0, 0), (7, 20), (13, 150), (14, 0)])
def test_a_search_that_was_cut_off_ends_as_if_it_had_not_been(
    whole: tuple[tune.Found, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: int, more: int
) -> None:
    """After some lines, and `more` bytes of the next."""
    found, log = whole
    text = log.read_text().splitlines(keepends=True)
    left = tmp_path / "trials.jsonl"
    left.write_text("".join(text[:lines]) + "".join(text[lines:])[:more])
    runs = count_runs(monkeypatch)
    assert same(tune.search(BASE, 7, [0, 1], log=left)) == same(found)
    assert len(runs) == 14 - lines
    runs.clear()
    assert same(tune.search(BASE, 7, [0, 1], log=left)) == same(found)
    assert runs == []


def test_more_trials_begin_with_those_that_are_there(
    whole: tuple[tune.Found, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, log = whole
    left = tmp_path / "trials.jsonl"
    left.write_bytes(log.read_bytes())
    runs = count_runs(monkeypatch)
    longer = tune.search(BASE, 8, [0, 1], log=left)
    assert len(runs) == 2
    assert same(longer).trials[:7] == same(found).trials
    # Both scores are in the log: another search may want the other one.
    assert tune.search(BASE, 1, [0, 1], log=left, score="initial").score < found.trials[0].score
    assert len(runs) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"rounds": 1},
        {"partition_seed": 1},
        {"settings": {"batch_size": 0, "epochs": 2}},
        {"data": "digits[0-8]"},
    ],
)
def test_another_experiments_trials_are_not_taken(
    whole: tuple[tune.Found, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    log = tmp_path / "trials.jsonl"
    log.write_bytes(whole[1].read_bytes())
    runs = count_runs(monkeypatch)
    tune.search(replace(BASE, **change), 1, [0], log=log)
    assert len(runs) == 1
    tune.search(BASE, 1, [0], log=log, validation=0.5)
    assert len(runs) == 2


def test_the_engine_of_the_first_trial_is_that_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A measurement might choose another one after an interruption."""
    log = tmp_path / "trials.jsonl"
    auto = replace(BASE, engine="auto")
    runs = count_runs(monkeypatch)
    tune.search(auto, 2, log=log)
    (first, _) = logged(log)
    assert [run.engine for run in runs] == ["auto", first["engine"]]
    log.write_text(log.read_text().replace(f'"{first["engine"]}"', '"sequential"'))
    tune.search(auto, 3, log=log)
    assert runs[-1].engine == "sequential"


# Divergence


def test_a_diverged_trial_is_the_worst_and_no_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []
    tell = optuna.Study.tell

    def noted(study: optuna.Study, trial: Any, value: Any) -> Any:
        told.append(value)
        return tell(study, trial, value)

    monkeypatch.setattr(optuna.Study, "tell", noted)
    log = tmp_path / "trials.jsonl"
    deep = replace(BASE, model="mlp(hidden=(8,))")
    found = tune.search(deep, 4, [0, 1], {"lr": Span(1e20, 1e30)}, log)
    assert [trial.diverged for trial in found.trials] == [False, True, True, True]
    assert told == [-math.inf] * 3
    assert (found.settings, found.score) == ({}, found.trials[0].score)
    assert found.experiment == deep
    lines = logged(log)
    assert [line["trial"] for line in lines] == [
        0,
        0,
        1,
        2,
        3,
    ]  # no further seed after the first that diverges
    assert lines[-1] | {"diverged": True, "initial": None, "personalized": None} == lines[-1]
    assert (
        same(tune.search(deep, 4, [0, 1], {"lr": Span(1e20, 1e30)}, log)).trials[:1] == same(found).trials[:1]
    )


def test_one_lost_model_is_a_diverged_trial() -> None:
    """A run's means leave out a client whose model is not finite: here one of five, whose inputs are huge."""
    local = replace(BASE, method="local", settings={"personal": {"batch_size": 0, "epochs": 2}})
    huge = load("digits", clients=6, key=0)
    data = load_data(local, huge)
    huge.x[data.train[data.seen_ids[0]]] *= 1e38
    found = tune.search(local, 1, data=huge)
    assert found.trials[0].diverged
    assert math.isnan(found.score)
    both, one, other = (
        tune.search(local, 1, seeds, data=huge, score="initial") for seeds in ([0, 1], [0], [1])
    )
    assert both.score == pytest.approx((one.score + other.score) / 2)
    assert one.score != other.score


# What is searched


def test_flags_are_read() -> None:
    space = tune.parse(["lr=0.01..0.5", " mu = 1 .. 10", "epochs=1,2, 5", "constraint=kl,l2", "inner.x=true"])
    assert space == {
        "lr": Span(0.01, 0.5),
        "mu": Span(1, 10),
        "epochs": (1, 2, 5),
        "constraint": ("kl", "l2"),
        "inner.x": (True,),
    }


@pytest.mark.parametrize(
    "flag", ["lr", "lr=", "=1,2", "lr=1,,2", "lr=0.1..", "lr=..1", "lr=1..2..3", "lr=0.01-1", ""]
)
def test_flags_that_are_none_are_refused(flag: str) -> None:
    with pytest.raises(ApieceError, match=r"--search"):
        tune.parse([flag])


@pytest.mark.parametrize(
    ("space", "told"),
    [
        ({"lrr": (1,)}, "did you mean"),
        ({"local.lr.x": (1,)}, "unknown setting"),
        ({"local": (1,)}, "is a table"),
        ({"lr": ()}, "no value"),
        ({"lr": Span(0.5, 0.1)}, "lower one first"),
        ({"lr": Span(0.0, 0.1)}, "positive"),
        ({"lr": Span(0.1, math.inf)}, "positive"),
        ({"lr": ("fast",)}, "must be of type float"),
        ({"lr": Span("a", "b")}, "two positive numbers"),  # type: ignore[arg-type]
        ({"epochs": Span(0.5, 3)}, "must be of type int"),
        ({"optimizer": Span(1, 2)}, "give the values"),
        ({"optimizer": ("sgd", "none")}, "none"),
    ],
)
def test_mistakes_are_told_before_the_first_trial(space: Any, told: str) -> None:
    with pytest.raises(ApieceError, match=told):
        tune.space_of(BASE, space)
    with pytest.raises(ApieceError, match=told):
        tune.search(BASE, 1, space=space)


def test_a_wrappers_space_is_its_own_and_the_inner_methods() -> None:
    def space(method: str, over: tune.Space | None = None) -> dict[str, Any]:
        return tune.space_of(Experiment(method=method), over)

    lr = Span(0.01, 0.5)
    alpha = catalog.lookup("elastic").search["alpha"]
    assert space("fedavg") == {"local.lr": lr}
    assert space("guarded(fedavg)") == {"inner.local.lr": lr}
    assert space("elastic(fedavg)") == {"alpha": alpha, "inner.local.lr": lr}
    assert space("guarded(elastic(fedavg))") == {"inner.alpha": alpha, "inner.inner.local.lr": lr}
    assert space("stages(fedavg,reptile)") == {"first.local.lr": lr, "then.local.lr": lr}
    # A method that is made of others, but not of those it is given, says itself what matters.
    assert space("personalized_fedavg") == catalog.lookup("personalized_fedavg").search
    assert "first.alpha" not in tune._composed(PersonalizedFedAvg(first=FedEC()))
    over = {"inner.lr": Span(1.0, 2.0), "constraint": ("kl", "l2")}
    assert space("elastic(fedavg)", over) == {
        "alpha": alpha,
        "inner.local.lr": Span(1.0, 2.0),
        "constraint": ("kl", "l2"),
    }


@pytest.mark.parametrize("name", catalog.names())
def test_every_method_can_be_searched(name: str) -> None:
    assert tune.space_of(Experiment(method=catalog.example(name)))


@pytest.mark.parametrize(
    "given",
    [{"lr": 0.3}, {"local": {"lr": 0.3}}, {"local": {"lr": 0.2}, "lr": 0.3}, {"lr": 0.3, "local": {}}],
)
def test_a_trials_value_stands_whatever_was_set_and_however(given: dict[str, Any]) -> None:
    kept = {"epochs": 3, **given}
    changed = tune.with_settings(replace(BASE, settings=kept), {"local.lr": 0.05}).build_method()
    assert (changed.local.lr, changed.local.epochs, changed.personal.lr) == (0.05, 3, 0.05)
    wrapped = Experiment(method="guarded(fedavg)", settings={"inner": kept})
    assert tune.with_settings(wrapped, {"inner.local.lr": 0.05}).build_method().local.lr == 0.05
    assert kept == {"epochs": 3, **given}


# The command


def test_the_command_prints_and_writes_what_was_found(tmp_path: Path) -> None:
    out = tmp_path / "tune"
    words = ["tune", *FLAGS, "--methods", "fedavg,guarded(fedavg)", "--trials", "3", "--out", str(out)]
    words += ["--search", "fedavg.epochs=1,2", "--set", "fedavg.batch_size=0"]
    words += ["--set", "guarded(fedavg).inner.batch_size=0"]
    outcome = command(*words)
    assert outcome.code == 0, outcome.err
    assert {path.name for path in out.iterdir()} == {
        "trials.jsonl",
        "fedavg.toml",
        "guarded-fedavg.toml",
        ".lock",
    }
    again = command(*words, "--json")
    best, guarded = again.json
    assert outcome.out.count("defaults") >= 2
    assert "".join(f" --set {flag}" for flag in tune.flags(best["settings"])) in outcome.out
    assert f"apiece run {out / 'fedavg.toml'}" in outcome.out
    scores = [trial["score"] for trial in best["trials"]]
    assert scores == sorted(scores, reverse=True)
    assert (best["method"], best["score"], best["file"]) == ("fedavg", scores[0], str(out / "fedavg.toml"))
    assert {key for trial in best["trials"] for key in trial["settings"]} == {"local.lr", "local.epochs"}
    assert {key for trial in guarded["trials"] for key in trial["settings"]} == {"inner.local.lr"}
    assert len(logged(out / "trials.jsonl")) == 6

    written = read(out / "fedavg.toml")
    assert written == tune.with_settings(BASE, best["settings"])
    assert command("run", str(out / "fedavg.toml"), "--out", str(tmp_path / "run")).code == 0


def test_several_processes_find_the_same(tmp_path: Path) -> None:
    words = ["tune", *FLAGS, "--methods", "fedavg,local", "--trials", "2", "--set", "batch_size=0", "--json"]
    one, two = (command(*words, "--jobs", n, "--out", str(tmp_path / n)) for n in ("1", "2"))
    assert two.code == 0, two.err

    def told(tables: Any) -> Any:
        trials = [{**trial, "seconds": 0.0} for table in tables for trial in table["trials"]]
        return [(table["method"], table["settings"]) for table in tables], trials

    assert told(one.json) == told(two.json)
    first, second = (logged(tmp_path / n / "trials.jsonl") for n in ("1", "2"))
    assert sorted(first, key=str) == sorted(second, key=str)


def test_a_mistake_in_another_process_is_told_as_in_this_one() -> None:
    with pytest.raises(ApieceError, match="a cohort of 50"):
        tune.search_all({"bad": partial(tune.search, replace(BASE, cohort=50), 1)}, 2)


def test_a_method_all_of_whose_trials_diverged_gets_no_file(tmp_path: Path) -> None:
    words = ["tune", *FLAGS, "--model", "mlp(hidden=(8,))", "--methods", "fedavg", "--trials", "2"]
    words += ["--set", "lr=1e30", "--search", "lr=1e20..1e30", "--out", str(tmp_path)]
    outcome = command(*words)
    assert outcome.code == 0, outcome.err
    assert "every trial diverged" in outcome.out
    assert not (tmp_path / "fedavg.toml").exists()
    (table,) = command(*words, "--json").json
    assert (table["score"], table["file"]) == (None, None)
    assert all(trial["diverged"] and trial["score"] is None for trial in table["trials"])


def test_methods_are_tuned_on_equal_data(tmp_path: Path) -> None:
    """One of them needs a proxy set: it is taken from the clients of all."""
    words = ["tune", *FLAGS, "--rounds", "1", "--trials", "1", "--out", str(tmp_path)]
    words += ["--methods", "fedavg,fedpa", "--set", "fedpa.aggregator.epochs=1", "--set", "epochs=1"]
    assert command(*words).code == 0
    assert read(tmp_path / "fedavg.toml").proxy == read(tmp_path / "fedpa.toml").proxy > 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--trials", "0"], "at least 1 trial"),
        (["--jobs", "0"], "at least 1 job"),
        (["--score", "best"], "unknown score"),
        (["--validation", "1"], "validation share"),
        (["--search", "lr"], "--search takes"),
        (["--search", "fedavg.mu=1,2"], "unknown setting"),
        (["--methods", "fedavg,"], "--methods takes"),
        (["--seeds", "x"], "--seeds takes"),
    ],
)
def test_mistakes_on_the_command_line(words: list[str], told: str, tmp_path: Path) -> None:
    outcome = command("tune", *FLAGS, "--methods", "fedavg", "--out", str(tmp_path / "out"), *words)
    assert outcome.code == 2
    assert told in " ".join(outcome.err.split())


def test_a_runs_folder_is_left_alone(finished: Path) -> None:
    before = sorted(finished.rglob("*"))
    outcome = command("tune", *FLAGS, "--out", str(finished))
    assert outcome.code == 2
    assert "holds a run" in outcome.err
    assert sorted(finished.rglob("*")) == before


def test_without_optuna_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    outcome = command("tune", *FLAGS, "--out", str(tmp_path))
    assert outcome.code == 2
    assert "pip install apiece[tune]" in outcome.err


def test_only_tune_knows_optuna() -> None:
    source = Path(apiece.__file__).parent
    for path in source.rglob("*.py"):
        names = [
            alias.name if isinstance(node, ast.Import) else node.module or ""
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        ]
        assert (path.name == "tune.py") == any(name.split(".")[0] == "optuna" for name in names), path


def test_the_help_fits_a_terminal() -> None:
    outcome = command("tune", "--help")
    assert outcome.code == 0
    assert max(map(len, outcome.out.splitlines())) <= 80
    assert "apiece tune " in outcome.out.split("Example")[1]


def test_a_trial_of_a_file_that_has_changed_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, log = tmp_path / "mine.py", tmp_path / "trials.jsonl"
    text = "from torch import nn\n\n\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, {}))\n"
    ran = count_runs(monkeypatch)
    for written, count in (("10", 1), (" 10 ", 1), ("5 + 5", 2)):
        file.write_text(text.format(written))
        tune.search(replace(BASE, model=f"{file}:net"), 1, [0], {}, log)
        assert len(ran) == count
