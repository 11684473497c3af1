"""One self-contained HTML page about one or many runs: opens offline, asks the network for nothing."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from apiece.report import plots, results
from apiece.report.document import document
from apiece.report.results import GROUPS, SCORES, Group, Run, Scores, Stat, TableRow, cell

OVERLAID = plots.COLOURS  # methods in one panel of learning curves at most; more get a panel each
PARTITIONS = 3  # drawn at most
DRIFTS = 8  # drawn at most
COHORTS = (  # what else than the seed decides who is drawn, and with which examples
    *("data", "client_column", "label_column", "partition", "partition_seed", "clients", "test", "unseen"),
    *("proxy", "sampler", "cohort"),
)
ALONG = {"epochs": "Personalization epochs", "examples": "Examples of the client"}
FACTS = ("data", "model", "partition", "clients", "unseen", "cohort", "rounds")


class Story(NamedTuple):
    """All that the page is about."""

    groups: list[Group]
    rows: list[TableRow]
    metric: str

    @property
    def runs(self) -> list[Run]:
        return [run for group in self.groups for run in group.runs]


def write(folders: Sequence[Path], output: Path, command: str = "") -> Path:
    """Write the page about `folders` to `output`; `command` is what the reader is told made it."""
    unique = list({Path(folder).resolve(): Path(folder) for folder in folders}.values())
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(html([results.load(folder) for folder in unique], command), encoding="utf-8")
    return output


def html(runs: Sequence[Run], command: str = "") -> str:
    groups = results.groups(results.shortened(runs))
    story = Story(groups, [results.row(group) for group in groups], results.metric(runs))
    heading = title(story)
    body = "".join(
        [
            _header(heading, story),
            _glance(story),
            _table(story),
            _others(story),
            _curves(story),
            _adaptation(story),
            _clients(story),
            _partitions(story),
            _drifts(story),
            _traffic(story),
            _experiments(story),
            _footer(story, command),
        ]
    )
    return document(heading, body)


def title(story: Story) -> str:
    methods = list(dict.fromkeys(row.method for row in story.rows))
    data = sorted({row.data for row in story.rows} - {""})
    what = _listed(methods) if len(methods) <= 3 else f"{len(methods)} methods"
    return f"{what} on {', '.join(data)}" if data else what


def _listed(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def headline(rows: Sequence[TableRow], metric: str) -> list[str]:
    """What the numbers say, a sentence each, and how far to trust them; other data are not ranked."""
    told = [sentence for group in ("unseen", "seen") if (sentence := _lead(rows, group, metric))]
    if not told:
        return ["No run has finished yet: there are no results to speak of."]
    if len({row.data for row in rows if row.seeds}) > 1:
        told = ["These runs are on different data: only scores on the same data compare."]
    seeds = {len(row.seeds) for row in rows if row.seeds}
    if seeds == {1}:
        told.append("One seed: by how much chance moves these numbers is not known.")
    elif 1 in seeds:
        told.append(
            "Some methods ran with one seed only: by how much chance moves their numbers is not known."
        )
    return told


def compare(better: Stat, worse: Stat) -> str:
    """The gap in points, and whether it is larger than one standard deviation of the difference."""
    gap = 100 * ((better.mean or 0.0) - (worse.mean or 0.0))
    if better.std is None or worse.std is None:
        return f"{gap:.1f} points"
    noise = 100 * math.hypot(better.std, worse.std)
    return f"{gap:.1f} points" + (
        f", within one std of the difference ({noise:.1f})" if abs(gap) <= noise else ""
    )


def _lead(rows: Sequence[TableRow], group: str, metric: str) -> str:
    scored = [(row, scores) for row in rows if (scores := _scores(row, group)).personalized.mean is not None]
    if not scored:
        return ""
    ranked = sorted(scored, key=lambda pair: -(pair[1].personalized.mean or 0.0))
    (best, scores), others = ranked[0], ranked[1:]
    gain = _gain(scores)
    if not others:
        return (
            f"On {group} clients {best.label} reaches {cell(*scores.personalized)} % {metric} "
            f"once personalized{f', {gain}' if gain else ''}."
        )
    second, behind = others[0]
    gap = compare(scores.personalized, behind.personalized)
    other = f"{second.label} with {cell(*behind.personalized)} %"
    level = gap.startswith("0.0 ")
    return (
        f"On {group} clients {best.label} has the best personalized {metric}, "
        f"{cell(*scores.personalized)} %{f', {gain}' if gain else ''}; "
        + (f"level with it is {other}." if level else f"next is {other}, behind by {gap}.")
    )


def _gain(scores: Scores) -> str:
    if scores.initial.mean is None or scores.personalized.mean is None:
        return ""
    if scores.personalized.mean >= scores.initial.mean:
        return (
            f"above its initial {cell(*scores.initial)} % by {compare(scores.personalized, scores.initial)}"
        )
    return f"below its initial {cell(*scores.initial)} % by {compare(scores.initial, scores.personalized)}"


def _scores(row: TableRow, group: str) -> Scores:
    return row.seen if group == "seen" else row.unseen


def _header(heading: str, story: Story) -> str:
    first, *rest = headline(story.rows, story.metric)
    more = f'<p class="sub">{_prose(" ".join(rest))}</p>' if rest else ""
    notes = "".join(f'<p class="note">{note}</p>' for note in _notes(story))
    return (
        f'<header><p class="brand">Apiece <span>run report</span></p><h1>{escape(heading)}</h1>'
        f'<p class="lead">{_prose(first)}</p>{more}{notes}{_facts(story)}</header>\n'
    )


def _prose(text: str) -> str:
    """Numbers stay on one line with their ± and %."""
    return escape(text).replace(" ± ", "&nbsp;±&nbsp;").replace(" %", "&nbsp;%")


def _notes(story: Story) -> list[str]:
    notes = []
    unfinished = [run for run in story.runs if not run.finished]
    if unfinished:
        names = ", ".join(f"<code>{escape(str(run.folder))}</code>" for run in unfinished)
        notes.append(
            f"<b>{len(unfinished)} of {len(story.runs)} runs unfinished</b>, in the curves (dotted) but not "
            f"in the table: {names}."
        )
    differing = results.differing(story.runs)
    if differing:
        what = "; ".join(f"{name} ({', '.join(values)})" for name, values in differing.items())
        notes.append(f"<b>Not only method and seed differ</b> between these runs, also: {escape(what)}.")
    return notes


def _facts(story: Story) -> str:
    first = results.flat(story.runs[0].experiment)
    differing = results.differing(story.runs)
    if first.get("partition", "").startswith("natural"):  # `clients` is what would have been dealt to
        ids = {count.client for count in story.runs[0].partition}
        first["clients"] = len(ids) if len(ids) == 1 + max(ids, default=-1) else ""  # of a population, a few
    facts = [(name, str(first[name])) for name in FACTS if name in first and name not in differing]
    seeds = sorted({str(run.seed) for run in story.runs if run.seed is not None})
    facts.append(("seeds", ", ".join(seeds) if len(seeds) <= 6 else str(len(seeds))))
    items = "".join(f"<div><dt>{escape(n)}</dt><dd>{escape(v)}</dd></div>" for n, v in facts if v)
    return f'<dl class="facts">{items}</dl>'


def _section(name: str, text: str, figures: str) -> str:
    return f'<section><h2>{name}</h2><p class="about">{text}</p>{figures}</section>\n'


def _figure(panels: Sequence[tuple[str, str]], label: str, kind: str, legend: str = "") -> str:
    """Panels of (caption as HTML, SVG), side by side where there is room."""
    cells = "".join(f'<div class="panel"><h3>{caption}</h3>{svg}</div>' for caption, svg in panels)
    return f'<figure aria-label="{escape(label)}">{legend}<div class="panels {kind}">{cells}</div></figure>'


def _legend(labels: Mapping[int, str]) -> str:
    if len(labels) == 1:
        return ""
    items = (f"<li>{plots.swatch(i)}{escape(label)}</li>" for i, label in labels.items())
    return f'<ul class="legend">{"".join(items)}</ul>'


def _glance(story: Story) -> str:
    panels = []
    stats = [s for row in story.rows for g in GROUPS for s in _scores(row, g)[:2] if s.mean is not None]
    if not stats:
        return ""
    limits = plots.spread(
        min(max((s.mean or 0.0) + sign * (s.std or 0.0), 0.0), 1.0) for s in stats for sign in (-1, 1)
    )
    for group in GROUPS:
        scored = [
            (i, row.label, _scores(row, group).initial, _scores(row, group).personalized)
            for i, row in enumerate(story.rows)
            if _scores(row, group).personalized.mean is not None
        ]
        if scored:
            words = "; ".join(f"{label}: {cell(*a)} to {cell(*b)} %" for _, label, a, b in scored)
            aria = f"{story.metric} on {group} clients, initial to personalized. {words}"
            panels.append((f"{group.capitalize()} clients", plots.glance(scored, limits, aria)))
    spread = ", whiskers one standard deviation over seeds" if any(s.std for s in stats) else ""
    return _section(
        "At a glance",
        f"{_title(story.metric)} in percent, mean over clients: hollow before personalization "
        f"(initial), full after it (personalized){spread}.",
        _figure(panels, "Initial and personalized scores by method", "two"),
    )


def _title(metric: str) -> str:
    return metric[:1].upper() + metric[1:]


def _table(story: Story) -> str:
    several = any(len(row.seeds) > 1 for row in story.rows)
    spread = " ± the sample standard deviation over seeds" if several else ""
    return _section(
        "Results",
        f"{_title(story.metric)} after the last round, mean over clients{spread}{_bold(story.rows)}. "
        "<i>Worst 10 %</i>: personalized, over the worst tenth of the clients. <i>Harmed</i>: the share of "
        "clients that personalization made worse.",
        _grid(dict(enumerate(story.rows)), results.columns(story.rows), "Table of results"),
    )


def _bold(rows: Sequence[TableRow]) -> str:
    """What bold figures are, where rows can be compared."""
    among = " among runs on the same data" if len({row.data for row in rows}) > 1 else ""
    return f"; the best of each column{among} is bold" if len(rows) > 1 else ""


def _others(story: Story) -> str:
    """Scores on other data's clients, the prior task's for example: what was forgotten, what carries over."""
    scored = {
        i: group
        for i, group in enumerate(story.groups)
        if any((run.summary or {}).get("also") for run in group.finished)
    }
    columns = results.other_columns(list(scored.values()))
    if not columns:
        return ""
    rows = {i: story.rows[i] for i in scored}
    bold = _bold(list(rows.values()))
    spread = (
        " ± the sample standard deviation over seeds" if any(len(r.seeds) > 1 for r in rows.values()) else ""
    )
    return _section(
        "Scored on other data too",
        f"{_title(story.metric)} after the last round, on the clients of the run's own data and "
        f"of other data: mean over clients{spread}{bold}. On data from before the run, <i>initial</i> tells "
        "what is not forgotten and <i>personalized</i> what a client regains by itself.",
        _grid(rows, columns, "Table of results on other data"),
    )


def _grid(rows: Mapping[int, TableRow], columns: Sequence[results.Column], label: str) -> str:
    """A table with two lines of heads; a row's key is its place in the story, hence its colour."""
    spans = [
        (group, sum(c.group == group for c in columns)) for group in dict.fromkeys(c.group for c in columns)
    ]
    top = "".join(
        f'<th colspan="{n}" scope="colgroup"><span>{escape(group)}</span></th>' for group, n in spans
    )
    firsts = [i for i, c in enumerate(columns) if i == 0 or columns[i - 1].group != c.group]
    heads = "".join(
        f'<th scope="col"{_first(i in firsts)}>{escape(c.name)}</th>' for i, c in enumerate(columns)
    )
    lines = []
    for r, (index, row) in enumerate(rows.items()):
        cells = "".join(
            f"<td{_first(i in firsts)}{_value(c.stats[r])}>{_strong(_small(c.cells[r]), r in c.best)}</td>"
            for i, c in enumerate(columns)
        )
        lines.append(f'<tr><th scope="row" data-v="{escape(row.label)}">{_name(index, row)}</th>{cells}</tr>')
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}"><table>'
        f'<thead><tr><td></td>{top}</tr><tr><th scope="col">method</th>{heads}</tr>'
        f"</thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _name(index: int, row: TableRow) -> str:
    seeds = _plural(len(row.seeds), "seed") if row.seeds else ""
    state = f'<span class="tag">{row.unfinished} unfinished</span>' if row.unfinished else ""
    below = f"<small>{seeds} {state}</small>"
    return f'<span class="name">{plots.swatch(index)}<span>{escape(row.label)}{below}</span></span>'


