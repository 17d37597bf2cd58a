"""Examples, and the code in the documents, run as they are printed under the local adapter."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_processes import elastic, environment, left_of, report_of

REPOSITORY = Path(__file__).resolve().parents[3]
STEPS = 120


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("name", "samples"), [("micro_batches.py", 96 * STEPS)])
def test_example_loses_a_slice_and_nothing_else(tmp_path: Path, name: str, samples: int) -> None:
    faults = ("--fault", "kill:slice=1@step=20", "--rejoin-after-steps", "20")
    out = ("--adapter", "local", "--devices-per-host", "1", "--out", str(tmp_path))
    job = elastic("launch", *out, *faults, "--", str(REPOSITORY / "examples" / name))
    output, _ = job.communicate(timeout=150)
    assert job.returncode == 0, output
    report = report_of(tmp_path)
    assert (report["steps"]["committed"], report["samples"]["consumed"]) == (STEPS, samples)
    assert set(report["invariants"].values()) == {"held"}
    assert [recovery["mode"] for recovery in report["recoveries"]] == ["in-place", "scale-up"]
    assert not left_of(report)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_code_in_the_document_on_batches_runs(tmp_path: Path) -> None:
    text = (REPOSITORY / "docs" / "batches.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    by_hand = """
batch = {"x": np.ones((2, 3, 16)), "y": np.zeros((2, 3)), "weight": np.array([[1.0, 1, 1], [1, 0, 1]])}
flat = {key: array.reshape(6, *array.shape[2:]) for key, array in batch.items()}
expected = elastic.mean_value_and_grad(losses_of)(init(), batch)
for found in (value_and_grad(init(), batch), jax.value_and_grad(loss_of)(init(), flat)):
    jax.tree.map(lambda f, e: np.testing.assert_allclose(f, e, rtol=1e-5), found, expected)
"""
    script = tmp_path / "script.py"
    script.write_text("\n".join([*blocks, by_hand]))
    settings = environment(devices=3) | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=settings, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    reports = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/report.json")]
    assert [report["samples"]["consumed"] for report in reports] == [20 * 48] * 2
