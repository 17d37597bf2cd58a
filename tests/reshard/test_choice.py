import json

import pytest
from choice_cases import array, changes, choose, cluster, survivors
from hypothesis import given
from hypothesis import strategies as st
from reshard_strategies import PROPERTY

from reshard.boxes import volume
from reshard.choice import ALLOWED, LayoutChoice, choose_layout
from reshard.choice_figures import Candidate, Figures, Limits, SimpleCosts
from reshard.errors import UsageError
from reshard.fits import fitted_spec
from reshard.holdings import Holding, layout_holdings
from reshard.ids import HostId
from reshard.layout import Layout
from reshard.planner import make_plan
from reshard.stock import Stock

WITH_PAD = ALLOWED | {"pad"}
DATA = {"data": 4, "model": 8}


def by_kind(choice: LayoutChoice) -> dict[str, Candidate]:
    return {candidate.kind: candidate for candidate in choice.candidates}


def spec_of(choice: LayoutChoice, path: str) -> tuple[tuple[str, ...], ...]:
    return next(array.spec for array in choice.require().arrays if array.path == path)


# ---- every case has an answer --------------------------------------------------------------------


def test_choice_shrinks_the_axis_where_every_dim_divides():
    choice = choose(cluster(DATA, 4), [array("w", (4096, 1536), "model", "data")], (1,))
    assert choice.sentence() == "data=3 on 3 slices"
    assert choice.require().mesh.axis_sizes == (3, 8)
    assert [candidate.kind for candidate in choice.candidates] == ["shrink"]


def test_choice_replicates_optimizer_rows_that_do_not_divide_over_three_slices():
    arrays = [array("params", (4096, 4096), "", "model"), array("mu", (4096, 4096), "data", "model")]
    choice = choose(cluster(DATA, 4), arrays, (1,))
    assert choice.sentence() == (
        "data=3 on 3 slices, 1 array replicated; "
        "dim 0 (4,096) of mu does not divide into 3: replicated over the axis"
    )
    assert spec_of(choice, "mu") == ((), ("model",))
    assert by_kind(choice)["shrink"].refused == "dim 0 (4,096) of mu does not divide into 3"
    assert by_kind(choice)["pad"].refused == "pad not allowed here"
    assert by_kind(choice)["fewer-slices"].idle == (3,)


def test_choice_pads_optimizer_rows_where_it_may_and_memory_is_short():
    arrays = [array("params", (4096, 4096), "", "model"), array("mu", (4096, 4096), "data", "model")]
    limits = Limits(device_memory_bytes=12_000_000)
    choice = choose(cluster(DATA, 4), arrays, (1,), allow=WITH_PAD, limits=limits)
    assert choice.sentence() == (
        "data=3 on 3 slices, 1 array padded; dim 0 (4,096) of mu does not divide into 3: padded to 4,098, "
        "2 of them empty (the program must store it so, as JAX refuses uneven shards)"
    )
    assert [one.padded for one in choice.require().arrays] == [False, True]
    assert by_kind(choice)["replicate"].refused == "a device needs 16.8 MB and has 12.0 MB"
    assert by_kind(choice)["fewer-slices"].refused == "a device needs 12.6 MB and has 12.0 MB"


@pytest.mark.parametrize(("rows", "padded_to"), [(50_257, 50_259), (50_260, 50_262)])
def test_choice_keeps_a_padded_vocabulary_padded(rows, padded_to):
    mesh = cluster(DATA, 4)
    choice = choose(mesh, [array("embedding", (rows, 512), "data", "model", padded=True)], (0,))
    (fallback,) = choice.candidates[0].fallbacks
    assert (choice.candidates[0].kind, fallback.stored_size, fallback.is_new) == ("shrink", padded_to, False)
    assert choice.sentence().endswith(f"padded to {padded_to:,}, 2 of them empty (as before)")


def test_choice_shrinks_a_vocabulary_of_128256_over_three_slices_but_not_over_five():
    embedding = [array("embedding", (128_256, 512), "data", "model")]
    assert choose(cluster(DATA, 4), embedding, (0,)).sentence() == "data=3 on 3 slices"
    choice = choose(cluster({"data": 6, "model": 8}, 6), embedding, (0,))
    assert by_kind(choice)["shrink"].refused == "dim 0 (128,256) of embedding does not divide into 5"
    assert choice.sentence().startswith("data=5 on 5 slices, 1 array replicated")


