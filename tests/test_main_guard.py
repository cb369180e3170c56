"""Processes that are spawned begin with the script: without a main guard there is an error."""

import subprocess
import sys

import pytest

MODEL = """
import pymc as pm
import pymc_kameleon


def sample(method):
    with pm.Model():
        pm.Normal("y", pm.Normal("x"), observed=1.0)
        step = pymc_kameleon.AdaptiveMetropolisStep(disperse=False)
        found = pm.sample(
            step=step, cores=2, chains=2, tune=5, draws=5, mp_ctx=method, progressbar=False
        )
    print(method, "sampled", found["posterior"]["x"].shape, flush=True)

"""
GUARDED = """
if __name__ == "__main__":
    sample("spawn")
"""
UNGUARDED = """
sample("fork")
try:
    sample("forkserver")
except RuntimeError as error:
    print(error, flush=True)
found = sample("spawn")
"""


def run(tmp_path, end):
    script = tmp_path / "script.py"
    script.write_text(MODEL + end)
    command = [sys.executable, str(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.numerics
def test_a_script_without_a_guard_ends_with_an_error(tmp_path):
    """But where processes are forked, which needs none."""
    found = run(tmp_path, UNGUARDED)
    assert found.returncode == 1
    sampled, forkserver = found.stdout.splitlines()
    assert sampled == "fork sampled (2, 5)"
    last = found.stderr.splitlines()[-1].removeprefix("RuntimeError: ")
    for said, line in ((forkserver, 'sample("forkserver")'), (last, 'found = sample("spawn")')):
        assert said.startswith("Each chain runs in a new process")
        assert "script.py" in said and f", `{line}`, " in said
        assert 'if __name__ == "__main__":' in said


@pytest.mark.numerics
def test_a_script_with_a_guard_samples(tmp_path):
    found = run(tmp_path, GUARDED)
    assert found.returncode == 0, found.stderr
    assert "spawn sampled (2, 5)" in found.stdout
