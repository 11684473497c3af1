"""The page's figures as small hand-made SVGs.

Not matplotlib's: colours are CSS variables, so one figure serves light and dark; text is text in the page's
own font; and a dot costs ten bytes. Numbers drawn are in `viewBox` units, which are pixels at natural size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from apiece.report.results import Client, Count, Curve, Label, Stat, cell, mixes, size, whole_mix

COLOURS = 7  # as many as stay apart for every kind of colour vision; classes s0 … s6 of the page
POINTS = 200  # drawn per line at most
BEHIND = 40  # drawn per grey line at most: there is one for each pair of methods
ROOM = 26  # between the numbers of an axis at least
FEW = 12  # evaluated rounds that are marked on their line, lest straight pieces be taken for data
CROWD = 300  # marks in a scatter from which on they shrink
COLUMNS = 80  # clients drawn in the partition picture at most
ROWS = 64  # classes, or bins of classes, drawn there at most
ROUNDS = 40  # drawn in the drift picture at most
LINES = 32  # classes, or bins of classes, drawn there at most
TOLD = 8  # classes named under the pointer
MARKS = (  # one shape per colour, radius about 4, centred on the origin: colour is never the only difference
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "M-3.5-3.5h7v7h-7z",
    "M0-4.8l4.6 8h-9.2z",
    "M0-5l5 5-5 5-5-5z",
    "M0 4.8l4.6-8h-9.2z",
    "M-4-1.5h2.5v-2.5h3v2.5h2.5v3h-2.5v2.5h-3v-2.5h-2.5z",
    "M-5-2h10v4h-10z",
)


class Series(NamedTuple):
    """One method's curve: the mean of its finished runs, and each unfinished run by itself."""

    style: int
    label: str
    mean: Curve
    unfinished: tuple[Curve, ...]
    dashed: bool = False


class Scale(NamedTuple):
    lo: float
    hi: float
    start: float
    stop: float
    log: bool = False  # of 1 + value, so that 0 has a place

    def __call__(self, value: float) -> float:
        within = min(max(value, self.lo), self.hi)
        at, lo, hi = (math.log1p(v) if self.log else v for v in (within, self.lo, self.hi))
        return self.start + (at - lo) / (hi - lo) * (self.stop - self.start)


class Partition(NamedTuple):
    """The part of a partition that is drawn, and the rule by which it was chosen."""

    clients: tuple[int, ...]  # seen ones first
    names: dict[int, str]
    unseen: frozenset[int]
    counts: dict[tuple[int, int], int]  # (client, row) → training examples
    sizes: dict[tuple[int, str], int]  # (client, split) → examples
    rows: int
    classes_per_row: int
    rule: str

    @property
    def most(self) -> int:
        return max(self.counts.values(), default=1)


class Drift(NamedTuple):
    """The part of the cohorts' label mixes that is drawn."""

    rounds: tuple[int, ...]
    mixes: tuple[dict[int, float], ...]  # class → share: of each of these rounds, then of all rounds
    classes: tuple[int, ...]  # the first of each line
    line: dict[int, int]  # class → line
    classes_per_line: int
    rounds_in_all: int

    def lines(self) -> list[dict[int, float]]:
        """The mixes by line."""
        found = []
        for mix in self.mixes:
            shares = dict.fromkeys(sorted({self.line[label] for label in mix}), 0.0)
            for label, share in mix.items():
                shares[self.line[label]] += share
            found.append(shares)
        return found

    @property
    def most(self) -> float:
        return max(share for shares in self.lines() for share in shares.values())


def style(index: int) -> str:
    return f"s{index % COLOURS}"