def _first(first: bool) -> str:
    return ' class="first"' if first else ""


def _value(stat: Stat) -> str:
    return "" if stat.mean is None else f' data-v="{stat.mean!r}"'


def _small(text: str) -> str:
    """A cell in two lines: the mean with its unit, the deviation under it."""
    mean, sign, rest = text.partition(" ± ")
    std, _, unit = rest.partition(" ")
    return f"{f'{mean} {unit}'.strip()}<small>± {std}</small>" if sign else mean


def _strong(text: str, best: bool) -> str:
    return f"<b>{text}</b>" if best else text


def _series(story: Story, column: str) -> list[plots.Series]:
    return [
        plots.Series(
            i,
            group.label,
            results.curve(group.finished, column),
            tuple(results.curve([run], column) for run in group.unfinished),
        )
        for i, group in enumerate(story.groups)
    ]


def _drawn(series: Sequence[plots.Series]) -> bool:
    return any(curve.rounds for s in series for curve in (s.mean, *s.unfinished))


def _curves(story: Story) -> str:
    drawn = {(g, s): _series(story, f"{g}_{s}_mean") for g in GROUPS for s in SCORES}
    limits = plots.curves_range(s for series in drawn.values() for s in series)
    if limits is None:
        return ""
    figures = _overlaid(story, drawn, limits) if len(story.rows) <= OVERLAID else _apart(story, drawn, limits)
    longest = max(len(curve.rounds) for ss in drawn.values() for s in ss for curve in (s.mean, *s.unfinished))
    thinned = f" Of long runs about {plots.POINTS} rounds are drawn." if longest > plots.POINTS else ""
    several = any(len(group.finished) > 1 for group in story.groups)
    what = ", mean over seeds with a band of ± one standard deviation" if several else ""
    dotted = " Dotted: an unfinished run." if any(group.unfinished for group in story.groups) else ""
    return _section(
        "Learning curves",
        f"{_title(story.metric)} in percent against rounds{what}; round 0 is before training."
        f"{dotted}{thinned}",
        figures,
    )


