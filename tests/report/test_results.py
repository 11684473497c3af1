"""Run folders read back and put together: every expected number is worked out in the test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apiece.errors import ApieceError
from apiece.report import results
from apiece.report.results import Client, Count, Curve, Label, Point, Run, Stat

Fake = Callable[..., Path]

CLIENTS = [
    [0, 1, "test", "accuracy", 20, 4, 0.5, 0.75],
    [0, 1, "test", "loss", 20, 4, 1.0, 0.8],
    [1, 1, "test", "accuracy", 20, 4, 0.75, 0.5],
    [2, 0, "test", "accuracy", 20, 0, "nan", "nan"],
    [0, 1, "shifted", "accuracy", 20, 4, 0.1, 0.1],
]


def test_load_reads_the_files(fake: Fake) -> None:
    """The headline metric on the own data only; empty cells and NaN are None."""
    folder = fake(
        "run",
        seed=7,
        settings={"lr": 0.1},
        rounds=[{"round": 0, "seen_initial_mean": 0.1}, {"round": 1, "bytes_up": 10}],
        clients=CLIENTS,
        partition=[[0, "anna", 1, "train", 3, 12]],
        labels=[[1, 3, 12]],
        adaptation=[["epochs", 0, 0.5], ["examples", 2, "nan"]],
    )
    run = results.load(folder)
    assert (run.method, run.seed, run.metric, run.finished) == ("fedavg", 7, "accuracy", True)
    assert run.experiment["settings"] == {"lr": 0.1}
    assert [r["round"] for r in run.rounds] == [0, 1]
    assert [r["seen_initial_mean"] for r in run.rounds] == [0.1, None]
    assert run.clients == (
        Client(0, True, 0.5, 0.75),
        Client(1, True, 0.75, 0.5),
        Client(2, False, None, None),
    )
    assert [client.harmed for client in run.clients] == [False, True, False]
    assert run.partition == (Count(0, "anna", True, "train", 3, 12),)
    assert run.labels == (Label(1, 3, 12),)
    assert run.adaptation == (Point("epochs", 0, 0.5), Point("examples", 2, None))


def test_clients_of_other_data_are_left_out_wherever_they_stand(fake: Fake) -> None:
    run = results.load(fake("run", clients=[CLIENTS[-1], *CLIENTS[:-1]]))
    assert [client.initial for client in run.clients] == [0.5, 0.75, None]


def test_rounds_may_have_columns_of_other_data(fake: Fake) -> None:
    name = "digits[0-4] seen_initial_mean"
    runs = [results.load(fake("run", rounds=[{"round": 0, "seen_initial_mean": 0.1, name: 0.7}]))]
    assert results.curve(runs, "seen_initial_mean").means == (0.1,)
    assert results.curve(runs, name).means == (0.7,)


def test_a_folder_without_an_experiment_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ApieceError, match=r"nothing.*is no run folder"):
        results.load(tmp_path / "nothing")


def test_a_broken_file_is_named_with_its_line(fake: Fake) -> None:
    folder = fake("run", clients=[[0, 1, "test", "accuracy", 20, 4, "high", 0.5]])
    with pytest.raises(ApieceError, match=r"clients\.csv, line 2: .*high"):
        results.load(folder)


@pytest.mark.parametrize(("name", "text"), [("summary.json", "{"), ("experiment.toml", "method =")])
def test_a_broken_description_is_named(fake: Fake, name: str, text: str) -> None:
    folder = fake("run")
    (folder / name).write_text(text, encoding="utf-8")
    with pytest.raises(ApieceError, match=name):
        results.load(folder)


def test_a_half_written_last_line_is_not_read(fake: Fake) -> None:
    folder = fake("run", finished=False, rounds=[{"round": 0, "bytes_up": 5}])
    with (folder / "rounds.csv").open("a", encoding="utf-8") as file:
        file.write("1,10,0,12")
    assert [r["bytes_up"] for r in results.load(folder).rounds] == [5]


def test_an_unfinished_run_has_no_clients_and_no_summary(fake: Fake) -> None:
    run = results.load(fake("run", finished=False))
    assert (run.finished, run.summary, run.clients, run.metric) == (False, None, (), "accuracy")


def test_table_puts_seeds_together(fake: Fake) -> None:
    """Personalized 0.90, 0.92, 0.94: mean 0.92, sample variance (4 + 0 + 4)e-4 / 2, so std 0.02.

    Initial 0.70, 0.70, 0.76: mean 0.72, variance (4 + 4 + 16)e-4 / 2 = 12e-4. Bytes 1000, 2000, 3000 and
    twice that down: means 2000 and 4000, deviations 1000 and 2000. Seconds 10, 10, 13: mean 11, variance 3.
    """
    numbers = [(0.70, 0.90, 1000, 10.0), (0.70, 0.92, 2000, 10.0), (0.76, 0.94, 3000, 13.0)]
    runs = [
        results.load(fake(f"run{seed}", seed=seed, seen=(a, b, 0.5, 0.1), bytes_up=up, seconds=seconds))
        for seed, (a, b, up, seconds) in enumerate(numbers)
    ]
    (row,) = results.table(runs)
    assert (row.label, row.method, row.seeds, row.unfinished) == ("fedavg", "fedavg", (0, 1, 2), 0)
    assert row.seen.personalized == pytest.approx((0.92, 0.02))
    assert row.seen.initial == pytest.approx((0.72, 12e-4**0.5))
    assert row.seen.worst10 == pytest.approx((0.5, 0.0))
    assert row.seen.harmed == pytest.approx((0.1, 0.0))
    assert row.bytes_up == pytest.approx((2000, 1000))
    assert row.bytes_down == pytest.approx((4000, 2000))
    assert row.seconds == pytest.approx((11, 3**0.5))
    assert row.unseen == results.Scores(*[Stat(None, None)] * 4)


def test_one_seed_has_no_deviation(fake: Fake) -> None:
    (row,) = results.table([results.load(fake("run", unseen=(0.4, 0.6)))])
    assert row.unseen.personalized == Stat(0.6, None)


def test_unfinished_runs_are_counted_not_averaged(fake: Fake) -> None:
    done = results.load(fake("a", seed=0, seen=(0.5, 0.8)))
    going = results.load(fake("b", seed=1, finished=False))
    (row,) = results.table([done, going])
    assert (row.seeds, row.unfinished, row.seen.personalized) == ((0,), 1, Stat(0.8, None))


def test_a_client_group_that_scored_nan_in_a_run_is_left_out_of_its_mean(fake: Fake) -> None:
    runs = [
        results.load(fake("a", seed=0, unseen=(0.5, 0.8))),
        results.load(fake("b", seed=1, unseen=(float("nan"), float("nan")))),
    ]
    assert results.table(runs)[0].unseen.personalized == Stat(0.8, None)


def test_labels_say_what_tells_experiments_of_one_method_apart(fake: Fake) -> None:
    runs = [
        results.load(fake("a", settings={"lr": 0.1, "epochs": 1})),
        results.load(fake("b", settings={"lr": 0.2, "epochs": 1})),
        results.load(fake("c", method="reptile", settings={"lr": 0.2})),
        results.load(fake("d", seed=1, settings={"lr": 0.2, "epochs": 1})),
    ]
    rows = results.table(runs)
    assert [(row.label, row.seeds) for row in rows] == [
        ("fedavg (lr=0.1)", (0,)),
        ("fedavg (lr=0.2)", (0, 1)),
        ("reptile", (0,)),
    ]


def described(**experiment: object) -> Run:
    """A run of which nothing is known but its experiment."""
    return Run(Path("run"), "", {"method": "fedavg", **experiment}, (), (), (), (), (), None, "accuracy")


def labels(*experiments: dict[str, object]) -> list[str]:
    return [group.label for group in results.groups([described(**e) for e in experiments])]


def test_labels_say_the_data_where_there_are_several() -> None:
    """Which other data are scored and which run was the start follows from that."""
    first = {"data": "a", "also": ["b"], "start": "", "prior": ""}
    then = {"data": "b", "also": ["a"], "start": "first", "prior": "first"}
    assert labels(first, then, then | {"method": "reptile"}) == [
        "fedavg (data=a)",
        "fedavg (data=b)",
        "reptile (data=b)",
    ]


def test_labels_say_what_follows_from_the_data_only_if_it_is_needed() -> None:
    """The start first, which is enough for the first three; then the prior; then what else is scored."""
    first = {"data": "a", "also": ["b", "c"], "start": "", "prior": ""}
    again = first | {"start": "second", "prior": "first"}
    assert labels(first, again) == ["fedavg (start=–)", "fedavg (start=second)"]
    other = again | {"prior": "second"}
    assert labels(again, other) == ["fedavg (prior=first)", "fedavg (prior=second)"]
    assert labels(first, again, other) == [
        "fedavg (start=–, prior=–)",
        "fedavg (start=second, prior=first)",
        "fedavg (start=second, prior=second)",
    ]
    assert labels(first, first | {"also": []}) == ["fedavg (also=b and c)", "fedavg (also=–)"]


def test_runs_that_go_on_from_those_of_their_own_seed_are_put_together() -> None:
    """Of seeds 0, 1 and 10; not one that goes on from another's, nor one whose start is not of a seed."""
    starts = [(0, "x/first-s0"), (1, "x/first-s1"), (10, "x/first-s10"), (2, "x/first-s20"), (3, "x/first")]
    runs = [described(seed=seed, start=start, prior=start, data="b") for seed, start in starts]
    assert [[run.seed for run in group.runs] for group in results.groups(runs)] == [[0, 1, 10], [2], [3]]


