"""Processes that are spawned begin with the script: without a main guard there is an error."""

import subprocess
import sys
import textwrap

import pytest

MODEL = """
import pymc as pm
import pymc_kameleon


def sample():
    with pm.Model():
        pm.Normal("y", pm.Normal("x"), observed=1.0)
        step = pymc_kameleon.{step}(disperse=False)
        return pm.sample(
            step=step, cores=2, chains=2, tune=5, draws=5, mp_ctx="{method}", progressbar=False
        )

"""
GUARDED = """
if __name__ == "__main__":
    found = sample()
    print("sampled", found["posterior"]["x"].shape)
"""
UNGUARDED = """
found = sample()
"""


def run(tmp_path, end, step="AdaptiveMetropolisStep", method="spawn"):
    script = tmp_path / "script.py"
    script.write_text(MODEL.format(step=step, method=method) + textwrap.dedent(end))
    command = [sys.executable, str(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_script_without_a_guard_ends_with_an_error(method, tmp_path):
    found = run(tmp_path, UNGUARDED, method=method)
    assert found.returncode == 1
    last = found.stderr.splitlines()[-1]
    assert last.startswith("RuntimeError: Each chain runs in a new process")
    assert "script.py" in last and ", `found = sample()`, " in last
    assert 'if __name__ == "__main__":' in last


def test_a_script_with_a_guard_samples(tmp_path):
    found = run(tmp_path, GUARDED)
    assert found.returncode == 0, found.stderr
    assert "sampled (2, 5)" in found.stdout


def test_fork_needs_no_guard(tmp_path):
    assert run(tmp_path, UNGUARDED, method="fork").returncode == 0
