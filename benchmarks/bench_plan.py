"""How long does it take to plan the recovery of a large model on thousands of chips?

A 405B-like model (126 layers of 9 arrays, embeddings, a norm; times params, mu and nu: 3,411 arrays), 32
slices of 256 chips, 4 chips a host, one slice lost or returning, in four situations. Every figure is of a
process of its own on one core: the median of its plans, and the most memory it had. Bound: JAX's own index
maps (`NamedSharding.devices_indices_map`) of the model's distinct shapes on as many devices, one core, in the
same run; a plan needs at least to know who has what. Then the same for more chips, more arrays, and a shape
of its own for every array; the growth is drawn into a PNG beside the JSON.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from machine import hand_over, is_quiet, load1, run_child
from plan_model import CASES, CHIPS_A_HOST, Size, arrays, situation
from planning_children import answer_child, jax_maps_s, options, peak_mb

from reshard.planner import make_plan

TARGET_S = {"base": 0.5, "large": 5.0, "distinct": 5.0}
TARGET_MB = 1000


def child(request: dict[str, Any], size: Size) -> dict[str, float]:
    """Measure one case at one size in this process."""
    if request["case"] == "jax":
        return {"seconds": statistics.median(jax_maps_s(size) for _ in range(request["reps"]))}
    target, stock = situation(request["case"], size)
    seconds = []
    for _ in range(request["reps"]):
        began_s = time.perf_counter()
        plan = make_plan(target, stock, step=1)
        seconds.append(time.perf_counter() - began_s)
    sent = plan.bytes_sent().values()
    return {
        "seconds": statistics.median(seconds),
        "peak_mb": peak_mb(),
        "rows": sum(len(group.nbytes) for group in plan.groups),
        "bytes_moved": plan.bytes_moved,
        "largest_over_mean_source": max(sent) * len(sent) / sum(sent) if sent else 1.0,
    }


def measure(case: str, size: Size, reps: int) -> dict[str, Any]:
    request = json.dumps({"case": case, "size": asdict(size), "reps": reps})
    return {
        "case": case,
        **asdict(size),
        "num_chips": size.num_chips,
        "num_arrays": num_arrays(size),
        **run_child(__file__, f"{case} {size}", "--child", request),
    }


def num_arrays(size: Size) -> int:
    return len(arrays(size, over_slices=False))


def sizes(*, smoke: bool) -> dict[str, list[Size]]:
    """The sizes of each part of the benchmark; the first of "chips" is the base."""
    slices, chips, layers = (4, 16, 2) if smoke else (32, 256, 126)
    base = Size(num_slices=slices, chips_a_slice=chips, num_layers=layers)

    def sized(num_slices: int, chips_a_slice: int, num_layers: int) -> Size:
        return Size(num_slices=num_slices, chips_a_slice=chips_a_slice, num_layers=num_layers)

    factors = (2,) if smoke else (4, 16)
    return {
        "base": [base],
        "chips": [sized(slices, chips * f, layers) for f in factors]
        + [sized(slices, chips // f, layers) for f in factors if chips // f >= 8],
        "large": [sized(slices * factors[-1], chips, layers)],
        "arrays": [sized(slices, chips, layers * f) for f in factors],
        "distinct": [Size(**asdict(base) | {"is_distinct": True})],
    }


def main() -> None:
    given = options(__doc__ or "", "plan.json", "plans in each process")
    if given.child:
        answer_child(given.child, child)
        return
    load_before = load1()
    parts = sizes(smoke=given.smoke)
    base = parts["base"][0]
    jax_s = measure("jax", base, given.reps)["seconds"]
    print(
        f"bound   {jax_s * 1e3:.0f} ms: JAX's index maps of the distinct shapes on {base.num_chips:,} devices"
    )
    found: list[dict[str, Any]] = []
    for part, of_part in parts.items():
        for size in of_part:
            reps = given.reps if part == "base" else 1
            for case in CASES:
                found.append({"part": part, **measure(case, size, reps)})
                print(line(found[-1], jax_s))
    if not is_quiet(load_before, 0):
        print(f"the machine was not quiet before the start (load {load_before}): do not quote these figures")
    picture = given.json.with_suffix(".png")
    draw(found, picture)
    print(f"growth drawn in {picture}")
    figures = {
        "jax_maps_s": round(jax_s, 4),
        "plans": found,
        "misses": [f"{one['part']} {one['case']}" for one in found if is_miss(one)],
        "picture": str(picture),
    }
    hand_over("plan", figures, given.json, smoke=given.smoke, load_before=load_before)


def target_s(one: dict[str, Any]) -> float | None:
    if one["part"] == "chips":
        return TARGET_S["large"] if one["num_chips"] >= 131_072 else None
    return TARGET_S.get(one["part"])


def is_miss(one: dict[str, Any]) -> bool:
    bound_s = target_s(one)
    return bound_s is not None and (
        one["seconds"] > bound_s or (one["part"] == "base" and one["peak_mb"] > TARGET_MB)
    )


def line(one: dict[str, Any], jax_s: float) -> str:
    bound_s = target_s(one)
    verdict = "" if bound_s is None else f" (target {bound_s} s: {'miss' if is_miss(one) else 'pass'})"
    return (
        f"{one['part']:<9}{one['case']:<9} {one['num_chips']:>7,} chips, {one['num_slices']:>3} slices,"
        f" {one['num_arrays']:>6,} arrays: {one['seconds']:.3f} s = {one['seconds'] / jax_s:.1f} bounds,"
        f" {one['peak_mb']:.0f} MB; largest source {one['largest_over_mean_source']:.3f} of the mean{verdict}"
    )


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Draw seconds against hosts and against arrays, all logarithmic, with a line of linear growth."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 5), sharey=True)
    across = {"hosts": ("chips", lambda one: one["num_chips"] // CHIPS_A_HOST)}
    across["arrays"] = ("arrays", lambda one: one["num_arrays"])
    for axes, (label, (part, number)) in zip(panels, across.items(), strict=True):
        shown = [one for one in found if one["part"] in ("base", part)]
        for case, about in CASES.items():
            points = sorted((number(one), one["seconds"]) for one in shown if one["case"] == case)
            axes.plot(*zip(*points, strict=True), marker="o", label=f"{case}: {about}")
        least, most = min(map(number, shown)), max(map(number, shown))
        top_s = max(one["seconds"] for one in shown)
        axes.plot([least, most], [top_s * least / most, top_s], "k:", label="linear")
        axes.set(xscale="log", yscale="log", xlabel=label)
    panels[0].set(ylabel="seconds to plan, one core")
    panels[1].legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