@pytest.mark.parametrize(
    ("methods", "expected"),
    [
        (["/x/own.py:Mine", "fedavg"], ["Mine", "fedavg"]),
        (["guarded(/x/own.py:Mine)", "/x/own.py:Mine"], ["guarded(Mine)", "Mine"]),
        (["/x/clip.py:Clip(/my x/own.py:Mine)"], ["Clip(Mine)"]),
        (["/x/own.py:Mine", "/x/other.py:Mine"], ["own.py:Mine", "other.py:Mine"]),
        (["/x/own.py:Mine", "elastic(/y/own.py:Mine)"], ["x/own.py:Mine", "elastic(y/own.py:Mine)"]),
        (["/x/z/own.py:Mine", "/y/z/own.py:Mine"], ["x/z/own.py:Mine", "y/z/own.py:Mine"]),
        (["two(/x/own.py:Mine,/y/own.py:Mine)"], ["two(x/own.py:Mine,y/own.py:Mine)"]),
        (["/own.py:Mine", "/x/own.py:Mine"], ["/own.py:Mine", "x/own.py:Mine"]),
        (
            ["/x/own.py:Mine", "/y/own.py:Mine", "/y/b.py:Mine"],
            ["x/own.py:Mine", "y/own.py:Mine", "b.py:Mine"],
        ),
        (["/x/own.py:fedavg", "elastic(fedavg)"], ["own.py:fedavg", "elastic(fedavg)"]),
    ],
)
def test_a_path_is_cut_to_what_tells_it_apart(methods: list[str], expected: list[str]) -> None:
    runs = results.shortened([described(method=method) for method in methods])
    assert [run.method for run in runs] == expected


