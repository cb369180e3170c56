"""A run as the client sees it: rounds sent out, messages taken in, what is finished kept."""

import asyncio
import contextlib
import math
import pickle
import queue

import numpy as np
import pymc as pm
from pymc.backends.ndarray import NDArray
from pymc.sampling.parallel import ParallelSamplingError

from pymc_kameleon._compat import progress_bars
from pymc_kameleon.distributed.worker import Found, Part, Task, run_round, same, stop, topic
from pymc_kameleon.model.traced import traced
from pymc_kameleon.store.evaluation_store import is_known

PATIENCE = 0.5
"""Seconds after which the client looks whether it was interrupted."""

POWER, LEAST_TUNING = 0.6, 60


def tuning_rounds(tune: int, rounds: int) -> list[int]:
    """Divide tuning into rounds: draws of each, of which the last is the longest."""
    rounds = min(rounds, max(tune, 1))
    # The last one is double: only there a chain keeps what it learns of itself.
    length = max(1, tune // (rounds + 1))
    return [length] * (rounds - 1) + [tune - length * (rounds - 1)]


def shared_tuning(tune: int, chains: int) -> int:
    """Draws of tuning of each of several chains that share what they evaluate, from those of one.

    Each has to learn its own step size and scales, so that it is more than a share of what one
    chain alone takes.
    """
    return min(tune, max(LEAST_TUNING, math.ceil(tune / chains**POWER)))


def before_child(seed: np.random.SeedSequence, k: int) -> np.random.SeedSequence:
    """Return a copy of a seed of which the next child to spawn is the one after `k` others."""
    return np.random.SeedSequence(
        seed.entropy,
        spawn_key=seed.spawn_key,
        pool_size=seed.pool_size,
        n_children_spawned=seed.n_children_spawned + k,
    )


class ClientStore:
    """The user's store, filled with what workers find; the next round begins with what is known."""

    def __init__(self, store, model: int, run: str):
        self.store, self.model, self.run = store, model, run
        self.known = [
            Found.of(known.point, known.value, gradient=known.gradient)
            for known in store.read(model)
            if is_known(known)
        ]
        self._stored: dict[int, tuple[int, int]] = {}  # chain -> its round, and how many of it

    def keep(self, chain: int, number: int, first: int, found: list) -> None:
        """Store evaluations of a round, the first of which has this place, that are not yet."""
        last, stored = self._stored.get(chain, (number, 0))
        if last > number:
            return
        if last < number:
            stored = 0
        for one in found[max(stored - first, 0) :]:
            self.store.add(self.model, f"{self.run}-{chain}", *Found(*one).arguments())
        self._stored[chain] = number, max(stored, first + len(found))

    def learn(self, parts: list[Part]) -> None:
        """Let the next round know what the chains found in this one, in the order of chains."""
        self.known += [one for part in parts for one in part.found if is_known(one)]


class Progress:
    """PyMC's bars, one for each chain, moved by messages of workers."""

    def __init__(self, step, chains: int, draws: int, tune: int, progressbar, theme):
        self.bars = progress_bars(step, chains, draws, tune, progressbar, theme)
        self.tune, self.total = tune, draws + tune
        self.shown = [0] * chains
        self.statistics: list[list[dict] | None] = [None] * chains

    def show(self, chain: int, n: int, statistics: list[dict] | None = None) -> None:
        """Show that a chain has made `n` draws, and the statistics of the last one."""
        if statistics:
            self.statistics[chain] = statistics
        shown, latest = self.shown[chain], self.statistics[chain]
        if latest is None or n <= shown:
            return
        for draw in range(shown, n):
            self._update(chain, draw, latest, is_last=False)
        self.shown[chain] = n
        if n == self.total and (not self.bars.combined_progress or min(self.shown) == n):
            self._update(chain, n - 1, latest, is_last=True)

    def _update(self, chain, draw, statistics, is_last):
        self.bars.update(
            chain_idx=chain,
            is_last=is_last,
            draw=draw,
            tuning=draw < self.tune,
            stats=statistics,
        )


def trace_of(parts: list[Part], model: pm.Model, var_names, chain: int, dtypes) -> NDArray:
    """Return the parts of a chain as one trace of PyMC, with statistics of these types."""
    like = parts[0].samples if parts else {}
    trace = NDArray(
        model=model,
        vars=traced(model, var_names),
        fn=lambda *values: values,
        var_shapes={name: values.shape[1:] for name, values in like.items()},
        var_dtypes={name: values.dtype for name, values in like.items()},
    )
    trace.setup(sum(part.n_draws for part in parts), chain, dtypes)
    for part in parts:
        for k in range(part.n_draws):
            point = {name: part.samples[name][k] for name in trace.varnames}
            statistics = [{n: v[k] for n, v in of_step.items()} for of_step in part.statistics]
            trace.record(point, statistics, in_warmup=False)  # no trace of this kind looks at it
    return trace


class Run:
    """Chains on a cluster, of a packed parcel; `name` is that of no other run."""

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
        self.data = client.submit(same, data, key=f"model-{name}")
        self.bit_generator = type(rng.bit_generator)
        self.seed = rng.bit_generator.seed_seq
        self.chains: list[list[Part]] = [[] for _ in range(chains)]
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()

    def sample(self, lengths: list[int], draws: int) -> list[list[Part]]:
        """Sample rounds of these lengths and then so many draws; return the parts of each chain.

        Of an interrupted run they are what is finished. If a chain fails there is a
        ParallelSamplingError.
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
        return self.chains

    def _known(self, number):
        if self.store is None:
            return None
        known = pickle.dumps(self.store.known)
        return self.client.submit(same, known, key=f"known-{number}-{self.name}")

    def _tasks(self, number, rounds, tune, draws):
        for chain, parts in enumerate(self.chains):
            seed = before_child(self.seed, chain)
            if rounds > 1:
                seed = before_child(*seed.spawn(1), number)
            start = parts[-1].point if parts else None
            yield Task(self.name, chain, number, self.bit_generator, seed, tune, draws, start)

    def _gather(self, futures, number):
        """Wait for a round, taking in messages."""
        for chain, future in futures.items():
            future.add_done_callback(lambda _, chain=chain: self.inbox.put(chain))
        made: dict[int, Part] = {}
        while len(made) < len(futures):
            try:
                found = self.inbox.get(timeout=PATIENCE)
            except queue.Empty:
                continue
            if isinstance(found, dict):
                self._take(found, number)
            else:
                made[found] = self._result(found, futures[found])
                self._keep(found, number, made[found])
        for chain, parts in enumerate(self.chains):
            parts.append(made[chain])
        if self.store is not None:
            self.store.learn([parts[-1] for parts in self.chains])

    def _take(self, message, number):
        chain = message["chain"]
        if self.store is not None:
            self.store.keep(chain, message["round"], message["first"], message["found"])
        if message["round"] == number:
            self.progress.show(
                chain, self._n_draws(chain) + message["draws"], message["statistics"]
            )

    def _keep(self, chain, number, part):
        if self.store is not None:
            self.store.keep(chain, number, 0, part.found)
        self.progress.show(chain, self._n_draws(chain) + part.n_draws)

    def _n_draws(self, chain):
        return sum(part.n_draws for part in self.chains[chain])

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
        for chain, parts in enumerate(self.chains):
            if len(parts) > number:
                continue
            future, part = futures.get(chain), unfinished.get(chain)
            if future is not None and future.status == "finished":
                part = future.result()
            if part is not None:
                self._keep(chain, number, part)
                parts.append(part)