def test_choice_answers_an_odd_vocabulary_when_one_slice_grows_to_three():
    mesh = cluster({"data": 1, "model": 8}, 1)
    layout = Layout(mesh=mesh, arrays=(array("embedding", (50_257, 512), "data"),), elastic_axis="data")
    hosts = [HostId(index, host) for index in range(3) for host in range(2)]
    choice = choose_layout(layout, hosts, 4)
    assert choice.sentence() == (
        "data=3 on 3 slices, 1 array replicated; "
        "dim 0 (50,257) of embedding does not divide into 3: replicated over the axis"
    )


EXPERTS = [
    array("experts/up", (64, 4096, 14336), "expert", "", "model"),
    array("experts/down", (64, 14336, 4096), "expert", "model"),
    array("attention", (4096, 4096), "", "model"),
]


def test_choice_puts_64_experts_on_two_of_three_slices():
    choice = choose(cluster({"expert": 4, "model": 8}, 4), EXPERTS, (2,))
    assert choice.sentence() == "expert=2 on 2 slices, slice 3 idle"
    assert {host.slice_index for host in choice.require().mesh.hosts} == {0, 1}
    replicated = by_kind(choice)["replicate"]
    assert not replicated.refused
    assert replicated.cost_s > choice.candidates[0].cost_s


def test_choice_pads_64_experts_to_66_over_three_slices_where_it_may():
    choice = choose(cluster({"expert": 4, "model": 8}, 4), EXPERTS, (2,), allow=WITH_PAD)
    assert choice.sentence() == (
        "expert=3 on 3 slices, 2 arrays padded; dim 0 (64) of experts/up, experts/down does not divide into "
        "3: padded to 66, 2 of them empty (the program must store it so, as JAX refuses uneven shards)"
    )


def test_choice_replicates_experts_where_no_slice_may_be_idle():
    choice = choose(
        cluster({"expert": 4, "model": 8}, 4), EXPERTS, (2,), allow=frozenset({"shrink", "replicate"})
    )
    assert choice.chosen.kind == "replicate"
    assert by_kind(choice)["fewer-slices"].refused == "fewer-slices not allowed here"


STAGES = {"stage": 4, "model": 8}


def test_choice_deals_the_layers_of_a_pipeline_again_where_they_divide():
    choice = choose(cluster(STAGES, 4), [array("layers", (24, 4096, 4096), "stage", "", "model")], (0,))
    assert choice.sentence() == "stage=3 on 3 slices"
    assert {volume(box) for box in choice.require().boxes(choice.layout.arrays[0])} == {8 * 4096 * 512}


def test_choice_gives_a_stage_an_empty_place_where_the_layers_do_not_divide():
    layers = [array("layers", (32, 4096, 4096), "stage", "", "model")]
    choice = choose(cluster(STAGES, 4), layers, (0,), allow=WITH_PAD)
    assert choice.sentence() == (
        "stage=3 on 3 slices, 1 array padded; dim 0 (32) of layers does not divide into 3: padded to 33, "
        "1 of them empty (the program must store it so, as JAX refuses uneven shards)"
    )
    assert choose(cluster(STAGES, 4), layers, (0,)).chosen.kind == "replicate"  # no leave to pad
    kept = choose(cluster(STAGES, 4), layers, (0,), limits=Limits(device_memory_bytes=200_000_000))
    assert kept.sentence() == "stage=2 on 2 slices, slice 3 idle"


def test_choice_does_not_pad_four_stages_to_six_as_one_slice_would_have_none():
    stages = [array("layers", (4, 8, 4096, 4096), "stage", "", "", "model")]
    choice = choose(cluster(STAGES, 4), stages, (0,), allow=frozenset({"shrink", "pad", "fewer-slices"}))
    assert choice.sentence() == "stage=2 on 2 slices, slice 3 idle"
    padded = by_kind(choice)["pad"]
    assert padded.step_s == choice.chosen.step_s == 2.0
    assert (padded.fallbacks[0].stored_size, padded.fallbacks[0].num_empty) == (6, 1)
    assert "its last part is empty" in choice.explain()


