"""The Dask client of a run: the user's, or one of a cluster on this machine."""

import os
from contextlib import contextmanager

__all__ = ["connected"]


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
            dask.LocalCluster(
                n_workers=min(n_workers, os.cpu_count() or 1),
                threads_per_worker=1,
                processes=True,
                dashboard_address=None,
            ) as cluster,
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
