"""The page as text: what it says, that it says it safely, and that it needs nothing from elsewhere."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from apiece import report
from apiece.errors import ApieceError
from apiece.report import page, plots, results
from apiece.report.results import Count, Curve, Scores, Stat, TableRow

Fake = Callable[..., Path]

NONE = Stat(None, None)
NOBODY = Scores(NONE, NONE, NONE, NONE)
ROUNDS = [
    {"round": 0, "seen_initial_mean": 0.1, "seen_personalized_mean": 0.3},
    {"round": 2, "seen_initial_mean": 0.5, "seen_personalized_mean": 0.7},
]
PARTITION = [[0, "anna", 1, "train", 0, 9], [0, "anna", 1, "test", 0, 3], [1, "bo", 0, "train", 1, 4]]
CLIENTS = [
    [0, 1, "test", "accuracy", 20, 4, 0.5, 0.75],
    [1, 1, "test", "accuracy", 20, 4, 0.75, 0.5],
    [2, 0, "test", "accuracy", 20, 4, 0.25, 0.5],
    [3, 0, "test", "accuracy", 20, 0, "nan", "nan"],
]


def row(label: str, seen: Scores, unseen: Scores = NOBODY, seeds: int = 3, data: str = "digits") -> TableRow:
    return TableRow(label, label, data, tuple(range(seeds)), 0, seen, unseen, NONE, NONE, NONE)


def pair(initial: Stat, personalized: Stat) -> Scores:
    return Scores(initial, personalized, NONE, NONE)


def text_of(html: str) -> str:
    """What a reader sees, spaces evened out."""
    body = re.sub(r"<(style|script|title)>.*?</\1>", "", html, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", body))


def test_headline_names_the_best_on_both_kinds_of_clients() -> None:
    """Unseen: b leads by 2.0 points, the deviation of the difference is √(0.3² + 0.4²) = 0.5: beyond it.

    Seen: a leads by 0.4 points, the deviation of the difference is 0.5: within it.
    """
    rows = [
        row("a", pair(Stat(0.80, 0.0), Stat(0.904, 0.003)), pair(Stat(0.70, 0.0), Stat(0.88, 0.003))),
        row("b", pair(Stat(0.80, 0.0), Stat(0.900, 0.004)), pair(Stat(0.75, 0.0), Stat(0.90, 0.004))),
        row("c", pair(Stat(0.80, 0.0), Stat(0.500, 0.004)), pair(Stat(0.75, 0.0), Stat(0.40, 0.004))),
    ]
    assert page.headline(rows, "accuracy") == [
        "On unseen clients b has the best personalized accuracy, 90.0 ± 0.4 %, above its initial 75.0 ± 0.0 "
        "% by 15.0 points; next is a with 88.0 ± 0.3 %, behind by 2.0 points.",
        "On seen clients a has the best personalized accuracy, 90.4 ± 0.3 %, above its initial 80.0 ± 0.0 "
        "% by 10.4 points; next is b with 90.0 ± 0.4 %, behind by 0.4 points, within one std of the "
        "difference (0.5).",
    ]


def test_headline_does_not_hide_harm_or_a_single_seed() -> None:
    rows = [row("a", pair(Stat(0.80, None), Stat(0.75, None)), seeds=1)]
    assert page.headline(rows, "accuracy") == [
        "On seen clients a reaches 75.0 % accuracy once personalized, below its initial 80.0 % "
        "by 5.0 points.",
        "One seed: by how much chance moves these numbers is not known.",
    ]


def test_headline_of_a_tie() -> None:
    rows = [row(label, pair(Stat(0.5, 0.1), Stat(0.75, 0.1))) for label in ("a", "b")]
    assert page.headline(rows, "accuracy")[0].endswith("; level with it is b with 75.0 ± 10.0 %.")


def test_headline_does_not_rank_runs_on_different_data() -> None:
    """Nor does a run without a result make one out of runs on the same data."""
    scores = pair(Stat(0.5, 0.1), Stat(0.75, 0.1))
    told = ["These runs are on different data: only scores on the same data compare."]
    assert page.headline([row("a", scores), row("b", scores, data="mnist")], "accuracy") == told
    unfinished = row("b", NOBODY, seeds=0, data="mnist")
    assert page.headline([row("a", scores), unfinished], "accuracy")[0].startswith(
        "On seen clients a reaches"
    )


def test_title_names_few_methods_and_counts_many(fake: Fake) -> None:
    html = page.html([results.load(fake(name, method=name)) for name in "abc"])
    assert "<h1>a, b and c on digits</h1>" in html
    html = page.html([results.load(fake(name, method=name)) for name in "defg"])
    assert "<h1>4 methods on digits</h1>" in html


def test_folders_stand_in_the_experiments_alone(fake: Fake) -> None:
    """The class is enough of a method, the file of data, the folder's name of the run that was the prior."""
    methods = ["/home/me/own.py:Mine", "guarded(/home/me/own.py:Mine)"]
    common = {"data": "/home/me/patients.csv", "model": "/home/me/net.py:net"}
    also = {"/home/me/more.csv": PRIOR["prior"]}
    runs = [
        results.load(fake(str(i), method=method, also=also, prior=f"/home/me/{i}", **common))
        for i, method in enumerate(methods)
    ]
    html = page.html([run._replace(experiment=run.experiment | {"also": list(also)}) for run in runs])
    told, _, experiments = html.partition("<h2>The experiments</h2>")
    text = text_of(told)
    assert "<h1>Mine and guarded(Mine) on patients.csv</h1>" in told
    assert "data patients.csv model net" in text
    assert " more.csv, seen clients, %" in text
    assert "also: prior (0, 1)." in text
    assert "/home" not in told
    assert all(path in experiments for path in (*methods, *common.values()))


