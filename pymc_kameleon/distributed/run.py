"""A run as the client sees it: rounds sent out, messages taken in, what is finished kept."""

import asyncio
import contextlib
import queue

import numpy as np
from pymc.sampling.parallel import ParallelSamplingError

from pymc_kameleon.distributed.chain_record import ChainRecord, ClientStore
from pymc_kameleon.distributed.progress import Progress
from pymc_kameleon.distributed.task import run_round, stop, stored, topic
from pymc_kameleon.distributed.workbench import Part, Task

__all__ = ["Run"]

PATIENCE = 0.5
"""Seconds after which the client looks whether it was interrupted."""


def before_child(seed: np.random.SeedSequence, k: int) -> np.random.SeedSequence:
    """Return a copy of a seed of which the next child to spawn is the one after `k` others."""
    return np.random.SeedSequence(
        seed.entropy,
        spawn_key=seed.spawn_key,
        pool_size=seed.pool_size,
        n_children_spawned=seed.n_children_spawned + k,
    )


class Run:
    """Chains on a cluster.

    Parameters
    ----------
    client : dask.distributed.Client
    name : str
        Of this run, of which there is no other.
    data : bytes
        A pickled `Parcel`.
    rng : numpy.random.Generator
        That of PyMC, which spawns one for each chain.
    chains : int
    store : ClientStore or None
    progress : Progress
    """

    def __init__(
        self,
        client,
        name: str,
        data: bytes,
        rng: np.random.Generator,
        chains: int,
        store: ClientStore | None,
        progress: Progress,
    ):
        self.client, self.name, self.store, self.progress = client, name, store, progress
        self.data = client.submit(stored, data, key=f"model-{name}")
        self.bit_generator = type(rng.bit_generator)
        self.seed = rng.bit_generator.seed_seq
        self.records = [ChainRecord() for _ in range(chains)]
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()

    def sample(self, lengths: list[int], draws: int) -> list[ChainRecord]:
        """Sample all rounds; of an interrupted run, return what is finished.

        Parameters
        ----------
        lengths : list of int
            Tuning draws of each round.
        draws : int
            Draws after tuning, in the last one.

        Raises
        ------
        ParallelSamplingError
            If a chain fails.
        """
        self.client.subscribe_topic(topic(self.name), lambda event: self.inbox.put(event[1]))
        futures: dict = {}
        number = 0
        try:
            for number, tune in enumerate(lengths):
                is_last = number == len(lengths) - 1
                tasks = self._tasks(number, len(lengths), tune, draws if is_last else 0)
                known, futures = self._known(number), {}
                for task in tasks:
                    futures[task.chain] = self.client.submit(
                        run_round,
                        self.data,
                        known,
                        task,
                        key=f"chain-{task.chain}-round-{number}-{self.name}",
                        pure=False,
                    )
                self._gather(futures, number)
        except KeyboardInterrupt:
            self._keep_unfinished(futures, number)
        except Exception:
            with contextlib.suppress(Exception):  # the cluster may be what has failed
                self.client.run(stop, self.name, on_error="ignore")
            raise
        finally:
            with contextlib.suppress(Exception):
                self.client.cancel(list(futures.values()))
                self.client.unsubscribe_topic(topic(self.name))
        return self.records

    def _known(self, number):
        if self.store is None:
            return None
        return self.client.submit(stored, self.store.known(), key=f"known-{number}-{self.name}")

    def _tasks(self, number, rounds, tune, draws):
        for chain, record in enumerate(self.records):
            seed = before_child(self.seed, chain)
            if rounds > 1:
                seed = before_child(*seed.spawn(1), number)
            start = record.parts[-1].point if record.parts else None
            yield Task(self.name, chain, number, self.bit_generator, seed, tune, draws, start)

    def _gather(self, futures, number):
        """Wait for a round, taking in messages."""
        for chain, future in futures.items():
            future.add_done_callback(lambda _, chain=chain: self.inbox.put(chain))
        parts: dict[int, Part] = {}
        while len(parts) < len(futures):
            try:
                found = self.inbox.get(timeout=PATIENCE)
            except queue.Empty:
                continue
            if isinstance(found, dict):
                self._take(found, number)
            else:
                parts[found] = self._result(found, futures[found])
                self._keep(found, number, parts[found])
        for chain, record in enumerate(self.records):
            record.parts.append(parts[chain])
        if self.store is not None:
            self.store.learn([parts[chain] for chain in range(len(parts))])

    def _take(self, message, number):
        chain = message["chain"]
        if self.store is not None:
            self.store.keep(chain, message["round"], message["first"], message["found"])
        if message["round"] == number:
            done = self.records[chain].n_draws
            self.progress.show(chain, done + message["draws"], message["statistics"])

    def _keep(self, chain, number, part):
        if self.store is not None:
            self.store.keep(chain, number, 0, part.found)
        self.progress.show(chain, self.records[chain].n_draws + part.n_draws)

    def _result(self, chain, future):
        try:
            return future.result()
        except (Exception, asyncio.CancelledError) as error:
            # What it evaluated before comes by messages, and is kept.
            while not self.inbox.empty():
                found = self.inbox.get()
                if isinstance(found, dict) and self.store is not None:
                    self.store.keep(found["chain"], found["round"], found["first"], found["found"])
            raise ParallelSamplingError(f"Chain {chain} failed with: {error}", chain) from error

    def _keep_unfinished(self, futures, number):
        """Keep what there is of a round that was interrupted, and end its chains."""
        answers = self.client.run(stop, self.name, on_error="ignore")
        unfinished = {
            chain: part
            for of_worker in answers.values()
            for chain, of_round, part in of_worker or []
            if of_round == number
        }
        for chain, record in enumerate(self.records):
            if len(record.parts) > number:
                continue
            future = futures.get(chain)
            part = unfinished.get(chain)
            if future is not None and future.status == "finished":
                part = future.result()
            if part is not None:
                self._keep(chain, number, part)
                record.parts.append(part)
