"""Command line of the benchmarks."""

import argparse
import subprocess
import sys
from importlib import import_module
from pathlib import Path

from benchmarks.common import all_threads, busy_machine

COMMANDS = {
    "compare": "every step and samplers of other packages on the same targets",
    "transitions": "microseconds a transition, compared with DEMetropolisZ",
    "startup": "time to the first draw, time of adaptation, size of the state",
    "threads": "seconds with the threads of linear algebra and with one, idle and busy",
    "defaults": "the plain call of every step on models of practice, beside PyMC's samplers",
    "efficiency": "effective draws per draw, evaluation and second, through pm.sample",
    "black-box": "error against all evaluations, for likelihoods that cost seconds",
    "surrogate-trust": "predicted against true error of surrogate_posterior",
    "noisy-surrogate": "effective draws an estimate of a noisy likelihood, with a surrogate",
    "batches": "wall time of chains whose likelihood sleeps, with several points at once",
    "coarse-models": "fine solves an effective draw, with and without coarse models",
    "hierarchies": "evaluations of hierarchies whose groups are black boxes, beside NUTS",
    "surrogate-parts": "what each part of SurrogateHMCStep is worth, on black boxes",
    "kamh-figure5": "figure 5 of the paper of kernel adaptive Metropolis-Hastings",
    "proposal-gallery": "proposals of the kernel-adaptive steps over banana, flower and ring",
    "thesis-convergence": "covariance error of random features, section 5.2 of the F-KAMH thesis",
    "thesis-efficiency": "F-KAMH against KAMH, section 5.1 of the F-KAMH thesis",
    "gp-mcmc-table1": "two stages with a Gaussian process, table 1 of the GP-MCMC paper",
    "shared-evaluations": "wall time of chains on a Dask cluster that tune together",
    "surrogate-cost": "microseconds that a surrogate takes, asked, taught and fitted",
    "latent-gp-metric": "milliseconds of the Riemannian metric of a latent Gaussian process",
    "latent-gp-sampling": "effective draws a second of a latent function, against NUTS",
    "latent-gp-joint": "effective draws a second of hyperparameters and function, against NUTS",
    "latent-models": "latent Gaussian models as people write them, against NUTS",
    "latent-gp-ep": "seconds of expectation propagation and Laplace on USPS digits, N = 767",
    "estimate-cost": "milliseconds and precision of a Gaussian-process classifier's estimate",
    "evidence": "log evidence by parallel tempering, beside closed forms and quadrature",
    "latent-gp-evidence": "log evidence by annealing and tempering, beside reference values",
    "glass": "pseudo-marginal GP classification, section 5.1 of the KAMH paper",
}


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, description in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=description,
            description=description,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        command.add_argument("--output", type=Path, default=Path("benchmarks/results"))
        command.add_argument(
            "--busy",
            action="store_true",
            help="with the threads that users have, beside a process that multiplies matrices",
        )
        module = import_module(f"benchmarks.{name.replace('-', '_')}")
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    arguments = parser.parse_args()
    if not arguments.busy:
        arguments.run(arguments)
        return
    given = [word for word in sys.argv[1:] if word != "--busy"]
    given += ["--output", str(arguments.output / "busy")]
    with busy_machine():
        subprocess.run([sys.executable, "-m", "benchmarks", *given], env=all_threads(), check=True)


if __name__ == "__main__":
    main()
