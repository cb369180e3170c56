"""Command line of the demo: ``python -m pymc_kameleon``."""

from __future__ import annotations

import argparse
from pathlib import Path

import pymc_kameleon.demo
from pymc_kameleon.demo import command as demo

__all__ = ["main"]


def _arguments(command_line: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pymc_kameleon", description=pymc_kameleon.demo.__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--draws", type=int, help=f"KameleonStep's draws (default {demo.DRAWS})")
    parser.add_argument("--tune", type=int, help=f"its tuning draws (default {demo.TUNE})")
    parser.add_argument("--chains", type=int, default=demo.CHAINS, help="default %(default)s")
    parser.add_argument(
        "--output", type=Path, default=Path("lynx-hare"), help="folder, default %(default)s"
    )
    parser.add_argument("--seed", type=int, default=demo.SEED, help="default %(default)s")
    parser.add_argument(
        "--quick", action="store_true", help="a few draws only, to see that everything works"
    )
    arguments = parser.parse_args(command_line)
    if arguments.chains < 2:
        parser.error(f"--chains must be 2 or more for an R-hat: {arguments.chains}")
    draws, tune = (
        (demo.QUICK_DRAWS, demo.QUICK_TUNE) if arguments.quick else (demo.DRAWS, demo.TUNE)
    )
    arguments.draws = draws if arguments.draws is None else arguments.draws
    arguments.tune = tune if arguments.tune is None else arguments.tune
    if arguments.draws < 4:
        parser.error(f"--draws must be 4 or more: {arguments.draws}")
    if arguments.tune < 0:
        parser.error(f"--tune must not be negative: {arguments.tune}")
    return arguments


def main(command_line: list[str] | None = None) -> None:
    """Run the demo.

    Parameters
    ----------
    command_line : list of str, optional
        Arguments; those of the process by default.
    """
    arguments = _arguments(command_line)
    demo.run_demo(
        arguments.output,
        draws=arguments.draws,
        tune=arguments.tune,
        chains=arguments.chains,
        random_seed=arguments.seed,
    )


if __name__ == "__main__":
    main()