def test_a_sequence_of_tasks_is_told_by_its_data(fake: Fake) -> None:
    """As `apiece continual` leaves it. Bold: of the two runs on b, the one with 80 %, not the 90 % on a."""
    after = {"data": "b", "start": "/runs/first", "prior": "/runs/first"}
    runs = [
        results.load(fake("first", data="a", start="", prior="", seen=(0.5, 0.9))),
        results.load(fake("next", seen=(0.5, 0.8), **after)),
        results.load(fake("other", method="reptile", seen=(0.5, 0.7), **after)),
    ]
    html = page.html(runs)
    text = text_of(html)
    assert "These runs are on different data" in text
    assert "the best of each column among runs on the same data is bold" in text
    assert re.findall(r"<td[^>]*><b>([\d.]+)</b>", html) == ["80.0"]
    assert "start (–, first); prior (–, first)" in text


def test_headline_without_results() -> None:
    assert page.headline([row("a", pair(NONE, NONE), seeds=0)], "accuracy") == [
        "No run has finished yet: there are no results to speak of."
    ]


def test_write_makes_one_file_and_says_where(fake: Fake, tmp_path: Path) -> None:
    folder = fake("run", rounds=ROUNDS, clients=CLIENTS, partition=PARTITION)
    output = report.write([folder, folder], tmp_path / "deep" / "page.html", "apiece report run")
    text = text_of(output.read_text(encoding="utf-8"))
    assert output == tmp_path / "deep" / "page.html"
    assert "from the files of 1 run folder. apiece report run" in text
    assert f"apiece run {folder}/experiment.toml --out DIR" in text