Drawn = dict[tuple[str, str], list[plots.Series]]
Limits = tuple[tuple[float, float], int]


def _overlaid(story: Story, drawn: Drawn, limits: Limits) -> str:
    panels = []
    for (group, score), series in drawn.items():
        if _drawn(series):
            aria = f"{score} {story.metric} on {group} clients over rounds. {_ends(series)}"
            caption = f"{group.capitalize()} clients, <b>{score}</b>"
            panels.append((caption, plots.curves(series, limits, aria)))
    return _figure(panels, "Learning curves", "two", _legend(dict(enumerate(r.label for r in story.rows))))


def _apart(story: Story, drawn: Drawn, limits: Limits) -> str:
    figures = []
    for group in GROUPS:
        if not _drawn(drawn[group, "personalized"] + drawn[group, "initial"]):
            continue
        panels = []
        for i, row in enumerate(story.rows):
            own = [drawn[group, "personalized"][i], drawn[group, "initial"][i]._replace(dashed=True)]
            others = [s.mean for j, s in enumerate(drawn[group, "personalized"]) if j != i]
            aria = f"{row.label} on {group} clients, {story.metric} over rounds. {_ends(own)}"
            panels.append((escape(row.label), plots.curves(own, limits, aria, others)))
        figures.append(
            f'<h3 class="block">{group.capitalize()} clients</h3><p class="about">Solid: personalized. '
            "Dashed: initial. Grey: the other methods, personalized.</p>"
            + _figure(panels, f"Learning curves on {group} clients", "many lines")
        )
    return "".join(figures)


