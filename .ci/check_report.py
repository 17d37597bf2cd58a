"""Fail unless a run's report says: completed, recovered, nothing lost or repeated, every invariant held."""

import json
import sys
from pathlib import Path

report = json.loads(Path(sys.argv[1]).read_text())
steps, samples = report["steps"], report["samples"]
checks = {
    "the run completed": report["run"]["outcome"] == "completed",
    "every step was committed": steps["committed"] == steps["target"],
    "no step was lost": steps["lost"] == 0,
    "no step was repeated": steps["repeated"] == 0,
    "no sample was lost": samples["lost"] == 0,
    "no sample was repeated": samples["repeated"] == 0,
    "a slice was lost and survived": any(recovery["lost_slices"] for recovery in report["recoveries"]),
    "a slice came back": any(recovery["joined_slices"] for recovery in report["recoveries"]),
    "every invariant was held": set(report["invariants"].values()) == {"held"},
}
for claim, holds in checks.items():
    print(f"{'ok    ' if holds else 'FAILED'} {claim}")
for recovery in report["recoveries"]:
    print(f"generation {recovery['generation']}: {recovery['mode']}, mttr {recovery['mttr_s']} s")
sys.exit(not all(checks.values()))
