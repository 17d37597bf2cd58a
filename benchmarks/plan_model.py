"""A 405B-like model on thousands of chips, as layouts and holdings for the benchmarks of planning."""

from __future__ import annotations

from dataclasses import dataclass

from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout
from reshard.mesh import MeshLayout
from reshard.redundancy import buddy_stock, capture_stock
from reshard.stock import Stock

D, FFN, KV, VOCAB = 16384, 53248, 1024, 128256
TENSOR = 8
CHIPS_A_HOST = 4
LOST = 1
CASES = {
    "keep": "a slice is lost; each survivor has all its boxes in memory",
    "shares": "a slice is lost; two slices have each box, so each survivor fetches most of its own",
    "join": "a slice comes back with nothing and fetches its boxes from all others",
    "respread": "a slice is lost; arrays are cut over all slices (padded), one buddy has each box",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large the planned job is; `is_distinct` gives every array a shape of its own."""

    num_slices: int
    chips_a_slice: int
    num_layers: int = 126
    is_distinct: bool = False

    @property
    def num_chips(self) -> int:
        """Chips before the loss."""
        return self.num_slices * self.chips_a_slice

    @property
    def num_hosts(self) -> int:
        """Hosts before the loss."""
        return self.num_chips // CHIPS_A_HOST


def arrays(size: Size, *, over_slices: bool) -> tuple[ArrayLayout, ...]:
    """Params, mu and nu: 9 arrays a layer, embeddings and the last norm, cut over `fsdp` and `tensor`.

    `over_slices` cuts over the slices too, as padded: 16,384 does not divide by 31.
    """
    outer = ("data", "fsdp") if over_slices else ("fsdp",)
    rows, columns, norm = (outer, ("tensor",)), (("tensor",), outer), (outer,)
    layer = [((D, D), rows), ((D, KV), rows), ((D, KV), rows), ((D, D), columns)]
    layer += [((D, FFN), rows), ((D, FFN), rows), ((FFN, D), columns), ((D,), norm), ((D,), norm)]
    ends = [((VOCAB, D), columns), ((D, VOCAB), rows), ((D,), norm)]
    return tuple(
        ArrayLayout(
            path=f"a{number:05}",
            shape=(shape[0] * (number + 1 if size.is_distinct else 1), *shape[1:]),
            dtype="float32",
            itemsize=4,
            spec=spec,
            padded=True,
        )
        for number, (shape, spec) in enumerate((layer * size.num_layers + ends) * 3)
    )


def layout(size: Size, slices: list[int], *, over_slices: bool) -> Layout:
    """The model on these slices."""
    hosts_a_slice = size.chips_a_slice // CHIPS_A_HOST
    hosts = [HostId(s, host) for s in slices for host in range(hosts_a_slice) for _ in range(CHIPS_A_HOST)]
    mesh = MeshLayout(
        axis_names=("data", "fsdp", "tensor"),
        axis_sizes=(len(slices), size.chips_a_slice // TENSOR, TENSOR),
        hosts=tuple(hosts),
    )
    return Layout(mesh=mesh, arrays=arrays(size, over_slices=over_slices), elastic_axis="data")


def situation(case: str, size: Size) -> tuple[Layout, Stock]:
    """The target layout and the holdings of what survived."""
    over_slices = case == "respread"
    before = layout(size, list(range(size.num_slices)), over_slices=over_slices)
    lost = [host for host in before.mesh.distinct_hosts() if host.slice_index == LOST]
    left = [index for index in range(size.num_slices) if index != LOST]
    after = before if case == "join" else layout(size, left, over_slices=over_slices)
    if case == "shares":
        return after, capture_stock(before, 2).without(lost)
    stock = Stock.of_layout(before)
    if case == "respread":
        stock = stock.merged(buddy_stock(before, 2))
    return after, stock.without(lost)