def _ends(series: Sequence[plots.Series]) -> str:
    return "; ".join(f"{s.label} ends at {cell(s.mean.means[-1])} %" for s in series if s.mean.rounds)


def _adaptation(story: Story) -> str:
    """Score against personalization epochs and against local examples, of the runs that were asked for it."""
    members = {i: [run for run in group.finished if run.adaptation] for i, group in enumerate(story.groups)}
    drawn = {
        along: [
            plots.Series(i, story.groups[i].label, mean, ())
            for i, runs in members.items()
            if (mean := results.adaptation(runs, along)).rounds
        ]
        for along in ALONG
    }
    found = plots.curves_range(s for series in drawn.values() for s in series)
    if found is None:
        return ""
    limits = found[0]
    labels = {s.style: s.label for series in drawn.values() for s in series}
    panels, figures = [], []
    for along, series in drawn.items():
        if len(labels) <= OVERLAID:
            aria = f"Personalized {story.metric} by {along}. {_ends(series)}"
            if series:
                panels.append((ALONG[along], plots.adaptation(series, limits, along, aria)))
            continue
        apart = []
        for own in series:
            others = [s.mean for s in series if s is not own]
            aria = f"{own.label}, personalized {story.metric} by {along}. {_ends([own])}"
            apart.append((escape(own.label), plots.adaptation([own], limits, along, aria, others)))
        if apart:
            figures.append(
                f'<h3 class="block">{ALONG[along]}</h3>'
                + _figure(apart, f"Adaptation curves by {along}", "many lines")
            )
    if panels:
        figures.append(_figure(panels, "Adaptation curves", "two", _legend(labels)))
    return _section("Adaptation curves", _adaptation_words(story, members), "".join(figures))