def test_choice_keeps_whole_replicas_of_a_pipeline_and_moves_nothing():
    mesh = cluster({"data": 2, "stage": 2, "model": 8}, 4)
    choice = choose(mesh, [array("layers", (32, 64, 64), "stage", "", "model")], (0,))
    assert choice.sentence() == "data=1 on 2 slices, slice 1 idle"
    assert choice.chosen.figures.bytes_moved == 0
    assert [candidate.refused for candidate in choice.candidates if not candidate.figures] == [
        "24 devices are not a multiple of 16 (stage=2, model=8), so axis 'data' has no size",
        "24 devices are not a multiple of 16 (data=2, model=8), so axis 'stage' has no size",
    ]


def test_choice_replicates_small_arrays_and_pads_large_ones_where_memory_is_short():
    mesh = cluster({"data": 32}, 4)
    arrays = [array("large", (4096, 4096), "data"), array("small", (4096, 512), "data")]
    limits = Limits(device_memory_bytes=30_000_000)
    choice = choose(mesh, arrays, (0,), limits=limits, allow=WITH_PAD)
    assert choice.chosen.kind == "replicate-and-pad"
    assert [(one.kind, one.paths) for one in choice.chosen.fallbacks] == [
        ("pad", ("large",)),
        ("replicate", ("small",)),
    ]
    assert (
        choice.chosen.figures.device_bytes <= 30_000_000 < by_kind(choice)["replicate"].figures.device_bytes
    )
    assert "a mesh with an axis of its own for slices" in by_kind(choice)["replicate"].refused


def test_choice_refuses_every_candidate_with_its_reason_when_memory_is_too_small():
    limits = Limits(device_memory_bytes=1_000_000, state_factor=1.5)
    choice = choose(cluster(DATA, 4), [array("mu", (4096, 4096), "data", "model")], (1,), limits=limits)
    assert choice.layout is None
    assert choice.chosen is None
    with pytest.raises(
        UsageError, match=r"no layout for 3 slices: .*a device needs 12\.6 MB and has 1\.0 MB"
    ):
        choice.require()


def test_choice_counts_the_snapshots_of_a_host():
    arrays = [array("w", (1200, 1024), "", "model")]
    limits = Limits(host_memory_bytes=3_000_000, replicas=2, snapshot_slots=2)
    choice = choose(cluster(DATA, 4), arrays, (1,), limits=limits)
    assert choice.candidates[0].figures.snapshot_bytes == 2 * 2 * 1200 * 1024 * 4 // 6
    assert choice.candidates[0].refused == "snapshots need 3.3 MB a host, which has 3.0 MB"


# ---- what it is chosen by ------------------------------------------------------------------------


class StepsOnly:
    """Costs under which idle slices are better than anything replicated."""

    def step_s(self, layout: Layout, figures: Figures) -> float:
        return 5.0 if figures.replicated_bytes else 1.0

    def move_s(self, layout: Layout, figures: Figures) -> float:
        return 0.0


def test_choice_asks_the_costs_it_is_given_and_counts_the_steps():
    arrays = [array("mu", (4096, 4096), "data", "model")]
    assert choose(cluster(DATA, 4), arrays, (1,)).chosen.kind == "replicate"
    choice = choose(cluster(DATA, 4), arrays, (1,), costs=StepsOnly(), horizon_steps=10)
    assert (choice.chosen.kind, choice.chosen.cost_s) == ("fewer-slices", 10.0)


def test_choice_prefers_what_asks_less_of_the_program_where_costs_are_about_the_same():
    arrays = [array("mu", (4096, 4096), "data", "model"), array("params", (4096, 8192), "", "model")]
    choice = choose(cluster(DATA, 4), arrays, (1,), allow=WITH_PAD)
    assert choice.chosen.kind == "replicate"
    assert by_kind(choice)["pad"].cost_s < choice.chosen.cost_s < 1.02 * by_kind(choice)["pad"].cost_s


def test_choice_weighs_bytes_to_move_against_steps():
    arrays = [array("mu", (4096, 4096, 64), "data", "model")]
    slow = SimpleCosts(step_s_before=0.001, network_bytes_s=1e8)
    quick = choose(cluster(DATA, 4), arrays, (1,), costs=slow, horizon_steps=1)
    assert quick.chosen.kind == "fewer-slices"  # fewer bytes to move
    assert quick.chosen.figures.bytes_moved < by_kind(quick)["replicate"].figures.bytes_moved


