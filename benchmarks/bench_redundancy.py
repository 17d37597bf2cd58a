"""How long does it take to say who keeps which copy on thousands of chips, and are the shares even?

A 405B-like model (`plan_model.py`: 3,411 arrays), 4 chips a host, two slices with each box. Every host works
this out anew at each change of topology: *captures* of state that all slices hold, and *buddies* of state
that is cut over all slices, as columns for the planner. Beside them what one host takes of it in the end: the
list of its own shards, its share of a write to the persistent tier, the indexes for comparing its checksums.
Bound: JAX's own index maps of the model's distinct shapes on as many devices as the base has, on one core, in
the same run. Every figure is of processes of their own on one core: the first answer, nothing cached.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
from machine import hand_over, is_quiet, load1, run_child
from plan_model import Size, layout
from planning_children import answer_child, jax_maps_s, options, peak_mb

from reshard.copies import CopyIndex
from reshard.layout import Layout
from reshard.persist_shares import host_persist_shares
from reshard.redundancy import buddy_stock, capture_stock, host_buddies, host_captures
from reshard.stock import Stock

REPLICAS = 2
TARGET_S = {"base": 0.3, "large": 3.0}
TARGET_MB = 500


def child(request: dict[str, Any], size: Size) -> dict[str, float]:
    """Measure one answer at one size in this process."""
    if request["answer"] == "jax":
        return {"seconds": jax_maps_s(size)}
    is_buddies = request["answer"] == "buddies"
    state = layout(size, list(range(size.num_slices)), over_slices=is_buddies)
    began_s = time.perf_counter()
    stock = buddy_stock(state, REPLICAS) if is_buddies else capture_stock(state, REPLICAS)
    seconds = time.perf_counter() - began_s
    own_s = own_seconds(state, is_buddies=is_buddies)
    return {"seconds": seconds, "peak_mb": peak_mb(), **own_s, **described(state, stock)}


def own_seconds(state: Layout, *, is_buddies: bool) -> dict[str, float]:
    """Seconds for what one host makes of the answer, once it is known."""
    host = state.mesh.distinct_hosts()[-1]
    list_own = host_buddies if is_buddies else host_captures
    made: dict[str, Callable[[], object]] = {"own_s": lambda: list_own(state, host, REPLICAS)}
    if not is_buddies:
        made["own_write_s"] = lambda: host_persist_shares(state, host, REPLICAS)
        made["own_stored_index_s"] = lambda: CopyIndex.of_captures(state, REPLICAS).ids[host]
        made["own_device_index_s"] = lambda: CopyIndex.of_devices(state).ids[host]
    found: dict[str, float] = {}
    for name, make in made.items():
        began_s = time.perf_counter()
        make()
        found[name] = time.perf_counter() - began_s
    return found


def described(state: Layout, stock: Stock) -> dict[str, float]:
    """How even the shares are, and how many columns describe them."""
    loads = np.array(list(stock.bytes_by_host(state).values()))
    return {
        "largest_over_mean_share": loads.max() / loads.mean(),
        "smallest_over_mean_share": loads.min() / loads.mean(),
        "num_groups": len(stock.groups),
        "num_columns": len({(id(group.host), id(group.box)) for group in stock.groups}),
    }


def measure(answer: str, size: Size, reps: int) -> dict[str, Any]:
    """The run of median time among `reps`, each in a process of its own."""
    request = json.dumps({"answer": answer, "size": asdict(size)})
    runs = [run_child(__file__, f"{answer} {size}", "--child", request) for _ in range(reps)]
    median = sorted(runs, key=lambda run: run["seconds"])[len(runs) // 2]
    return {
        "answer": answer,
        "num_slices": size.num_slices,
        "num_chips": size.num_chips,
        "num_hosts": size.num_hosts,
        **{name: round(value, 5) for name, value in median.items()},
    }


def sizes(*, smoke: bool) -> list[tuple[str, Size]]:
    """The sizes to measure, with the target each has; the base first."""
    chips, layers = (16, 2) if smoke else (256, 126)
    shapes = [(4, chips), (3, chips), (4, 4 * chips)]
    if not smoke:
        shapes = [(32, chips), (31, chips), (32, 16 * chips), (512, chips)]
    targets = ("base", "base", "large", "large")
    return [
        (target, Size(num_slices=num_slices, chips_a_slice=chips_a_slice, num_layers=layers))
        for target, (num_slices, chips_a_slice) in zip(targets, shapes, strict=False)
    ]


def main() -> None:
    given = options(__doc__ or "", "redundancy.json", "processes for each figure")
    if given.child:
        answer_child(given.child, child)
        return
    load_before = load1()
    wanted = sizes(smoke=given.smoke)
    base = wanted[0][1]
    jax_s = measure("jax", base, given.reps)["seconds"]
    print(
        f"bound    {jax_s * 1e3:.0f} ms: JAX's index maps of the distinct shapes, {base.num_chips:,} devices"
    )
    found: list[dict[str, Any]] = []
    for target, size in wanted:
        for answer in ("captures", "buddies"):
            found.append({"target_s": TARGET_S[target], **measure(answer, size, given.reps)})
            print(line(found[-1], jax_s))
    if not is_quiet(load_before, 0):
        print(f"the machine was not quiet before the start (load {load_before}): do not quote these figures")
    figures = {
        "jax_maps_s": jax_s,
        "answers": found,
        "misses": [
            f"{one['answer']} {one['num_chips']}/{one['num_slices']}" for one in found if is_miss(one)
        ],
    }
    hand_over("redundancy", figures, given.json, smoke=given.smoke, load_before=load_before)


def is_miss(one: dict[str, Any]) -> bool:
    return bool(one["seconds"] > one["target_s"] or one["peak_mb"] > TARGET_MB)


def line(one: dict[str, Any], jax_s: float) -> str:
    own_ms = ", ".join(
        f"{name.removesuffix('_s').replace('_', ' ')} {value * 1e3:.0f} ms"
        for name, value in one.items()
        if name.startswith("own")
    )
    return (
        f"{one['answer']:<9}{one['num_chips']:>7,} chips, {one['num_slices']:>3} slices:"
        f" {one['seconds']:.3f} s = {one['seconds'] / jax_s:.1f} bounds, {one['peak_mb']:.0f} MB (target"
        f" {one['target_s']} s, {TARGET_MB} MB: {'miss' if is_miss(one) else 'pass'}); largest share"
        f" {one['largest_over_mean_share']:.4f} of the mean; {one['num_groups']:.0f} groups in"
        f" {one['num_columns']:.0f} columns; {own_ms}"
    )


if __name__ == "__main__":
    main()