def _adaptation_words(story: Story, members: Mapping[int, list[Run]]) -> str:
    runs = [run for same in members.values() for run in same]
    kinds = {bool((run.summary or {}).get("unseen")) for run in runs}
    whose = "unseen clients" if True in kinds else "seen clients (there are no unseen ones)"
    if len(kinds) > 1:
        whose += ", or on seen ones in runs without any"
    several = any(len(same) > 1 for same in members.values())
    spread = ", mean over seeds with a band of ± one standard deviation" if several else ""
    fewer = "; ".join(
        f"{story.groups[i].label} {len(same)} of {_plural(len(story.groups[i].runs), 'run')}"
        for i, same in members.items()
        if len(same) < len(story.groups[i].runs)
    )
    grey = " Grey: the other methods." if sum(map(bool, members.values())) > OVERLAID else ""
    missing = f" Not every run has these curves: {escape(fewer)}." if fewer else ""
    return (
        f"Personalized {story.metric} in percent on {whose}{spread}: against the epochs of personalization "
        "on all examples of a client, and against how many examples it has (all, where it has fewer), by "
        "the method's own recipe. "
        f"Logarithmic across.{grey}{missing}"
    )


def _clients(story: Story) -> str:
    panels = []
    scored = [
        [c for run in group.finished for c in run.clients if None not in (c.initial, c.personalized)]
        for group in story.groups
    ]
    values = [v for clients in scored for c in clients for v in (c.initial, c.personalized) if v is not None]
    if not values:
        return ""
    limits = plots.spread(values)
    for i, (group, clients) in enumerate(zip(story.groups, scored, strict=True)):
        if not clients:
            continue
        harmed = sum(c.harmed for c in clients)
        words = f"{harmed} of {len(clients)} harmed ({100 * harmed / len(clients):.1f} %)"
        aria = f"{group.label}: each client's personalized against its initial {story.metric}; {words}"
        caption = f"{escape(group.label)} <small>{words}</small>"
        panels.append((caption, plots.scatter(clients, i, limits, aria)))
    several = any(len(group.finished) > 1 for group in story.groups)
    each = "one mark per client and seed" if several else "one mark per client"
    unseen = any(not c.seen for clients in scored for c in clients)
    marks = "Dots: seen clients; diamonds: unseen ones; larger" if unseen else "Larger"
    return _section(
        "Client by client",
        f"Personalized {story.metric} (up) against initial (across), {each}. On the diagonal personalization "
        f"changed nothing, below it the client was harmed. {marks} where several coincide.",
        _figure(panels, "Initial and personalized score of each client", "many"),
    )


