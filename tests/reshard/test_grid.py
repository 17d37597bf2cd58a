import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from reshard_strategies import PROPERTY, boxes, layout_pairs, mask_of

from reshard.boxes import volume
from reshard.grid import (
    cell_table,
    cells_of,
    element_boxes,
    layout_edges,
    merge_neighbours,
    num_elements,
    placement,
    refine,
    renumbered,
    table_of_boxes,
)


def as_boxes(column):
    return [tuple(map(tuple, box)) for box in column.tolist()]


box_lists = st.integers(0, 3).flatmap(
    lambda rank: st.lists(boxes(rank), min_size=1, max_size=5, unique=True).map(lambda b: (rank, b))
)


@PROPERTY
@given(layout_pairs())
def test_placement_has_each_hosts_boxes_of_the_layout(pair):
    layout, _ = pair
    hosts = layout.mesh.distinct_hosts()
    for array in layout.arrays:
        placed = placement(layout.mesh, array.spec)
        found = as_boxes(element_boxes(layout_edges(layout.mesh, array), placed.table))
        by_host = {host: set() for host in hosts}
        for host, box in zip(placed.host, placed.box, strict=True):
            by_host[hosts[host]].add(found[box])
        assert {h: sorted(b) for h, b in by_host.items()} == {
            h: sorted(b) for h, b in layout.boxes_by_host(array).items()
        }


@PROPERTY
@given(box_lists)
def test_boxes_survive_the_way_into_edge_numbers_and_back(situation):
    rank, some = situation
    edges, table = table_of_boxes(np.array(some, np.int64).reshape(len(some), rank, 2))
    assert as_boxes(element_boxes(edges, table)) == some
    assert num_elements(edges, table.low, table.high).tolist() == [volume(box) for box in some]


@PROPERTY
@given(box_lists, st.data())
def test_boxes_keep_their_elements_in_finer_edges(situation, data):
    rank, some = situation
    others = data.draw(st.lists(boxes(rank), min_size=1, max_size=3))
    tables = [table_of_boxes(np.array(part, np.int64).reshape(len(part), rank, 2)) for part in (some, others)]
    edges, numbers = refine([edges for edges, _ in tables])
    for part, (_, table), number in zip((some, others), tables, numbers, strict=True):
        assert as_boxes(element_boxes(edges, renumbered(table, number))) == part


@PROPERTY
@given(box_lists)
def test_cells_of_a_box_are_its_elements_once_each_and_merge_into_it_again(situation):
    rank, some = situation
    edges, table = table_of_boxes(np.array(some, np.int64).reshape(len(some), rank, 2))
    num_cells = [len(along) - 1 for along in edges]
    number, cell = cells_of(table, num_cells)
    cells = as_boxes(element_boxes(edges, cell_table(cell, num_cells)))
    for at, box in enumerate(some):
        own = [c for c, n in zip(cells, number, strict=True) if n == at]
        assert sum(map(volume, own)) == volume(box)
        assert (mask_of((5,) * rank, own) == mask_of((5,) * rank, [box])).all()
    key, merged = merge_neighbours(number, cell_table(cell, num_cells))
    whole = {at: box for at, box in enumerate(some) if volume(box)}
    assert dict(zip(key.tolist(), as_boxes(element_boxes(edges, merged)), strict=True)) == whole