def test_choice_leaves_those_slices_idle_that_hold_least():
    mesh = cluster({"expert": 4, "model": 8}, 4)
    layout = Layout(mesh=mesh, arrays=tuple(EXPERTS))
    hosts = [host for host in mesh.distinct_hosts() if host.slice_index != 3]
    newcomer = Stock.of_layout(layout).without([HostId(0, 0), HostId(0, 1)])
    choice = choose_layout(layout, hosts, 4, holdings=newcomer)
    assert (choice.chosen.slices, choice.chosen.idle) == ((1, 2), (0,))


def test_choice_changes_only_the_axes_it_may():
    mesh = cluster({"data": 2, "stage": 2, "model": 8}, 4)
    choice = choose(mesh, [array("layers", (32, 64, 64), "stage")], (0,), axes=("stage",))
    assert {candidate.axis for candidate in choice.candidates} == {"stage"}


def test_choice_needs_an_axis_that_spans_slices():
    with pytest.raises(UsageError, match="no axis of the mesh spans slices"):
        choose(cluster({"model": 8}, 1), [array("w", (8,), "model")], ())


def test_choice_refuses_holdings_of_several_steps():
    layout = Layout(mesh=cluster(DATA, 4), arrays=(array("w", (8,), "model"),))
    mixed = [*layout_holdings(layout, step=3), *layout_holdings(layout, step=4)]
    with pytest.raises(UsageError, match="of several steps: 3, 4"):
        choose_layout(layout, survivors(layout.mesh, 0), 4, holdings=mixed)


@pytest.mark.parametrize("limits", [{"state_factor": 0.5}, {"replicas": 0}, {"snapshot_slots": 0}])
def test_limits_refuse_what_cannot_be(limits):
    with pytest.raises(UsageError, match="must be 1 or more"):
        Limits(**limits)


# ---- what holds for every choice -----------------------------------------------------------------


@PROPERTY
@given(changes(), st.sampled_from([ALLOWED, WITH_PAD]))
def test_choice_tells_the_bytes_that_a_plan_cannot_go_below(change, allow):
    layout, hosts, per_host, holdings = change
    choice = choose_layout(layout, hosts, per_host, holdings=holdings, allow=allow)
    plan = make_plan(choice.require(), holdings, step=7)
    figures = choice.chosen.figures
    assert plan.bytes_lower_bound == figures.bytes_moved
    received: dict[HostId, int] = {}
    for transfer in plan.transfers:
        if not transfer.is_local:
            received[transfer.target] = received.get(transfer.target, 0) + transfer.nbytes
    assert max(received.values(), default=0) == figures.host_bytes_received


@PROPERTY
@given(changes())
def test_choice_leaves_every_array_its_spec_but_for_the_axis_that_does_not_divide(change):
    layout, hosts, per_host, holdings = change
    choice = choose_layout(
        layout, hosts, per_host, holdings=holdings, allow=frozenset({"shrink", "replicate"})
    )
    target = choice.require()
    sizes = target.mesh.sizes()
    assert sorted(target.mesh.distinct_hosts()) == sorted(set(hosts))
    for old, new in zip(layout.arrays, target.arrays, strict=True):
        assert (old.path, old.shape, new.padded) == (new.path, new.shape, False)
        assert new.spec == fitted_spec(old.shape, old.spec, sizes, "data")


@PROPERTY
@given(changes())
def test_choice_counts_the_state_of_a_device(change):
    layout, hosts, per_host, _ = change
    choice = choose_layout(layout, hosts, per_host)
    target = choice.require()
    boxes = [target.boxes(one) for one in target.arrays]
    by_device = [
        sum(one.box_nbytes(box) for one, box in zip(target.arrays, at, strict=True))
        for at in zip(*boxes, strict=True)
    ]
    assert choice.chosen.figures.device_bytes == max(by_device)


