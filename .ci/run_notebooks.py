"""Execute notebooks, or all of a folder, in memory; fail when one of them does."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CELL_TIMEOUT = 600


def execute(path: Path) -> None:
    """Execute one notebook with this interpreter and leave the file as it is."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    # Whichever kernel the notebook was saved with, this environment is the one under test.
    notebook.metadata["kernelspec"] = {
        "name": "python3",
        "display_name": "Python 3",
        "language": "python",
    }
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()


def main(given: list[Path]) -> int:
    """Execute the notebooks given, or below a folder, and return the number of failures."""
    found = [
        path for place in given for path in (place.rglob("*.ipynb") if place.is_dir() else [place])
    ]
    # The later ones are the longer ones: these first, so that none runs alone at the end.
    paths = sorted((p for p in found if ".ipynb_checkpoints" not in p.parts), reverse=True)
    if not paths:
        print(f"No notebooks in {', '.join(map(str, given))}")
    # Each notebook has a kernel of its own, which does the work: two keep two cores busy.
    with ThreadPoolExecutor(2) as pool:
        return sum(pool.map(failed, paths))


def failed(path: Path) -> bool:
    """Execute one notebook, print how it went, and return whether it failed."""
    start = time.perf_counter()
    try:
        execute(path)
        verdict = "passed"
    except Exception as error:
        verdict = "FAILED"
        print(error)
    print(f"{time.perf_counter() - start:7.1f} s  {path}  {verdict}", flush=True)
    return verdict == "FAILED"


if __name__ == "__main__":
    sys.exit(min(1, main([Path(name) for name in sys.argv[1:] or ["notebooks"]])))