def test_write_refuses_a_folder_that_is_no_run(fake: Fake, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ApieceError, match=r"empty is no run folder"):
        report.write([fake("run"), tmp_path / "empty"], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_harmed_clients_are_counted_among_those_scored(fake: Fake) -> None:
    """Of four clients one was not scored and one fell from 0.75 to 0.5."""
    html = page.html([results.load(fake("run", clients=CLIENTS))])
    assert "1 of 3 harmed (33.3 %)" in text_of(html)
    assert html.count('class="dots s0"') == 1
    assert html.count('class="rings s0"') == 1


def test_where_all_clients_are_seen_no_others_are_spoken_of(fake: Fake) -> None:
    html = page.html([results.load(fake("run", rounds=ROUNDS, clients=CLIENTS[:2]))])
    assert "seen clients, %" in html
    assert "unseen" not in text_of(html)


LABELS = [[1, 0, 30], [1, 1, 10], [2, 0, 10], [2, 1, 30]]  # drift 1/4, see test_results
EVEN = [[r, label, 5] for r in range(1, 51) for label in (0, 1)]
ADAPTATION = [["epochs", 0, 0.5], ["epochs", 5, 0.75], ["examples", 1, 0.25], ["examples", 10, 0.625]]
PRIOR = {"prior": {"seen": {"initial": 0.2, "personalized": 0.6}, "unseen": None}}


def test_what_has_no_data_has_no_section(fake: Fake) -> None:
    html = page.html([results.load(fake("run", rounds=ROUNDS, labels=LABELS[:2]))])
    for heading in ("What the cohorts held", "Adaptation curves", "Scored on other data too"):
        assert heading not in html


def test_drift_has_a_panel_for_each_way_to_draw_cohorts(fake: Fake) -> None:
    """Methods and seeds share one; 50 even rounds of another sampler drift by 0 and are not all drawn."""
    runs = [
        results.load(fake("a", sampler="uniform", labels=LABELS)),
        results.load(fake("b", sampler="uniform", labels=LABELS, method="reptile")),
        results.load(fake("c", sampler="uniform", labels=LABELS, seed=1)),
    ]
    text = text_of(page.html(runs))
    assert text.count("from the mix of all rounds") == 1
    assert "Cohorts fedavg, seed 0: 0.250 from the mix of all rounds, mean over 2 rounds" in text
    assert "are drawn; the number" not in text
    html = page.html([*runs, results.load(fake("d", sampler="no_drift", labels=EVEN))])
    check_well_formed(html)
    text = text_of(html)
    assert "sampler uniform fedavg, seed 0: 0.250 from" in text
    assert "sampler no_drift fedavg, seed 0: 0.000 from the mix of all rounds, mean over 50 rounds" in text
    assert "The first 40 rounds are drawn; the number is about all." in text


def test_drift_draws_shares_by_area(fake: Fake) -> None:
    """Shares 3/4 and 1/4: radii as √3 to 1. Rounds 26 wide and classes 22 high: the largest is 11.

    Beside a picture whose largest share is 1, all are √(3/4) as wide.
    """
    part = plots.choose_drift(results.load(fake("run", labels=LABELS)).labels)
    assert part.most == 0.75
    drawn = plots.drift(part, part.most, "")
    dots = re.findall(r'class="ink (\w+)".*? r="([\d.]+)"', drawn)
    small, half = 11 / 3**0.5, 11 * (2 / 3) ** 0.5
    assert [kind for kind, _ in dots] == ["full"] * 4 + ["hollow"] * 2
    radii = [11, small, small, 11, half, half]
    assert [float(r) for _, r in dots] == pytest.approx(radii, abs=0.051)
    beside = [float(r) for r in re.findall(r' r="([\d.]+)"', plots.drift(part, 1.0, ""))]
    assert beside == pytest.approx([0.75**0.5 * r for r in radii], abs=0.051)
    assert "<title>round 1. class 0: 75.0 %, class 1: 25.0 %</title>" in drawn


def test_drift_of_many_classes_adds_some_up(fake: Fake) -> None:
    """62 classes on at most 32 lines: two to a line, 31 lines, of which each round fills all.

    Round 1 holds class c 1 + (1 + c) % 3 times: 2, 3, 1, 2, 3, 1 …, 20 times over, then 2, 3: 125.
    The first line has 2 + 3 of them.
    """
    labels = [[r, label, 1 + (r + label) % 3] for r in (1, 2) for label in range(62)]
    run = results.load(fake("run", labels=labels))
    part = plots.choose_drift(run.labels)
    assert part.lines()[0][0] == pytest.approx(5 / 125)
    assert part.classes == tuple(range(0, 62, 2))
    assert plots.drift(part, part.most, "").count("<circle") == 31 * 3
    assert "a line adds up 2 of them" in text_of(page.html([run]))


def test_adaptation_curves_name_their_ends_and_missing_runs(fake: Fake) -> None:
    """fedavg ends at (75 + 85) / 2 = 80 % after 5 epochs; of reptile's two runs one has curves."""
    more = [["epochs", 0, 0.5], ["epochs", 5, 0.85], ["examples", 1, 0.25], ["examples", 10, 0.625]]
    curves = {("fedavg", 0): ADAPTATION, ("fedavg", 1): more, ("reptile", 0): ADAPTATION, ("reptile", 1): []}
    runs = [
        results.load(fake(f"{m}{s}", method=m, seed=s, adaptation=points, unseen=(0.5, 0.75)))
        for (m, s), points in curves.items()
    ]
    html = page.html(runs)
    check_well_formed(html)
    assert "by epochs. fedavg ends at 80.0 %; reptile ends at 75.0 %" in html
    assert "by examples. fedavg ends at 62.5 %; reptile ends at 62.5 %" in html
    assert "on unseen clients, mean over seeds with a band" in html
    assert "Not every run has these curves: reptile 1 of 2 runs." in html
    alone = page.html([results.load(fake("alone", adaptation=ADAPTATION))])
    assert "on seen clients (there are no unseen ones): against" in alone


def test_adaptation_of_many_methods_gets_a_panel_each(fake: Fake) -> None:
    many = page.OVERLAID + 1
    html = page.html(
        [results.load(fake(f"run{i}", method=f"m{i}", adaptation=ADAPTATION)) for i in range(many)]
    )
    assert html.count('class="other"') == 2 * many * (many - 1)


def test_adaptation_at_one_amount_is_drawn(fake: Fake) -> None:
    html = page.html([results.load(fake("run", adaptation=[["epochs", 0, 0.5]]))])
    assert "by epochs. fedavg ends at 50.0 %" in html
    assert "by examples" not in html


def test_other_data_are_tabled_in_the_colours_of_their_methods(fake: Fake) -> None:
    runs = [results.load(fake("a", method="a")), results.load(fake("b", method="b", also=PRIOR))]
    table = page.html(runs).partition("Scored on other data too")[2].partition("</section>")[0]
    assert "own data, seen clients, % prior, seen clients, %" in re.sub(r"\s+", " ", text_of(table))
    assert re.findall(r'<td[^>]*data-v="([\d.]+)"', table) == ["0.5", "0.75", "0.2", "0.6"]
    assert 'class="mark s1"' in table
    assert 'class="mark s0"' not in table


def test_an_unfinished_run_is_marked_and_its_curve_drawn(fake: Fake) -> None:
    runs = [
        results.load(fake("done", rounds=ROUNDS)),
        results.load(fake("going", method="reptile", finished=False, rounds=ROUNDS)),
    ]
    html = page.html(runs)
    assert "1 of 2 runs unfinished" in text_of(html)
    assert html.count("line dotted s1") == 2
    assert "unfinished, 2 rounds done" in html


def test_runs_that_have_just_begun_make_a_page(fake: Fake) -> None:
    html = page.html([results.load(fake("going", finished=False))])
    assert "No run has finished yet" in html


def test_runs_that_differ_in_more_than_the_method_are_announced(fake: Fake) -> None:
    runs = [results.load(fake("a", cohort=5)), results.load(fake("b", method="b", cohort=8))]
    assert "also: cohort (5, 8)." in text_of(page.html(runs))


def test_what_comes_from_files_is_escaped(fake: Fake) -> None:
    evil = "<script>alert('x\" &amp;')</script>"
    run = fake(
        "<b>run",
        method=evil,
        data=evil,
        settings={"name": evil},
        rounds=ROUNDS,
        clients=CLIENTS,
        partition=[[0, evil, 1, "train", 0, 9]],
        labels=LABELS,
        adaptation=ADAPTATION,
        also={evil: PRIOR["prior"]},
        sampler=evil,
    )
    other = fake("other", method="b", labels=LABELS)
    html = page.html([results.load(run), results.load(other)], command=evil)
    assert "sampler &lt;script&gt;" in html
    assert html.count("<script>") == 1
    assert "alert('" not in html
    assert "<b>run" not in html
    check_well_formed(html)


def test_the_page_needs_nothing_from_elsewhere(fake: Fake) -> None:
    html = page.html([results.load(fake("run", rounds=ROUNDS, clients=CLIENTS, partition=PARTITION))])
    assert not re.search(r"https?:|url\(|@import|\bsrc=|\bhref=|<link|<iframe", html)
    assert "default-src 'none'" in html


def test_figures_have_names_and_tables_have_heads(fake: Fake) -> None:
    runs = [
        results.load(
            fake(
                f"{method}{seed}",
                method=method,
                seed=seed,
                rounds=ROUNDS,
                clients=CLIENTS,
                partition=PARTITION,
                unseen=(0.4, 0.6),
            )
        )
        for method in ("a", "b")
        for seed in (0, 1)
    ]
    html = page.html(runs)
    check_well_formed(html)
    figures = re.findall(r"<figure[^>]*>", html)
    assert len(figures) == 5  # at a glance, curves, clients, partition, traffic
    assert all("aria-label" in figure for figure in figures)
    pictures = re.findall(r"<svg[^>]*>", html)
    assert all("aria-label" in picture or "aria-hidden" in picture for picture in pictures)
    assert html.count('scope="col"') == 1 + 4 + 4 + 3
    assert html.count('scope="row"') == 2


def test_many_methods_get_a_panel_each(fake: Fake) -> None:
    runs = [
        results.load(fake(f"run{i}", method=f"method{i}", rounds=ROUNDS)) for i in range(page.OVERLAID + 1)
    ]
    html = page.html(runs)
    assert html.count(" dashed") == page.OVERLAID + 1
    assert html.count('class="other"') == (page.OVERLAID + 1) * page.OVERLAID


def test_a_method_keeps_its_colour(fake: Fake) -> None:
    """Of two methods the first is s0 and the second s1, whatever the figure draws."""
    runs = [results.load(fake(m, method=m, rounds=ROUNDS, clients=CLIENTS)) for m in ("a", "b")]
    html = page.html(runs)
    for kind in ("line", "mark", "full", "hollow", "dots", "fill"):
        assert f'class="{kind} s0"' in html
        assert f'class="{kind} s1"' in html
    assert 's2"' not in html


def test_fifteen_runs_of_a_thousand_clients_stay_small(fake: Fake) -> None:
    clients = [[i, i % 10 > 0, "test", "accuracy", 9, 9, (i % 89) / 89, (i % 97) / 97] for i in range(1000)]
    partition = [[i, f"c{i}", i % 10 > 0, "train", i * k % 62, 5] for i in range(1000) for k in (1, 2, 3)]
    rounds = [{"round": r, "seen_initial_mean": 0.5, "seen_personalized_mean": 0.6} for r in range(1000)]
    runs = [
        results.load(
            fake(f"r{m}{s}", method=f"m{m}", seed=s, rounds=rounds, clients=clients, partition=partition)
        )
        for m in range(3)
        for s in range(2)
    ]
    more = [
        run._replace(experiment=run.experiment | {"seed": run.seed + k}) for run in runs for k in (10, 20)
    ]
    everything = (runs + more)[:15]
    html = page.html(everything)
    assert len(html.encode()) < 1_000_000
    assert "one client in 13 is drawn, evenly by id: 77 of 1000" in html


def test_choose_keeps_both_kinds_of_clients_and_adds_up_classes() -> None:
    """320 clients: one in 4 of the 317 seen (80) and of the 3 unseen (1). 130 classes: three to a line."""
    counts = [Count(i, f"c{i}", i < 317, "train", i % 130, 2) for i in range(320)]
    counts += [Count(4, "c4", True, "train", 5, 7), Count(4, "c4", True, "test", 5, 1)]
    part = plots.choose(counts)
    assert part.clients == (*range(0, 317, 4), 317)
    assert part.unseen == {317}
    assert (part.rows, part.classes_per_row) == (44, 3)  # 130 / 3, rounded up
    assert part.counts[4, 1] == 2 + 7  # classes 4 and 5 are both on line 1
    assert (part.sizes[4, "train"], part.sizes[4, "test"]) == (9, 1)
    assert part.rule == (
        "one client in 4 is drawn, evenly by id: 81 of 320; each line adds up 3 consecutive classes"
    )


def test_choose_draws_a_small_partition_whole() -> None:
    part = plots.choose([Count(0, "a", True, "train", 1, 2), Count(1, "b", False, "train", 0, 3)])
    assert (part.clients, part.rows, part.rule, part.most) == ((0, 1), 2, "", 3)


@pytest.mark.parametrize(
    ("lo", "hi", "most", "whole", "expected"),
    [
        (0, 100, 6, True, [0, 20, 40, 60, 80, 100]),
        (0, 3, 6, True, [0, 1, 2, 3]),
        (0.07, 0.98, 5, False, [0.2, 0.4, 0.6, 0.8]),
        (0.735, 0.79, 6, False, [0.74, 0.75, 0.76, 0.77, 0.78, 0.79]),
    ],
)
def test_ticks(lo: float, hi: float, most: int, whole: bool, expected: list[float]) -> None:
    assert plots.ticks(lo, hi, most, whole) == pytest.approx(expected)


def test_thin_keeps_the_first_and_the_last() -> None:
    curve = Curve(tuple(range(11)), tuple(r / 10 for r in range(11)), (0.0,) * 11)
    assert plots.thin(curve, 4).rounds == (0, 3, 6, 9, 10)
    assert plots.thin(curve, 11) == curve


def test_scale_stays_within_the_picture() -> None:
    scale = plots.Scale(0.0, 1.0, 100, 20)
    assert [scale(v) for v in (-1, 0, 0.25, 1, 2)] == [100, 100, 80, 20, 20]


def test_a_logarithmic_scale_has_a_place_for_nought() -> None:
    """1 + value doubles from 0 to 1 to 3 to 7: equal steps."""
    scale = plots.Scale(0, 7, 0, 30, log=True)
    assert [scale(v) for v in (0, 1, 3, 7, 9)] == pytest.approx([0, 10, 20, 30, 30])


class Tags(HTMLParser):
    """Fails where a tag is closed that is not the open one."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass


def check_well_formed(html: str) -> None:
    tags = Tags()
    tags.feed(html)
    assert tags.open == []
    for picture in re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL):
        ET.fromstring(picture)
