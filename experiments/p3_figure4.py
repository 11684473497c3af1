"""Personalized FedAvg, Jiang et al. 2019, Figure 4: both accuracies, client by client."""

from p3_figure1 import shakespeare, small
from p3_table1 import fedavg

from apiece.report.results import Run
from apiece.reproduce import Cell, Measured, Table, score


def measure(run: Run) -> Measured:
    """A dot for each client, initial accuracy across, personalized up; and the diagonal."""
    pairs = [(c.initial, c.personalized) for c in run.clients if not c.seen]
    scored = [(100 * a, 100 * b) for a, b in pairs if a is not None and b is not None]
    numbers = {
        "initial": score("unseen", "initial")(run),
        "personalized": score("unseen", "personalized")(run),
        "harmed": 100 * sum(b < a for a, b in scored) / len(scored),
    }
    dots = {str(at): [pair] for at, pair in enumerate(scored)}
    ends = [(end, end) for end in (min(map(min, scored)), 100.0)]
    return Measured(numbers, paths={"diagonal": ends, **dots})


TABLE = Table(
    id="p3-figure4",
    title="Accuracy of single unseen clients before (across) and after personalization (up)",
    source="Jiang, Konečný, Rush, Kannan 2019 (Personalized FedAvg), Figure 4",
    cells={
        ("FedAvg(10)", "EMNIST-62"): Cell(fedavg(10, 5), measure),
        ("FedAvg(10)", "Shakespeare"): Cell(shakespeare(10), measure),
    },
    published={},
    figures={"initial": "%", "personalized": "%", "harmed": "%"},
    seeds=(0, 1, 2),
    settings=(
        "The runs of p3-figure1; which model the paper shows is not said. 'harmed' is the share of clients "
        "below the diagonal. The figure is a picture without numbers.",
    ),
    departures=("As in p3-figure1.",),
    small=small,
)
