"""Tables reproduced: cells, the ledger, what is run again, the pages; and every experiment at smoke scale."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from apiece import Experiment, ledger, results_page, session, tune
from apiece.errors import ApieceError
from apiece.reproduce import Reproduction, run_all, search_all, shrunk, tables
from tests.command import apiece

# One table of two rows and two columns on digits: the second row starts from the first's model.
FILE = """
from dataclasses import replace
from apiece import Experiment
from apiece.reproduce import Cell, Gain, Measured, Table, curve, score

BASE = Experiment(
    clients=8, cohort=3, rounds=3, evaluate_every=1, model="logistic", engine="vectorized", threads=1
)

def measure(run):
    return Measured({"initial": score("seen", "initial")(run)}, {"initial": curve(run, "seen_initial_mean")})

COLUMNS = {"iid": replace(BASE, partition="iid"), "two": replace(BASE, partition="classes:2")}
TABLE = Table(
    id="toy-table",
    title="A toy",
    source="Nobody 2020, Table 0",
    cells={
        **{("first", name): Cell(base, measure) for name, base in COLUMNS.items()},
        **{
            ("then", name): Cell(replace(base, method="reptile"), measure, start=("first", name))
            for name, base in COLUMNS.items()
        },
    },
    published={("first", "iid"): {"initial": 50.0}},
    figures={"initial": "%"},
    seeds=(0, 1),
    settings=("As it pleases.",),
    departures=("None.",),
    findings=("Higher than printed.",),
    gains=(Gain("then", "first", "iid", "initial", 1.5),),
)
"""


# The same, where the first row's learning rate is open: the table's own trains next to nothing.
SEARCHED = (
    FILE.replace("Table, curve", "Search, Table, curve")
    .replace('model="logistic",', 'model="logistic", settings={"lr": 1e-6},')
    .replace('method="reptile"', 'method="reptile", settings={"lr": 0.1}')
    .replace("toy-table", "toy-search")
    .replace(
        "gains=",
        """search=Search(
        {("first", "iid"): {"lr": (0.1, 0.5)}},
        {"iid": "iid", "two": "iid"},
        trials=3,
        rounds=2,
        initial=("first",),
    ),
    gains=""",
    )
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "experiments"
    place.mkdir()
    (place / "toy_table.py").write_text(FILE)
    return place


@pytest.fixture
def work(folder: Path, tmp_path: Path) -> Reproduction:
    table = tables(folder)["toy-table"]
    return Reproduction(table, "full", tmp_path / "runs", tmp_path / "toy-table.jsonl", "cpu", folder)


@pytest.fixture
def open_work(folder: Path, tmp_path: Path) -> Reproduction:
    (folder / "toy_search.py").write_text(SEARCHED)
    table = tables(folder)["toy-search"]
    return Reproduction(table, "full", tmp_path / "runs", tmp_path / "toy-search.jsonl", "cpu", folder)


def quiet(done: int, scores: object = None) -> None:
    pass


@pytest.mark.parametrize(("engine", "passes"), [("vectorized", 1), ("sequential", 2)])
def test_seeds_are_trained_together_where_clients_are_vectorized(
    folder: Path, tmp_path: Path, engine: str, passes: int
) -> None:
    """The rounds are gone through once, not once for each seed; numbers are those of the seeds alone."""
    (folder / "toy_table.py").write_text(FILE.replace('engine="vectorized"', f'engine="{engine}"'))
    table = tables(folder)["toy-table"]
    work = Reproduction(table, "full", tmp_path / "runs", tmp_path / "both.jsonl", "cpu", folder)
    rounds: list[int] = []
    both = work.run(("first", "two"), [0, 1], lambda done, scores: rounds.append(done))
    assert rounds == [0, 1, 2, 3] * passes
    for entry in both:
        alone = replace(work, runs=tmp_path / "alone", ledger=tmp_path / "alone.jsonl")
        (one,) = alone.run(("first", "two"), [entry.seed], quiet)
        assert entry.numbers["initial"] == pytest.approx(one.numbers["initial"], abs=0.3)  # an example: 0.3


def test_a_cell_leaves_a_line_for_each_seed_with_all_that_made_it(work: Reproduction) -> None:
    work.run(("first", "iid"), [0, 1], quiet)
    entries = ledger.read(work.ledger)
    assert [(e.row, e.column, e.seed, e.scale) for e in entries] == [
        ("first", "iid", seed, "full") for seed in (0, 1)
    ]
    assert len({e.numbers["initial"] for e in entries}) == 2  # two seeds, two models
    for entry in entries:
        assert [x for x, _ in entry.curves["initial"]] == [0, 1, 2, 3]
        assert entry.curves["initial"][-1][1] == pytest.approx(entry.numbers["initial"])
        assert entry.experiment["partition"] == "iid"
        assert entry.experiment["seed"] == entry.seed
        assert entry.versions["torch"]
        assert entry.hardware
        assert entry.seconds > 0


def test_a_cell_trained_before_costs_what_its_run_took(work: Reproduction) -> None:
    """Not what it took to look at it: a table that was interrupted tells the seconds of all it trained."""
    ((experiment, folder),) = work.planned(("first", "iid"), [0])
    session.run(experiment, folder)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "seconds": 1234.5}))
    (entry,) = work.run(("first", "iid"), [0], quiet)
    assert entry.seconds == 1234.5


def test_a_line_says_whether_what_made_it_is_the_commit(tmp_path: Path) -> None:
    """A ledger that grows while its table is run changes nothing of that."""

    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        asked = ["git", "-C", str(tmp_path), *who, *words]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()

    def commit() -> str:
        return str(ledger.provenance(tmp_path / "experiments", "cpu")["commit"])

    for folder in ("src", "experiments", "results"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file").write_text("first")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    head = git("rev-parse", "--short=12", "HEAD")
    (tmp_path / "results" / "file").write_text("second")
    assert commit() == head
    (tmp_path / "src" / "file").write_text("second")
    assert commit() == head + "+"


def test_what_is_in_the_ledger_is_not_run_again(work: Reproduction) -> None:
    work.run(("first", "iid"), [1], quiet)
    missing = work.missing([], [])
    assert missing[("first", "iid")] == [0]
    assert missing[("then", "two")] == [0, 1]
    assert work.missing(["first/iid"], [1]) == {}
    assert list(work.missing(["*/two"], [])) == [("first", "two"), ("then", "two")]
    with pytest.raises(ApieceError, match="cell"):
        work.missing(["second/iid"], [])


def test_an_interrupted_cell_goes_on_from_its_folder(work: Reproduction) -> None:
    def stop(done: int, scores: object) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work.run(("first", "iid"), [0], stop)
    assert ledger.read(work.ledger) == []
    (place,) = (work.runs / "full").iterdir()
    begun = (place / "experiment.toml").stat().st_mtime_ns
    work.run(("first", "iid"), [0], quiet)
    assert (place / "experiment.toml").stat().st_mtime_ns == begun
    assert len(ledger.read(work.ledger)) == 1


def test_a_cell_starts_from_the_model_of_another(work: Reproduction) -> None:
    """Round 0 of the second row is the last round of the first; its run is shared, not made twice."""
    (first,) = work.run(("first", "iid"), [0], quiet)
    (then,) = work.run(("then", "iid"), [0], quiet)
    assert then.curves["initial"][0][1] == pytest.approx(first.curves["initial"][-1][1], abs=1e-9)
    assert len(list((work.runs / "full").iterdir())) == 2


def test_several_processes_find_the_same(work: Reproduction, tmp_path: Path, folder: Path) -> None:
    """The second row waits for the first, whose run it starts from."""
    seeds = work.missing(["*/iid"], [0])
    found = dict(run_all(work, seeds, 2))
    assert list(found) == [("first", "iid"), ("then", "iid")]
    alone = Reproduction(work.table, "full", tmp_path / "alone", tmp_path / "alone.jsonl", "cpu", folder)
    for place, entries in found.items():
        assert not isinstance(entries, BaseException)
        (other,) = alone.run(place, [0], quiet)
        assert entries[0].numbers == pytest.approx(other.numbers, abs=1e-4)


def test_open_settings_are_searched_before_a_cell_is_run(open_work: Reproduction) -> None:
    """Under one column, for all columns; a row that leaves nothing open, and the smoke scale, need none."""
    with pytest.raises(ApieceError, match=r"reproduce toy-search --search --only \"first/iid\""):
        open_work.run(("first", "two"), [0], quiet)
    assert open_work.unsearched(["*/two"]) == [("first", "iid")]
    assert open_work.unsearched(["then/*"]) == []
    searched = open_work.search(("first", "iid"), quiet)
    assert open_work.unsearched([]) == []
    lr = searched.settings["local.lr"]
    for column in ("iid", "two"):
        (entry,) = open_work.run(("first", column), [0], quiet)
        assert entry.experiment["settings"]["local"]["lr"] == lr
        assert entry.experiment["rounds"] == 3


def test_at_smoke_scale_nothing_waits_for_a_search(open_work: Reproduction) -> None:
    small = replace(open_work, scale="smoke")
    (entry,) = small.run(("first", "iid"), [0], quiet)
    assert entry.experiment["settings"]["local"]["lr"] == 1e-6
    assert len(small.search(("first", "iid"), quiet).trials) == 2


def test_a_search_is_written_down_with_all_its_trials(open_work: Reproduction) -> None:
    """Two rounds of learning at 0.1 or 0.5 beat two at a millionth, which is the first trial, the table's.

    The row is judged by its initial score, as the log of trials has it.
    """
    open_work.search(("first", "iid"), quiet)
    (known,) = ledger.read_searches(open_work.searches)
    assert open_work.searches.name == "toy-search-search.jsonl"
    assert (known.row, known.column, known.rounds, known.score) == ("first", "iid", 2, "initial")
    own, *others = known.trials
    assert own["settings"] == {}
    assert len(others) == 2
    assert all(trial["settings"]["local.lr"] in (0.1, 0.5) for trial in others)
    best = max(known.trials, key=lambda trial: trial["score"])
    assert best["score"] > own["score"]
    assert known.settings == best["settings"]
    assert known.versions["torch"]
    logged = map(json.loads, (open_work.runs / "full" / tune.LOG).read_text().splitlines())
    scores = {run["trial"]: (run["initial"], run["personalized"]) for run in logged}
    assert [trial["score"] for trial in known.trials] == [initial for initial, _ in scores.values()]
    assert all(initial != personalized for initial, personalized in list(scores.values())[1:])


def test_a_search_that_the_table_has_changed_is_wanted_again(open_work: Reproduction) -> None:
    open_work.search(("first", "iid"), quiet)
    assert open_work.table.search is not None
    more = replace(open_work.table.search, trials=4)
    longer = replace(open_work, table=replace(open_work.table, search=more))
    assert longer.unsearched([]) == [("first", "iid")]
    with pytest.raises(ApieceError, match="--search"):
        longer.run(("first", "iid"), [0], quiet)
    assert len(longer.search(("first", "iid"), quiet).trials) == 4
    assert longer.unsearched([]) == []


def test_processes_search_the_same(open_work: Reproduction, tmp_path: Path) -> None:
    ((place, searched),) = search_all(open_work, open_work.unsearched([]), 2)
    assert place == ("first", "iid")
    assert not isinstance(searched, BaseException)
    alone = replace(open_work, runs=tmp_path / "alone", ledger=tmp_path / "alone.jsonl")
    for trial, other in zip(searched.trials, alone.search(place, quiet).trials, strict=True):
        assert trial["settings"] == other["settings"]
        assert trial["score"] == pytest.approx(other["score"], abs=1e-4)


def test_a_table_without_open_settings_has_nothing_to_search(work: Reproduction) -> None:
    with pytest.raises(ApieceError, match="searches nothing"):
        work.unsearched([])


def entry(row: str, column: str, seed: int, number: float, scale: str = "full") -> ledger.Entry:
    curve = [(0.0, 10.0), (1.0, number)]
    made = {"commit": "abc", "when": "2020-01-01", "hardware": "a CPU", "versions": {"torch": "2"}}
    return ledger.Entry(
        "toy-table", row, column, scale, seed, {"initial": number}, {"initial": curve}, 1.0, {}, **made
    )


ENTRIES = [
    entry("first", "iid", 0, 51.0),
    entry("first", "iid", 1, 53.0),
    entry("first", "iid", 0, 99.0, "smoke"),
    entry("then", "iid", 0, 54.0),
    entry("then", "iid", 1, 55.0),
]


def test_lines_are_means_over_seeds_beside_the_paper(work: Reproduction) -> None:
    """(51 + 53) / 2 = 52, sample deviation √2; the paper has 50; nothing of the smoke scale counts."""
    lines = {line.place: line for line in results_page.lines(work.table, ENTRIES)}
    first = lines["first", "iid"]
    assert first.seeds == 2
    (figure,) = first.figures
    assert (figure.ours, figure.paper, figure.difference) == ("52.00 ± 1.41", "50.00", "+2.00")
    assert lines["then", "two"].figures[0].ours == "not run"


def test_gains_are_taken_seed_by_seed(work: Reproduction) -> None:
    """54 − 51 = 3 and 55 − 53 = 2: mean 2.5, deviation 0.71, the paper says 1.5."""
    ((name, gain),) = results_page.gains(work.table, ENTRIES)
    assert name == "then − first, iid: initial"
    assert (gain.ours, gain.difference) == ("2.50 ± 0.71", "+1.00")


def test_a_gain_over_one_model_is_of_every_seed(work: Reproduction) -> None:
    one = [e for e in ENTRIES if (e.row, e.seed) != ("first", 1)]
    ((_, gain),) = results_page.gains(work.table, one)
    assert gain.ours == "3.50 ± 0.71"  # 54 − 51 and 55 − 51


def test_a_number_that_a_run_does_not_have_is_not_said_to_be_not_run(work: Reproduction) -> None:
    table = replace(work.table, figures={"initial": "%", "rounds": ""})
    lines = {line.place: line for line in results_page.lines(table, ENTRIES)}
    assert [figure.ours for figure in lines["first", "iid"].figures] == ["52.00 ± 1.41", "–"]
    assert [figure.ours for figure in lines["then", "two"].figures] == ["not run", "not run"]


def test_the_pages_show_every_cell(work: Reproduction) -> None:
    text = results_page.markdown({"toy-table": work.table}, {"toy-table": ENTRIES}, {"toy-table": []})
    assert "| iid | first | 52.00 ± 1.41 | 50.00 | +2.00 | 2 |" in text
    assert "| two | then | not run |  |  |  |" in text
    assert "99.00" not in text
    assert "- Found: Higher than printed.\n- As it pleases.\n- Departure: None.\n" in text
    assert "| [toy-table](#toy-table) | Nobody 2020, Table 0 | A toy | 2 of 4 |" in text
    page = results_page.html({"toy-table": work.table}, {"toy-table": ENTRIES}, {"toy-table": []})
    assert "52.00 ± 1.41" in page
    assert '<a href="#toy-table">Nobody 2020, Table 0</a>: A toy. 2 of 4 cells.' in page
    assert page.count("<svg") > 1
    assert "<li>Found: Higher than printed.</li>" in page
    assert "abc" in page


def test_columns_of_which_nothing_was_run_stand_behind_the_others(work: Reproduction) -> None:
    """And what is told of their rows' differences waits until there is some."""
    gain = work.table.gains[0]
    table = replace(work.table, gains=(gain, gain._replace(column="two")))
    assert [name for name, _ in results_page.gains(table, ENTRIES)] == ["then − first, iid: initial"]
    text = results_page.markdown({"toy-table": table}, {"toy-table": ENTRIES}, {"toy-table": []})
    begun, waiting = text.split("<details><summary>Not run yet: two (2 cells)</summary>")
    assert "| iid | first |" in begun
    assert "| two |" not in begun
    assert "| two | first | not run |" in waiting.split("</details>")[0]
    page = results_page.html({"toy-table": table}, {"toy-table": ENTRIES}, {"toy-table": []})
    assert "<details><summary>Not run yet: two (2 cells)</summary>" in page
    whole = [*ENTRIES, *(e._replace(column="two") for e in ENTRIES)]
    for made in (results_page.markdown, results_page.html):
        assert "<details>" not in made({"toy-table": table}, {"toy-table": whole}, {"toy-table": []})