def ticks(lo: float, hi: float, most: int, whole: bool = False) -> list[float]:
    """At most `most` + 1 round numbers within [lo, hi]."""
    rough = (hi - lo) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * nice for nice in (1, 2, 5, 10) if power * nice >= rough * (1 - 1e-9))
    step = max(step, 1.0) if whole else step
    first, last = math.ceil(lo / step - 1e-9), math.floor(hi / step + 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


def spread(values: Iterable[float]) -> tuple[float, float]:
    """A range of fractions that holds `values` with a little air."""
    found = list(values)
    lo, hi = min(found), max(found)
    air = max(0.04 * (hi - lo), 0.005)
    return max(0.0, lo - air), min(1.0, hi + air) if hi <= 1.0 else hi + air


def thin(curve: Curve, most: int = POINTS) -> Curve:
    """Every k-th point and the last, so that no more than `most` + 1 are left."""
    stride = max(1, math.ceil(len(curve.rounds) / most))
    keep = [i for i in range(len(curve.rounds)) if i % stride == 0 or i == len(curve.rounds) - 1]
    rounds, means, stds = ([part[i] for i in keep] for part in curve)
    return Curve(tuple(int(r) for r in rounds), tuple(means), tuple(stds))


def curves_range(series: Iterable[Series]) -> tuple[tuple[float, float], int] | None:
    """(lowest, highest score, last round) of curves that are to share their axes."""
    all_curves = [curve for s in series for curve in (s.mean, *s.unfinished) if curve.rounds]
    if not all_curves:
        return None
    ends = [
        min(max(mean + sign * std, 0.0), 1.0)
        for curve in all_curves
        for mean, std in zip(curve.means, curve.stds, strict=True)
        for sign in (-1, 1)
    ]
    return spread(ends), max(curve.rounds[-1] for curve in all_curves)


def curves(
    series: Sequence[Series], limits: tuple[tuple[float, float], int], aria: str, behind: Sequence[Curve] = ()
) -> str:
    """Lines over rounds with a band of ± one standard deviation; `behind` in grey, for comparison."""
    (lo, hi), last = limits
    width, height = 420, 250
    x, y = Scale(0, max(last, 1), 44, width - 14), Scale(lo, hi, height - 42, 16)
    axes = _axes(x, y, ticks(0, max(last, 1), 6, whole=True), ticks(lo, hi, 5), name="round", scores=False)
    return _svg(width, height, axes + _curves(series, x, y, behind), aria)


def adaptation(
    series: Sequence[Series], limits: tuple[float, float], name: str, aria: str, behind: Sequence[Curve] = ()
) -> str:
    """Lines over amounts of epochs or examples, on a logarithmic axis that names the amounts measured."""
    width, height = 420, 250
    drawn = [*(s.mean for s in series), *behind]
    amounts = sorted({amount for curve in drawn for amount in curve.rounds})
    x = Scale(amounts[0], max(amounts[-1], amounts[0] + 1), 44, width - 14, log=True)
    y = Scale(*limits, height - 42, 16)
    named = amounts[:1]
    for amount in amounts:
        if x(amount) - x(named[-1]) >= ROOM:
            named.append(amount)
    axes = _axes(x, y, named, ticks(*limits, 5), name=name, scores=False)
    return _svg(width, height, axes + _curves(series, x, y, behind), aria)


def _curves(series: Sequence[Series], x: Scale, y: Scale, behind: Sequence[Curve]) -> str:
    parts = [_line(thin(curve, BEHIND), x, y, "other") for curve in behind]
    parts += [_band(s.mean, x, y, style(s.style)) for s in series]
    for s in series:
        parts.append(_line(s.mean, x, y, f"line {style(s.style)}{' dashed' if s.dashed else ''}"))
        parts += [_line(curve, x, y, f"line dotted {style(s.style)}") for curve in s.unfinished]
        if 0 < len(s.mean.rounds) <= FEW:
            places = zip(s.mean.rounds, s.mean.means, strict=True)
            parts.append(_dots([(x(r), y(m)) for r, m in places], 2.5, s.style))
    for s in series:
        curve = s.mean if s.mean.rounds else next((c for c in s.unfinished if c.rounds), s.mean)
        if curve.rounds:
            parts.append(_mark(s.style, x(curve.rounds[-1]), y(curve.means[-1])))
    return "".join(parts)


def paths(tracks: Sequence[Sequence[tuple[float, float]]], aria: str) -> str:
    """Points in a plane whose axes say nothing, a colour for each track, joined in their order."""
    side, found = 320, [point for track in tracks for point in track]
    across, up = ([point[axis] for point in found] for axis in (0, 1))
    x = Scale(min(across), max(*across, min(across) + 1e-9), 10, side - 10)
    y = Scale(min(up), max(*up, min(up) + 1e-9), side - 10, 10)
    parts = []
    for index, track in enumerate(tracks):
        places = [(x(a), y(b)) for a, b in track]
        line = "L".join(f"{_n(a)} {_n(b)}" for a, b in places)
        parts.append(f'<path class="other" d="M{line}"/>{_dots(places, 2.0, index)}')
    return _svg(side, side, "".join(parts), aria)


def swatch(index: int) -> str:
    """A method's line and mark, for legends; said by the words beside it."""
    body = f'<path class="line {style(index)}" d="M1 7h26"/>{_mark(index, 14, 7)}'
    return f'<svg class="swatch" viewBox="0 0 28 14" width="28" height="14" aria-hidden="true">{body}</svg>'


def glance(rows: Sequence[tuple[int, str, Stat, Stat]], limits: tuple[float, float], aria: str) -> str:
    """For each (style, label, initial, personalized): a hollow dot, a line, a full dot, whiskers of ± std."""
    width, step, top = 420, 46, 4
    height = top + step * len(rows) + 26
    x = Scale(*limits, 6, width - 6)
    parts = [_ruler(x, ticks(*limits, 6), top, height - 24)]
    for i, (index, label, initial, personalized) in enumerate(rows):
        if initial.mean is None or personalized.mean is None:
            continue
        y = top + step * i
        value = f"{cell(initial.mean)} → {cell(personalized.mean)}"
        parts.append(_row_text(width, y + 16, label, value))
        a, b, at = x(initial.mean), x(personalized.mean), y + 31
        parts.append(f'<path class="line thick {style(index)}" d="M{_n(a)} {at}H{_n(b)}"/>')
        for stat in (initial, personalized):
            if stat.std and stat.mean is not None:
                left, right = x(stat.mean - stat.std), x(stat.mean + stat.std)
                caps = f"M{_n(left)} {at - 4}v8M{_n(right)} {at - 4}v8"
                parts.append(f'<path class="whisker {style(index)}" d="M{_n(left)} {at}H{_n(right)}{caps}"/>')
        parts.append(f'<circle class="hollow {style(index)}" cx="{_n(a)}" cy="{at}" r="4.5"/>')
        parts.append(f'<circle class="full {style(index)}" cx="{_n(b)}" cy="{at}" r="5.5"/>')
    return _svg(width, height, "".join(parts), aria)


def bars(rows: Sequence[tuple[int, str, Stat]], most: float, aria: str) -> str:
    """Bytes for each (style, label, amount), as bars from nought to `most`."""
    width, step = 420, 40
    x = Scale(0, most or 1.0, 0, width)
    parts = []
    for i, (index, label, amount) in enumerate(rows):
        y = step * i
        parts.append(_row_text(width, y + 16, label, size(*amount)))
        parts.append(f'<rect class="groove" y="{y + 23}" width="{width}" height="8" rx="4"/>')
        if amount.mean:
            end = max(x(amount.mean), 2)
            parts.append(
                f'<rect class="fill {style(index)}" y="{y + 23}" width="{_n(end)}" height="8" rx="4"/>'
            )
    return _svg(width, step * len(rows) + 4, "".join(parts), aria)


def scatter(clients: Sequence[Client], index: int, limits: tuple[float, float], aria: str) -> str:
    """Each client's initial (across) against personalized (up); below the diagonal personalization harmed."""
    width, height = 320, 332
    x, y = Scale(*limits, 44, width - 8), Scale(*limits, height - 40, 24)
    marks = ticks(*limits, 6)
    triangle = (
        f"M{_n(x(limits[0]))} {_n(y(limits[0]))}L{_n(x(limits[1]))} {_n(y(limits[1]))}V{_n(y(limits[0]))}z"
    )
    parts = [f'<path class="shade" d="{triangle}"/>', _axes(x, y, marks, marks, name="initial", scores=True)]
    parts.append(f'<path class="diagonal" d="{triangle.partition("V")[0]}"/>')
    parts.append(f'<text x="{width - 20}" y="{height - 50}" text-anchor="end">harmed</text>')
    shrink = min(1.0, max(0.5, math.sqrt(CROWD / max(len(clients), 1))))
    for seen in (True, False):
        places = Counter(
            (round(x(c.initial)), round(y(c.personalized)))
            for c in clients
            if c.seen == seen and c.initial is not None and c.personalized is not None
        )
        for least, most, radius in ((1, 1, 3.0), (2, 4, 4.5), (5, math.inf, 6.0)):
            found = [at for at, n in places.items() if least <= n <= most]
            if found:
                parts.append(
                    _dots(found, radius * shrink, index) if seen else _diamonds(found, radius * shrink, index)
                )
    parts.append('<text x="44" y="14">personalized</text>')
    return _svg(width, height, "".join(parts), aria)


def choose(counts: Sequence[Count]) -> Partition:
    """What of a partition is drawn: all of it if it fits, else every k-th client and classes by bins."""
    seen = {c.client: c.seen for c in counts}
    kept: list[int] = []
    rules = []
    stride = math.ceil(len(seen) / COLUMNS)
    for kind in (True, False):
        members = sorted(client for client, is_seen in seen.items() if is_seen == kind)
        kept += members[::stride]
    if stride > 1:
        rules.append(f"one client in {stride} is drawn, evenly by id: {len(kept)} of {len(seen)}")
    classes = max((c.label for c in counts), default=-1) + 1
    per_row = max(1, math.ceil(classes / ROWS))
    if per_row > 1:
        rules.append(f"each line adds up {per_row} consecutive classes")
    chosen = set(kept)
    held: Counter[tuple[int, int]] = Counter()
    sizes: Counter[tuple[int, str]] = Counter()
    for c in counts:
        if c.client in chosen:
            sizes[c.client, c.split] += c.examples
            if c.split == "train":
                held[c.client, c.label // per_row] += c.examples
    return Partition(
        clients=tuple(kept),
        names={c.client: c.name for c in counts if c.client in chosen},
        unseen=frozenset(client for client in kept if not seen[client]),
        counts=dict(held),
        sizes=dict(sizes),
        rows=math.ceil(classes / per_row),
        classes_per_row=per_row,
        rule="; ".join(rules),
    )


def partition(part: Partition, aria: str) -> str:
    """Clients across, classes down, area = training examples; above, all examples of each."""
    at = _layout(part)
    layers = (_unseen_shade, _sizes, _class_names, _holdings, _client_names, _tips)
    body = "".join(layer(part, at) for layer in layers)
    return _svg(math.ceil(at.width), math.ceil(at.bottom + 42), body, aria, natural=True)


class Layout(NamedTuple):
    across: float  # width of a client
    down: float  # height of a class
    left: float
    top: float  # of the bars
    base: float  # of the bars
    body: float  # top of the classes
    bottom: float
    width: float
    xs: dict[int, float]  # the middle of each client

    def y(self, row: int) -> float:
        return self.body + self.down * (row + 0.5)


def _layout(part: Partition) -> Layout:
    across = min(30.0, max(11.0, 1000 / max(len(part.clients), 1)))
    down = min(24.0, max(10.0, 420 / max(part.rows, 1)))
    left, top, base, body = 54.0, 26.0, 82.0, 106.0
    gap = 18.0 if 0 < len(part.unseen) < len(part.clients) else 0.0
    xs = {c: left + across * (i + 0.5) + (gap if c in part.unseen else 0) for i, c in enumerate(part.clients)}
    width = left + across * len(part.clients) + gap + 10
    return Layout(across, down, left, top, base, body, body + down * part.rows, width, xs)


def _unseen_shade(part: Partition, at: Layout) -> str:
    if not part.unseen:
        return ""
    start = min(at.xs[c] for c in part.unseen) - at.across / 2 - 4
    where = f'x="{_n(start)}" y="2" width="{_n(at.width - 4 - start)}" height="{_n(at.bottom)}"'
    return f'<rect class="shade" {where} rx="6"/><text x="{_n(start + 8)}" y="18">unseen</text>'


def _sizes(part: Partition, at: Layout) -> str:
    totals = {c: sum(part.sizes.get((c, split), 0) for split in ("train", "test")) for c in part.clients}
    tallest = max(totals.values(), default=0) or 1
    parts = [
        f'<text x="{_n(at.left)}" y="{_n(at.top - 8)}">examples</text>',
        f'<text x="{_n(at.left - 8)}" y="{_n(at.top + 10)}" text-anchor="end">{tallest}</text>',
        f'<text x="{_n(at.left - 8)}" y="{_n(at.base)}" text-anchor="end">0</text>',
    ]
    wide = at.across * 0.62
    for client in part.clients:
        y = at.base
        for split in ("train", "test"):
            tall = (at.base - at.top) * part.sizes.get((client, split), 0) / tallest
            y -= tall
            where = f'x="{_n(at.xs[client] - wide / 2)}" y="{_n(y)}" width="{_n(wide)}" height="{_n(tall)}"'
            parts.append(f'<rect class="{split}" {where}/>')
    return "".join(parts)


def _class_names(part: Partition, at: Layout) -> str:
    parts = [f'<text x="{_n(at.left)}" y="{_n(at.body - 6)}">class</text>']
    every = math.ceil(13 / at.down)
    for row in range(part.rows):
        parts.append(f'<path class="grid" d="M{_n(at.left)} {_n(at.y(row))}H{_n(at.width - 10)}"/>')
        if row % every == 0:
            where = f'x="{_n(at.left - 8)}" y="{_n(at.y(row) + 4)}"'
            parts.append(f'<text {where} text-anchor="end">{row * part.classes_per_row}</text>')
    return "".join(parts)


def _holdings(part: Partition, at: Layout) -> str:
    largest = min(at.across, at.down) / 2 - 0.5
    parts = []
    for (client, row), count in sorted(part.counts.items()):
        radius = max(1.0, largest * math.sqrt(count / part.most))
        kind = "hollow" if client in part.unseen else "full"
        where = f'cx="{_n(at.xs[client])}" cy="{_n(at.y(row))}"'
        parts.append(f'<circle class="ink {kind}" {where} r="{_n(radius)}"/>')
    return "".join(parts)


def _client_names(part: Partition, at: Layout) -> str:
    every = math.ceil(28 / at.across)
    texts = [
        f'<text x="{_n(at.xs[client])}" y="{_n(at.bottom + 16)}" text-anchor="middle">{client}</text>'
        for client in part.clients[::every]
    ]
    return "".join(texts) + f'<text x="{_n(at.left)}" y="{_n(at.bottom + 36)}">client</text>'


def _tips(part: Partition, at: Layout) -> str:
    """Over each client a veil that says, under the pointer, whose column it is and what is in it."""
    held: dict[int, list[tuple[int, int]]] = {client: [] for client in part.clients}
    for (client, row), count in part.counts.items():
        held[client].append((count, row))
    parts = []
    for client in part.clients:
        kind = "unseen client" if client in part.unseen else "client"
        train, test = (part.sizes.get((client, split), 0) for split in ("train", "test"))
        most = sorted(held[client], reverse=True)[:TOLD]
        classes = ", ".join(f"class {row * part.classes_per_row}: {count}" for count, row in most)
        words = f"{kind} {client} ({part.names[client]}), {train} to train, {test} to test. {classes}"
        where = f'x="{_n(at.xs[client] - at.across / 2)}" y="{_n(at.top)}"'
        size = f'width="{_n(at.across)}" height="{_n(at.bottom - at.top)}"'
        parts.append(f'<rect class="tip" {where} {size}><title>{escape(words)}</title></rect>')
    return "".join(parts)


def choose_drift(labels: Sequence[Label]) -> Drift:
    """What of the cohorts' label mixes is drawn: the first rounds, and classes by bins if they are many."""
    found, whole = mixes(labels), whole_mix(labels)
    classes_per_line = max(1, math.ceil(len(whole) / LINES))
    return Drift(
        rounds=tuple(found)[:ROUNDS],
        mixes=(*list(found.values())[:ROUNDS], whole),
        classes=tuple(whole)[::classes_per_line],
        line={label: i // classes_per_line for i, label in enumerate(whole)},
        classes_per_line=classes_per_line,
        rounds_in_all=len(found),
    )


def drift(part: Drift, most: float, aria: str) -> str:
    """Rounds across, classes down, area = share of the cohort's examples; last, hollow, all rounds.

    `most` is the share of the largest dot, one for all pictures that are to be compared.
    """
    width, left, top, gap = 420, 44.0, 8.0, 14.0
    across = min(26.0, (width - left - gap - 8) / len(part.mixes))
    down = min(22.0, max(13.0, 1.4 * across), max(9.0, 220 / len(part.classes)))
    end, bottom = left + across * len(part.rounds), top + down * len(part.classes)
    xs = [*(left + across * (i + 0.5) for i in range(len(part.rounds))), end + gap + across / 2]
    ys = [top + down * (i + 0.5) for i in range(len(part.classes))]
    parts = [f'<path class="grid" d="M{_n(left)} {_n(y)}H{_n(end)}"/>' for y in ys]
    for label, y in list(zip(part.classes, ys, strict=True))[:: math.ceil(13 / down)]:
        parts.append(f'<text x="{_n(left - 8)}" y="{_n(y + 4)}" text-anchor="end">{label}</text>')
    for shares, x in zip(part.lines(), xs, strict=True):
        kind = "hollow" if x > end else "full"
        for line, share in shares.items():
            radius = max(0.8, min(across, down) / 2 * math.sqrt(share / most))
            parts.append(f'<circle class="ink {kind}" cx="{_n(x)}" cy="{_n(ys[line])}" r="{_n(radius)}"/>')
    for r, x in list(zip(part.rounds, xs[:-1], strict=True))[:: math.ceil(ROOM / across)]:
        parts.append(f'<text x="{_n(x)}" y="{_n(bottom + 15)}" text-anchor="middle">{r}</text>')
    parts.append(f'<text x="{_n(xs[-1])}" y="{_n(bottom + 15)}" text-anchor="middle">all</text>')
    parts.append(f'<text x="{_n(left)}" y="{_n(bottom + 32)}">round</text>')
    whens = [*(f"round {r}" for r in part.rounds), "all rounds"]
    for when, mix, x in zip(whens, part.mixes, xs, strict=True):
        largest = sorted(mix.items(), key=lambda pair: -pair[1])[:TOLD]
        told = ", ".join(f"class {label}: {cell(share)} %" for label, share in largest)
        where = f'x="{_n(x - across / 2)}" y="{_n(top)}" width="{_n(across)}" height="{_n(bottom - top)}"'
        parts.append(f'<rect class="tip" {where}><title>{when}. {told}</title></rect>')
    return _svg(width, math.ceil(bottom + 38), "".join(parts), aria)


def _svg(width: int, height: int, body: str, aria: str, natural: bool = False) -> str:
    fixed = f' width="{width}" height="{height}"' if natural else ""
    return f'<svg viewBox="0 0 {width} {height}"{fixed} role="img" aria-label="{escape(aria)}">{body}</svg>'


def _n(value: float) -> str:
    """A coordinate to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


def _axes(
    x: Scale, y: Scale, across: Sequence[float], up: Sequence[float], *, name: str, scores: bool
) -> str:
    """A light grid with scores in percent on the way up, and across too where `scores`, else rounds."""
    parts = []
    for value in up:
        parts.append(f'<path class="grid" d="M{_n(x.start)} {_n(y(value))}H{_n(x.stop)}"/>')
        at = f'x="{_n(x.start - 10)}" y="{_n(y(value) + 4)}"'
        parts.append(f'<text {at} text-anchor="end">{value * 100:g}</text>')
    for value in across:
        at = _n(x(value))
        line = f"M{at} {_n(y.stop)}V{_n(y.start)}" if scores else f"M{at} {_n(y.start)}v4"
        text = value * 100 if scores else value
        parts.append(f'<path class="grid" d="{line}"/>')
        parts.append(f'<text x="{at}" y="{_n(y.start + 17)}" text-anchor="middle">{text:g}</text>')
    at = f'x="{_n(x.stop)}" y="{_n(y.start + 33)}"'
    return "".join(parts) + f'<text {at} text-anchor="end">{name}</text>'


def _ruler(x: Scale, marks: Sequence[float], top: float, bottom: float) -> str:
    lines = [f'<path class="grid" d="M{_n(x(m))} {_n(top)}V{_n(bottom)}"/>' for m in marks]
    texts = [
        f'<text x="{_n(x(m))}" y="{_n(bottom + 17)}" text-anchor="middle">{m * 100:g}</text>' for m in marks
    ]
    return "".join(lines + texts)


def _row_text(width: int, y: float, label: str, value: str) -> str:
    room = 46 - len(value)
    short = label if len(label) <= room else label[: room - 1] + "…"
    return (
        f'<text class="name" y="{_n(y)}">{escape(short)}<title>{escape(label)}</title></text>'
        f'<text class="value" x="{width}" y="{_n(y)}" text-anchor="end">{escape(value)}</text>'
    )


def _line(curve: Curve, x: Scale, y: Scale, classes: str) -> str:
    drawn = thin(curve)
    if not drawn.rounds:
        return ""
    points = [f"{_n(x(r))} {_n(y(m))}" for r, m in zip(drawn.rounds, drawn.means, strict=True)]
    return f'<path class="{classes}" d="M{"L".join(points)}"/>'


def _band(curve: Curve, x: Scale, y: Scale, classes: str) -> str:
    drawn = thin(curve)
    if not any(drawn.stds):
        return ""
    points = list(zip(*drawn, strict=True))
    upper = [f"{_n(x(r))} {_n(y(m + s))}" for r, m, s in points]
    lower = [f"{_n(x(r))} {_n(y(m - s))}" for r, m, s in reversed(points)]
    return f'<path class="band {classes}" d="M{"L".join(upper + lower)}z"/>'


def _mark(index: int, x: float, y: float) -> str:
    at = f'transform="translate({_n(x)} {_n(y)})"'
    return f'<path class="mark {style(index)}" {at} d="{MARKS[index % COLOURS]}"/>'


def _dots(places: Sequence[tuple[float, float]], radius: float, index: int) -> str:
    """Lines of no length with round ends: the shortest way to say many dots."""
    d = "".join(f"M{_n(x)} {_n(y)}h0" for x, y in places)
    return f'<path class="dots {style(index)}" stroke-width="{_n(2 * radius)}" d="{d}"/>'


def _diamonds(places: Sequence[tuple[int, int]], radius: float, index: int) -> str:
    r = _n(radius + 0.5)
    d = "".join(f"M{x} {y}m-{r} 0l{r}-{r} {r} {r}-{r} {r}z" for x, y in places)
    return f'<path class="rings {style(index)}" d="{d}"/>'
