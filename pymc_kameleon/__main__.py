"""Command line of the demo: ``python -m pymc_kameleon``."""

import argparse
from pathlib import Path

from pymc_kameleon.demo import run_demo


def main(command_line: list[str] | None = None) -> None:
    """Run the demo, with the arguments of the process by default."""
    parser = argparse.ArgumentParser(
        prog="python -m pymc_kameleon",
        description="Hares and lynx of the Hudson Bay: an ODE model without gradients, sampled "
        "with KameleonStep and with PyMC's DEMetropolisZ.",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("lynx-hare"), help="folder, default %(default)s"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few draws only, to see that everything works"
    )
    arguments = parser.parse_args(command_line)
    run_demo(arguments.output, **({"draws": 50, "tune": 50} if arguments.quick else {}))


if __name__ == "__main__":
    main()
