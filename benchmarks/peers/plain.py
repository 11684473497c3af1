"""FedAvg as a loop in plain PyTorch: one client after another, the data on the device."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection

import torch
import torch.nn.functional as F

from benchmarks.peers import SEED, Done, Work


def rounds(
    work: Work, device: torch.device, cohort: Callable[[int], Sequence[int]] | None = None
) -> Iterator[Done]:
    """Round after round; `cohort(round)` says who takes part, everyone where it is absent."""
    data = work.data().to(device)
    clients = [torch.as_tensor(data.train[client], device=device) for client in range(data.population)]
    server, local = (work.network().to(device) for _ in range(2))
    drawn = torch.Generator(device).manual_seed(SEED)
    round = 0
    while True:
        chosen = range(data.population) if cohort is None else cohort(round)
        total = sum(len(clients[client]) for client in chosen)
        average = {name: torch.zeros_like(p) for name, p in server.state_dict().items()}
        for client in chosen:
            rows = clients[client]
            local.load_state_dict(server.state_dict())
            optimizer = torch.optim.SGD(local.parameters(), lr=work.lr)
            for _ in range(work.epochs):
                order = rows[torch.randperm(len(rows), generator=drawn, device=device)]
                for batch in order.split(work.batch):
                    optimizer.zero_grad()
                    F.cross_entropy(local(data.x[batch]), data.y[batch]).backward()
                    optimizer.step()
            for name, p in local.state_dict().items():
                average[name].add_(p, alpha=len(rows) / total)
        server.load_state_dict(average)
        yield Done(total, {name: p.detach().clone() for name, p in server.state_dict().items()})
        round += 1


def rounds_apart(
    work: Work, threads: int, cohort: Callable[[int], Sequence[int]] | None = None, processes: int = 1
) -> Iterator[Done]:
    """The same on a CPU, in a process as anybody's would be: apiece changes how its own keeps memory.

    Several processes have a share of the clients each, and go on from the average of their own: nothing but
    the first round is put together, so this is about the least that an engine of so many processes can take.
    """
    context = multiprocessing.get_context("spawn")
    asked = []
    for _ in range(processes):
        here, there = context.Pipe()
        context.Process(target=_serve, args=(there, work, threads), daemon=True).start()
        there.close()  # so that a dead process is seen as such
        asked.append(here)
    for round in count():
        chosen = list(range(len(work.sizes)) if cohort is None else cohort(round))
        for at, here in enumerate(asked):
            here.send(chosen[at::processes])
        parts = [here.recv() for here in asked]
        total = sum(part.examples for part in parts)
        names = parts[0].params
        yield Done(
            total, {name: sum(part.examples / total * part.params[name] for part in parts) for name in names}
        )


def _serve(connection: Connection, work: Work, threads: int) -> None:
    torch.set_num_threads(threads)
    with suppress(EOFError, OSError):  # who asks is gone
        for index, done in enumerate(rounds(work, torch.device("cpu"), lambda round: connection.recv())):
            connection.send(done if index == 0 else done._replace(params={}))