def test_paths_are_cut_wherever_they_stand() -> None:
    """What only looks like one stays; so does the text of the file."""
    summary = {"also": {"/x/b.csv": {"seen": None}}}
    run = described(
        data="/x (1), old/a.csv[0,2] from 0",
        also=["/x/b.csv", "digits"],
        start="/runs/first",
        address="ray://host:10001",
        settings={"inner": {"teacher": "/x/net.py:net", "ratio": "1/2"}},
    )._replace(toml='data = "/x/a.csv"', summary=summary)
    (short,) = results.shortened([run])
    assert short.experiment == {
        "method": "fedavg",
        "data": "a.csv[0,2] from 0",
        "also": ["b.csv", "digits"],
        "start": "first",
        "address": "ray://host:10001",
        "settings": {"inner": {"teacher": "net", "ratio": "1/2"}},
    }
    assert short.summary == {"also": {"b.csv": {"seen": None}}}
    assert short.toml == run.toml


NAMES = st.sampled_from(["a", "b", "a.py:a", "b.py:a"])
PATHS = st.lists(NAMES, min_size=1, max_size=4).map(lambda parts: "/" + "/".join(parts))


@given(st.lists(PATHS | NAMES, unique=True))
def test_names_that_differ_differ_when_cut(data: list[str]) -> None:
    short = [run.data for run in results.shortened([described(data=name) for name in data])]
    assert len(set(short)) == len(data)
    assert all(name.endswith(end) for name, end in zip(data, short, strict=True))


def test_one_experiment_with_one_seed_twice_is_refused(fake: Fake) -> None:
    runs = [results.load(fake(name)) for name in ("first", "second")]
    with pytest.raises(ApieceError, match=r"first and .*second are the same experiment"):
        results.table(runs)


def test_different_metrics_are_not_compared(fake: Fake) -> None:
    one, other = (results.load(fake(name, method=name)) for name in ("a", "b"))
    with pytest.raises(ApieceError, match="AUC, accuracy"):
        results.table([one, other._replace(metric="AUC")])