def _partitions(story: Story) -> str:
    found: dict[tuple[results.Count, ...], list[str]] = {}
    for group in story.groups:
        for run in group.runs:
            if run.partition and group.label not in (labels := found.setdefault(run.partition, [])):
                labels.append(group.label)
    if not found:
        return ""
    pictures = []
    for counts, labels in list(found.items())[:PARTITIONS]:
        part = plots.choose(counts)
        everyone = {c.client: c.seen for c in counts}
        unseen = len(everyone) - sum(everyone.values())
        aria = f"Which classes each of {len(everyone)} clients holds, {unseen} of them unseen"
        whose = f"<b>{escape(', '.join(labels))}.</b> " if len(found) > 1 else ""
        rule = f" To stay readable, {part.rule}." if part.rule else ""
        pictures.append(
            f'<figure aria-label="{aria}"><figcaption>{whose}{_plural(len(everyone), "client")}, '
            f"{unseen} of them unseen; the largest dot is {_plural(part.most, 'example')}.{rule}</figcaption>"
            f'<div class="scroll" tabindex="0" role="region" aria-label="Partition">'
            f"{plots.partition(part, aria)}</div></figure>"
        )
    left = len(found) - PARTITIONS
    more = f" {left} further partitions are not drawn." if left > 0 else ""
    return _section(
        "Who holds what",
        "The partition: the area of a dot is the number of training examples of one class (down) that a "
        "client (across) holds; hollow for unseen clients. Bars: all its examples, strong to train, pale to "
        "test."
        f"{more}",
        "".join(pictures),
    )


def _drifts(story: Story) -> str:
    """The label mix of the cohorts over rounds: one run for each way in which cohorts come about."""
    ways: dict[tuple[str, ...], list[Run]] = {}
    for run in story.runs:
        if len(results.mixes(run.labels)) > 1:
            ways.setdefault(tuple(str(run.experiment.get(name)) for name in COHORTS), []).append(run)
    if not ways:
        return ""
    telling = [i for i in range(len(COHORTS)) if len({way[i] for way in ways}) > 1]
    # The methods of one seed share their cohorts; an unfinished run has fewer of them.
    longest = {
        way: max(runs, key=lambda run: len(results.mixes(run.labels)))
        for way, runs in list(ways.items())[:DRIFTS]
    }
    parts = {way: plots.choose_drift(run.labels) for way, run in longest.items()}
    most = max(part.most for part in parts.values())
    panels = []
    for way, run in longest.items():
        name = ", ".join(f"{COHORTS[i]} {way[i]}" for i in telling) or "Cohorts"
        distance = f"{results.drift(run.labels):.3f} from the mix of all rounds"
        words = f"{distance}, mean over {parts[way].rounds_in_all} rounds"
        caption = f"{escape(name)} <small>{escape(f'{run.method}, seed {run.seed}')}: <b>{words}</b></small>"
        aria = f"{name}: label mix of each round's cohort; {words}"
        panels.append((caption, plots.drift(parts[way], most, aria)))
    cut = any(part.rounds_in_all > plots.ROUNDS for part in parts.values())
    first = f" The first {plots.ROUNDS} rounds are drawn; the number is about all." if cut else ""
    per_line = max(part.classes_per_line for part in parts.values())
    binned = f" With many classes a line adds up {per_line} of them." if per_line > 1 else ""
    left = len(ways) - DRIFTS
    more = f" {left} further ways to draw cohorts are not shown." if left > 0 else ""
    return _section(
        "What the cohorts held",
        "Period drift: the area of a dot is the share of one class (down) among the training examples of the "
        "cohort of a round (across); hollow, at the end, all rounds put together. The number is the "
        "total-variation distance between a round's mix and that of all rounds: 0 is no period "
        f"drift.{first}{binned}{more}",
        _figure(panels, "Label mix of the cohorts over rounds", "two"),
    )


