"""The Dask client of a run: the user's, or one of a cluster on this machine."""

import logging
import os
import signal
import threading
from contextlib import contextmanager

__all__ = ["connected"]

_log = logging.getLogger("pymc.kameleon")


def _dask():
    try:
        import dask.distributed
    except ImportError as error:
        raise ImportError(
            'pymc_kameleon.distributed.sample needs Dask: pip install "pymc_kameleon[distributed]".'
        ) from error
    return dask.distributed


@contextmanager
def connected(client, n_workers: int):
    """Give a client that is checked; without one, that of a local cluster that ends with it.

    Parameters
    ----------
    client : dask.distributed.Client or None
    n_workers : int
        Processes of the local cluster, no more than this machine has processors.

    Raises
    ------
    ImportError
        If Dask is not installed.
    TypeError, ValueError
        If the client is none, is closed, or is asynchronous.
    """
    dask = _dask()
    if client is None:
        with (
            _local_cluster(dask, min(n_workers, os.cpu_count() or 1)) as cluster,
            dask.Client(cluster, set_as_default=False) as own,
        ):
            yield own
        return
    if not isinstance(client, dask.Client):
        raise TypeError(
            f"client={client!r}: pass a dask.distributed.Client, as Client(cluster) of your "
            "cluster or Client('scheduler:8786'), or leave it out for a cluster on this machine."
        )
    if client.asynchronous:
        raise ValueError("client is asynchronous: pass one that was made with asynchronous=False.")
    if client.status != "running":
        raise ValueError(
            f"client is {client.status}: pass one that is connected, as Client(cluster), and close "
            "it after sampling."
        )
    yield client


@contextmanager
def _local_cluster(dask, n_workers):
    """Give a cluster of processes on this machine, which Ctrl-C does not end before its time."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if is_main else None
    try:
        cluster = dask.LocalCluster(
            n_workers=n_workers, threads_per_worker=1, processes=True, dashboard_address=":0"
        )
    finally:
        if is_main:
            signal.signal(signal.SIGINT, before)
    try:
        yield cluster
    finally:
        try:
            cluster.close()
        except Exception as error:  # Dask's own, where a worker has died; the draws are here
            _log.warning("The local cluster did not close as it should: %r", error)