def test_the_headline_of_an_unfinished_run_is_the_first_in_its_clients_table(fake: Fake) -> None:
    clients = [[0, 1, "test", "AUC", 9, 3, 0.25, 0.5], [0, 1, "test", "Hit@5", 9, 3, 0.0, 1.0]]
    folder = fake("a", clients=clients)
    (folder / "summary.json").unlink()
    run = results.load(folder)
    assert (run.metric, run.clients) == ("AUC", (results.Client(0, True, 0.25, 0.5),))
    assert results.load(fake("b", finished=False)).metric == "accuracy"


def test_differing_names_all_but_method_settings_and_seed(fake: Fake) -> None:
    runs = [
        results.load(fake("a", method="a", seed=0, cohort=5, settings={"lr": 1})),
        results.load(fake("b", method="b", seed=1, cohort=8, settings={"lr": 2})),
    ]
    assert results.differing(runs) == {"cohort": ["5", "8"]}


def test_differing_says_lists_and_what_is_not_set_in_words() -> None:
    runs = [described(also=["a", "b"], start=""), described(also=[], start="first")]
    assert results.differing(runs) == {"also": ["a and b", "–"], "start": ["–", "first"]}


def test_columns_mark_the_best(fake: Fake) -> None:
    """High is good for scores, low for harm and cost; what is printed alike is equally good."""
    runs = [
        results.load(fake("a", method="a", seen=(0.50, 0.9001, 0.3, 0.2), bytes_up=1000, seconds=60)),
        results.load(fake("b", method="b", seen=(0.60, 0.9002, 0.2, 0.1), bytes_up=3000, seconds=60)),
        results.load(fake("c", method="c", seen=(0.55, 0.8000, 0.1, 0.3), bytes_up=2000, seconds=60)),
    ]
    columns = {(c.group, c.name): c for c in results.columns(results.table(runs))}
    assert {name: sorted(c.best) for (_, name), c in columns.items()} == {
        "initial": [1],
        "personalized": [0, 1],
        "worst 10 %": [0],
        "harmed": [1],
        "sent up": [0],
        "sent down": [0],
        "time": [],
    }
    assert columns["seen clients, %", "personalized"].cells == ("90.0", "90.0", "80.0")
    assert columns["cost", "sent down"].means == ("2.0 kB", "6.0 kB", "4.0 kB")
    assert not any(group.startswith("unseen") for group, _ in columns)


def other(personalized: float) -> dict[str, object]:
    return {"d": {"seen": {"initial": 0.1, "personalized": personalized}, "unseen": None}}


def test_the_best_are_those_on_the_same_data(fake: Fake) -> None:
    """On a: 0.8 before 0.7. On b both are 0.9, which singles out nobody, and c has one run only.

    One run is unfinished. On the other data d all compare: 0.2 · 4 of the last is the best.
    """
    scores = [("a", 0.8), ("a", 0.7), ("b", 0.9), ("b", 0.9), ("c", 1.0)]
    runs = [
        results.load(fake(f"{i}", method=f"m{i}", data=data, seen=(0.5, score), also=other(0.2 * i)))
        for i, (data, score) in enumerate(scores)
    ]
    found = results.groups([*runs, results.load(fake("going", data="a", finished=False))])
    best = {c.name: c.best for c in results.columns([results.row(group) for group in found])}
    assert best["personalized"] == {0}
    assert best["initial"] == best["time"] == frozenset()
    columns = {(c.group, c.name): c.best for c in results.other_columns(found)}
    assert columns["own data, seen clients, %", "personalized"] == {0}
    assert columns["d, seen clients, %", "personalized"] == {4}


def test_cells() -> None:
    assert results.cell(0.979, 0.003) == "97.9 ± 0.3"
    assert results.cell(0.979, None) == "97.9"
    assert results.cell(None, None) == "–"


def test_human_units() -> None:
    assert results.size(999) == "999 B"
    assert results.size(12_340_000, 200_000) == "12.3 ± 0.2 MB"
    assert results.size(12_340_000, 20) == "12.3 MB"
    assert results.size(0) == "0 B"
    assert results.duration(0.25) == "0.2 s"
    assert results.duration(90) == "1.5 min"
    assert results.duration(5400, 1800) == "1.5 ± 0.5 h"