def _traffic(story: Story) -> str:
    panels = []
    several = any(len(row.seeds) > 1 for row in story.rows)
    means = [s.mean for row in story.rows for s in (row.bytes_up, row.bytes_down) if s.mean is not None]
    if not means:
        return ""
    for name, amounts in (
        ("Up: clients to server", [row.bytes_up for row in story.rows]),
        ("Down: server to clients", [row.bytes_down for row in story.rows]),
    ):
        rows = [(i, story.rows[i].label, stat) for i, stat in enumerate(amounts) if stat.mean is not None]
        words = "; ".join(f"{label} {results.size(*stat)}" for _, label, stat in rows)
        panels.append((name, plots.bars(rows, max(means), f"{name}. {words}")))
    return _section(
        "Traffic",
        f"All bytes of a run between the server and its cohorts{', mean over seeds' if several else ''}.",
        _figure(panels, "Bytes up and down by method", "two"),
    )


def _experiments(story: Story) -> str:
    blocks = []
    for i, group in enumerate(story.groups):
        first, *others = group.runs
        seeds = f"seed{'s' if others else ''} {', '.join(str(run.seed) for run in group.runs)}"
        also = "<p>Its other runs differ in <code>seed</code> only.</p>" if others else ""
        commands = "\n".join(_again(run) for run in group.runs)
        states = "".join(
            f"<li><code>{escape(str(run.folder))}</code>, seed {escape(str(run.seed))}: {_state(run)}</li>"
            for run in group.runs
        )
        blocks.append(
            f"<details><summary>{plots.swatch(i)}<b>{escape(group.label)}</b> "
            f"<span>{escape(seeds)}</span></summary><ul>{states}</ul>"
            f"<p>To run it again:</p><pre>{escape(commands)}</pre>"
            f"<p><code>{escape(str(first.folder / 'experiment.toml'))}</code></p>"
            f"<pre>{escape(first.toml.strip())}</pre>{also}</details>"
        )
    return _section(
        "The experiments", "Everything a run depends on, as its folder tells it.", "".join(blocks)
    )


def _again(run: Run) -> str:
    return f"apiece run {shlex.quote(str(run.folder / 'experiment.toml'))} --out DIR"


def _state(run: Run) -> str:
    if run.summary is None:
        last = int(run.rounds[-1]["round"] or 0) if run.rounds else 0
        return f"unfinished, {_plural(last, 'round')} done"
    summary = run.summary
    where = " on ".join(str(summary[name]) for name in ("engine", "device") if name in summary)
    rounds = f"{summary.get('rounds', '?')} rounds in {results.duration(summary.get('seconds'))}"
    return escape(f"{rounds}{f', {where}' if where else ''}")


def _plural(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def _footer(story: Story, command: str) -> str:
    made = f"<pre>{escape(command)}</pre>" if command else ""
    return (
        f"<footer><p>Made by apiece {escape(version('apiece'))} from the files of "
        f"{_plural(len(story.runs), 'run folder')}.</p>{made}</footer>\n"
    )