@PROPERTY
@given(changes(), st.randoms(use_true_random=False))
def test_choice_does_not_depend_on_the_order_of_hosts_and_holdings(change, random):
    layout, hosts, per_host, holdings = change
    choice = choose_layout(layout, hosts, per_host, holdings=holdings, allow=WITH_PAD)
    random.shuffle(hosts)
    random.shuffle(holdings)
    assert choose_layout(layout, hosts, per_host, holdings=holdings, allow=WITH_PAD) == choice


@PROPERTY
@given(changes())
def test_choice_goes_to_and_from_json(change):
    layout, hosts, per_host, _ = change
    choice = choose_layout(layout, hosts, per_host, allow=WITH_PAD)
    assert LayoutChoice.from_json(choice.to_json()) == choice
    assert json.loads(choice.to_json())["candidates"][0]["kind"] == choice.candidates[0].kind


def test_choice_refuses_json_that_is_none():
    with pytest.raises(UsageError, match="not a layout choice"):
        LayoutChoice.from_json(b'{"candidates": 3}')


def test_choice_explains_every_candidate_with_figures_and_reasons():
    arrays = [array("params", (4096, 4096), "", "model"), array("mu", (4096, 4096), "data", "model")]
    assert choose(cluster(DATA, 4), arrays, (1,)).explain().splitlines() == [
        "From 4 slices to 3:",
        "- data=3 on 3 slices, 1 array replicated (replicate): chosen",
        "    dim 0 (4,096) of mu does not divide into 3: replicated over the axis",
        "    16.8 MB of state a device, 89.5 MB of snapshots a host; 151.0 MB to move, 25.2 MB to one host",
        "    a step of 1.337 s and 0.002013 s to get there: 1337 s with 1,000 steps",
        "- data=2 on 2 slices, slice 3 idle (fewer-slices): possible",
        "    12.6 MB of state a device, 134.2 MB of snapshots a host; 33.6 MB to move, 8.4 MB to one host",
        "    a step of 2 s and 0.0006711 s to get there: 2000 s with 1,000 steps",
        "- data=3 on 3 slices, 1 array padded (pad): refused, pad not allowed here",
        "    dim 0 (4,096) of mu does not divide into 3: padded to 4,098, 2 of them empty (the program must "
        "store it so, as JAX refuses uneven shards)",
        "    11.2 MB of state a device, 89.5 MB of snapshots a host; 22.3 MB to move, 5.6 MB to one host",
        "    a step of 1.334 s and 0.000447 s to get there: 1334 s with 1,000 steps",
        "- data=3 on 3 slices (shrink): refused, dim 0 (4,096) of mu does not divide into 3",
    ]


def test_choice_answers_when_nothing_of_the_state_is_left():
    mesh = cluster(DATA, 4)
    layout = Layout(mesh=mesh, arrays=(array("w", (12, 4), "data"),))
    nothing = Stock.of_layout(layout).without(mesh.distinct_hosts())
    choice = choose_layout(layout, survivors(mesh, 0), 4, holdings=nothing)
    assert choice.candidates[0].figures.bytes_moved == 3 * 2 * 4 * 4 * 4


def test_choice_refuses_an_axis_the_mesh_has_not_and_holdings_outside_their_array():
    mesh = cluster(DATA, 4)
    layout = Layout(mesh=mesh, arrays=(array("w", (12, 4), "data"),))
    with pytest.raises(UsageError, match="no axis 'nope'"):
        choose_layout(layout, survivors(mesh, 0), 4, axes=("nope",))
    outside = Holding(host=HostId(0), step=1, path="w", box=((0, 12),), checksum=0, tier="shm")
    with pytest.raises(UsageError, match="outside an array of shape"):
        choose_layout(layout, survivors(mesh, 0), 4, holdings=[outside])


@pytest.mark.parametrize(
    "change",
    [
        lambda choice: choice["candidates"].clear(),
        lambda choice: choice["candidates"][0].pop("cost_s"),
        lambda choice: choice["candidates"][0].pop("figures"),
        lambda choice: choice["candidates"][0].__setitem__("slices", "x"),
    ],
)
def test_choice_refuses_json_that_does_not_fit(change):
    choice = json.loads(choose(cluster(DATA, 4), [array("w", (12, 4), "data")], (0,)).to_json())
    change(choice)
    with pytest.raises(UsageError):
        LayoutChoice.from_json(json.dumps(choice))