def test_the_pages_show_the_settings_found_and_the_effort(work: Reproduction) -> None:
    """Of two searches of one cell the later one counts; a trial that diverged has no score."""

    def search(settings: dict[str, float], scale: str = "full") -> ledger.Searched:
        trials = [{"score": None}, {"score": 0.5}, {"score": 0.625}]
        made = {"commit": "abc", "when": "2020-01-01", "hardware": "a CPU", "versions": {}}
        found = ("p", 30, 0.25, "personalized", settings, trials)
        return ledger.Searched("toy-table", "first", "iid", scale, *found, **made)

    searches = {"toy-table": [search({"local.lr": 0.1}), search({"local.lr": 0.5}), search({}, "smoke")]}
    told = "3 trials of 30 rounds, judged by the personalized score on 25 % of the training examples"
    text = results_page.markdown({"toy-table": work.table}, {"toy-table": ENTRIES}, searches)
    assert f"| iid | first | local.lr=0.5 | 62.50 | {told} |" in text
    assert "local.lr=0.1" not in text
    page = results_page.html({"toy-table": work.table}, {"toy-table": ENTRIES}, searches)
    assert f"<td>local.lr=0.5</td><td>62.50</td><td>{told}</td>" in page


def test_paths_are_drawn_and_ledgers_without_them_are_read(work: Reproduction, tmp_path: Path) -> None:
    """A line for each path through all its points, the first run's alone."""
    corners = [(0.0, 0.0), (1.0, 0.0), (1.0, 3.0)]
    drawn = [e._replace(paths={"one": corners, "two": corners[::-1]}) for e in ENTRIES[:2]]
    page = results_page.html({"toy-table": work.table}, {"toy-table": drawn}, {"toy-table": []})
    assert page.count("<h3>iid: first, seed") == 1
    assert page.count('d="M10 310L310 310L310 10"') == 1
    assert page.count('d="M310 10L310 310L10 310"') == 1
    old = {name: value for name, value in ENTRIES[0]._asdict().items() if name != "paths"}
    (tmp_path / "old.jsonl").write_text(json.dumps(old) + "\n")
    assert ledger.read(tmp_path / "old.jsonl")[0].paths == {}