def test_curve_is_the_mean_over_seeds_where_all_were_evaluated(fake: Fake) -> None:
    """Round 2: 0.4 and 0.6, mean 0.5, variance 0.01 + 0.01 = 0.02. Round 4 has only one of the two."""
    column = "seen_initial_mean"
    first = [{"round": 0, column: 0.1}, {"round": 1}, {"round": 2, column: 0.4}, {"round": 4, column: 0.9}]
    second = [{"round": 0, column: 0.1}, {"round": 1}, {"round": 2, column: 0.6}, {"round": 4, column: "nan"}]
    runs = [results.load(fake("a", rounds=first)), results.load(fake("b", seed=1, rounds=second))]
    curve = results.curve(runs, column)
    assert curve.rounds == (0, 2)
    assert curve.means == pytest.approx((0.1, 0.5))
    assert curve.stds == pytest.approx((0.0, 0.02**0.5))
    assert results.curve(runs, "unseen_initial_mean") == Curve((), (), ())
    assert results.curve([], column) == Curve((), (), ())


def test_drift_is_the_mean_distance_from_the_mix_of_all_rounds() -> None:
    """Class 0 then 1 has 30, 10 examples in round 1 and 10, 30 in round 2: 40 and 40, so half each.

    Round 1 has shares 3/4 and 1/4: distance (1/4 + 1/4) / 2 = 1/4, and round 2 the same. With a third round
    of 80 and 0 the whole is 120 of 160, shares 3/4 and 1/4: distances 0, 1/2 and 1/4, mean 1/4. Without the
    second round the whole is 110 of 120: distances 1/6 and 1/12, mean 1/8.
    """
    one, two, three = (
        [Label(1, 0, 30), Label(1, 1, 10)],
        [Label(2, 0, 10), Label(2, 1, 30)],
        [Label(3, 0, 80)],
    )
    assert results.mixes([*one, *three]) == {1: {0: 0.75, 1: 0.25}, 3: {0: 1.0}}
    assert results.whole_mix([*one, *two]) == {0: 0.5, 1: 0.5}
    assert results.drift([*one, *two]) == pytest.approx(1 / 4)
    assert results.drift([*one, *two, *three]) == pytest.approx(1 / 4)
    assert results.drift([*one, *three]) == pytest.approx(1 / 8)
    assert results.drift([*one, Label(2, 0, 3), Label(2, 1, 1)]) == 0


def test_adaptation_is_the_mean_over_seeds_at_shared_amounts(fake: Fake) -> None:
    """5 epochs: 0.4 and 0.6, mean 0.5, variance 0.02. 20 epochs have no score with the second seed."""
    first = [["epochs", 0, 0.1], ["epochs", 5, 0.4], ["epochs", 20, 0.9], ["examples", 1, 0.3]]
    second = [["epochs", 0, 0.1], ["epochs", 5, 0.6], ["epochs", 20, "nan"]]
    runs = [results.load(fake(f"r{s}", seed=s, adaptation=a)) for s, a in enumerate((first, second))]
    curve = results.adaptation(runs, "epochs")
    assert curve.rounds == (0, 5)
    assert curve.means == pytest.approx((0.1, 0.5))
    assert curve.stds == pytest.approx((0.0, 0.02**0.5))
    assert results.adaptation(runs, "examples") == Curve((), (), ())
    assert results.adaptation(runs[:1], "examples") == Curve((1,), (0.3,), (0.0,))


def test_other_columns_put_seeds_together_beside_the_own_data(fake: Fake) -> None:
    """Prior, seen, initial 0.2 and 0.4: 0.3, deviation √(0.01 + 0.01). A null, NaN once, is no number."""
    parts = [
        {"seen": {"initial": 0.2, "personalized": 0.6}, "unseen": {"initial": None, "personalized": 0.5}},
        {"seen": {"initial": 0.4, "personalized": 0.6}, "unseen": None},
    ]
    runs = [
        results.load(fake(f"r{s}", seed=s, seen=(0.5, 0.7 + 0.2 * s), also={"prior": part}))
        for s, part in enumerate(parts)
    ]
    columns = {(c.group, c.name): c.cells for c in results.other_columns(results.groups(runs))}
    assert columns == {
        ("own data, seen clients, %", "initial"): ("50.0 ± 0.0",),
        ("own data, seen clients, %", "personalized"): ("80.0 ± 14.1",),
        ("prior, seen clients, %", "initial"): ("30.0 ± 14.1",),
        ("prior, seen clients, %", "personalized"): ("60.0 ± 0.0",),
        ("prior, unseen clients, %", "personalized"): ("50.0",),
    }
    assert results.other_columns(results.groups([results.load(fake("alone"))])) == []


def test_importing_the_report_is_light() -> None:
    code = "import sys, apiece.report; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