def test_a_ledger_with_a_foreign_line_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "x.jsonl"
    place.write_text(json.dumps({"row": "only"}) + "\n")
    with pytest.raises(ApieceError, match="line 1"):
        ledger.read(place)


def test_the_command(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "0 of 4 cells" in apiece("reproduce", "list").out
    shown = apiece("reproduce", "toy-table", "--only", "first/iid", "--seeds", "0", "--device", "cpu")
    assert shown.code == 0, shown.err
    assert "(50.00)" in shown.out
    assert "not run" not in shown.out, "what was not asked for is not shown"
    assert "nothing to run" not in shown.err
    again = apiece("reproduce", "toy-table", "--only", "first/iid", "--seeds", "0", "--device", "cpu")
    assert again.out == shown.out
    assert "nothing to run: all of it is in results/toy-table.jsonl" in again.err
    assert "1 of 4 cells" in apiece("reproduce", "list").out
    (tmp_path / "docs").mkdir()
    assert apiece("reproduce", "page").code == 0
    assert (tmp_path / "docs" / "results.html").exists()
    unknown = apiece("reproduce", "toy-tabel")
    assert unknown.code == 2
    assert "toy-table" in unknown.err


def test_a_cell_that_cannot_be_run_does_not_keep_others_from_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (folder / "toy_table.py").write_text(FILE.replace('partition="iid"', 'partition="classes:200"'))
    shown = apiece("reproduce", "toy-table", "--only", "first/*", "--seeds", "0", "--device", "cpu")
    assert shown.code == 2
    assert "1 cells failed; first/iid" in shown.err
    entries = ledger.read(tmp_path / "results" / "toy-table.jsonl")
    assert [(e.row, e.column) for e in entries] == [("first", "two")]


def test_the_command_searches(
    open_work: Reproduction, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cell = ("reproduce", "toy-search", "--only", "first/two", "--seeds", "0", "--device", "cpu")
    early = apiece(*cell)
    assert early.code == 2
    assert "--search" in early.err
    shown = apiece(*cell, "--search")
    assert shown.code == 0, shown.err
    assert "local.lr=" in shown.out
    assert "not searched: 0" in shown.out
    assert apiece(*cell).code == 0
    (tmp_path / "docs").mkdir()
    assert apiece("reproduce", "page").code == 0
    assert "local.lr=" in (tmp_path / "docs" / "results.md").read_text()
    assert "searches nothing" in apiece("reproduce", "toy-table", "--search").err


def test_shrunk_experiments_are_short() -> None:
    settings = {
        "mu": 3.0,
        "local": {"lr": 0.1, "epochs": 10},
        "inner": {"personal": {"steps": 50, "epochs": 0}},
    }
    small = shrunk(Experiment(rounds=500, clients=1000, cohort=100, settings=settings))
    assert (small.rounds, small.clients, small.cohort) == (2, 12, 3)
    assert small.settings["local"] == {"lr": 0.1, "epochs": 1}
    assert small.settings["inner"]["personal"] == {"steps": 2, "epochs": 0}


EXPERIMENTS = Path(__file__).parents[1] / "experiments"
SMOKE = [(id, place) for id, table in tables(EXPERIMENTS).items() for place in table.cells]


def reproduced(table: str, place: tuple[str, str], out: Path) -> None:
    """A cell at smoke scale has all the numbers that the table shows of it."""
    described = tables(EXPERIMENTS)[table]
    work = Reproduction(described, "smoke", out, out / f"{table}.jsonl", "cpu", EXPERIMENTS)
    (entry,) = work.run(place, [described.seeds_of(place)[0]], quiet)
    assert set(entry.numbers) <= set(described.figures)
    assert entry.numbers


@pytest.fixture(scope="session")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("smoke")


@pytest.mark.parametrize("table", tables(EXPERIMENTS))
def test_the_first_cell_of_every_table_runs_at_smoke_scale(table: str, smoke: Path) -> None:
    reproduced(table, next(iter(tables(EXPERIMENTS)[table].cells)), smoke)


@pytest.mark.slow
@pytest.mark.parametrize(("table", "place"), SMOKE, ids=["/".join((id, *place)) for id, place in SMOKE])
def test_every_cell_of_every_table_runs_at_smoke_scale(
    table: str, place: tuple[str, str], smoke: Path
) -> None:
    reproduced(table, place, smoke)


@pytest.mark.parametrize("table", tables(EXPERIMENTS))
def test_what_papers_published_belongs_to_a_cell_and_a_figure(table: str) -> None:
    described = tables(EXPERIMENTS)[table]
    assert set(described.published) <= set(described.cells)
    assert all(set(numbers) <= set(described.figures) for numbers in described.published.values())
    for gain in described.gains:
        assert {(gain.row, gain.column), (gain.over, gain.column)} <= set(described.cells)
        assert gain.figure in described.figures


SEARCHES = [
    (id, place)
    for id, table in tables(EXPERIMENTS).items()
    for place in dict.fromkeys(map(table.searched_at, table.cells))
    if place is not None
]


@pytest.mark.parametrize(("table", "place"), SEARCHES, ids=["/".join((id, *place)) for id, place in SEARCHES])
def test_what_is_searched_can_be_set(table: str, place: tuple[str, str]) -> None:
    described = tables(EXPERIMENTS)[table]
    assert described.search is not None
    assert set(described.search.initial) <= {row for row, _ in described.search.spaces}
    assert described.searched_at(place) == place
    tune.space_of(described.at(place, "full"), described.search.spaces[place])


@pytest.mark.slow
@pytest.mark.parametrize(("table", "place"), SEARCHES, ids=["/".join((id, *place)) for id, place in SEARCHES])
def test_every_search_of_every_table_runs_at_smoke_scale(
    table: str, place: tuple[str, str], smoke: Path
) -> None:
    work = Reproduction(
        tables(EXPERIMENTS)[table], "smoke", smoke, smoke / f"{table}.jsonl", "cpu", EXPERIMENTS
    )
    assert len(work.search(place, quiet).trials) == 2
