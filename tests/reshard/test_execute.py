import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reshard_strategies import PROPERTY, survivable_losses

from reshard.errors import CorruptCopyError, InvariantBrokenError, UsageError
from reshard.execute import element_dtype, execute_transfers
from reshard.holdings import layout_holdings
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout, MeshLayout
from reshard.planner import make_plan
from reshard.transfer import Transfer


def cut(values, box):
    return values[tuple(slice(start, stop) for start, stop in box)]


def random_values(arrays):
    """Each array as opaque elements of random bytes."""
    rng = np.random.default_rng(0)
    return {
        array.path: np.frombuffer(rng.bytes(array.nbytes), element_dtype(array.itemsize)).reshape(array.shape)
        for array in arrays
    }


@PROPERTY
@given(survivable_losses(), st.booleans(), st.booleans(), st.sampled_from([0, 1 << 30]))
def test_execution_reproduces_every_target_box_bit_for_bit(
    situation, whole_shards, as_memoryview, min_cut_bytes
):
    layout, holdings = situation
    values = random_values(layout.arrays)

    def fetch(transfer):
        box = transfer.source_box if whole_shards else transfer.piece
        data = cut(values[transfer.path], box)
        return memoryview(data.tobytes()) if as_memoryview else data

    plan = make_plan(layout, holdings, step=7, min_cut_bytes=min_cut_bytes)
    for host in layout.mesh.distinct_hosts():
        result = execute_transfers(plan.for_target(host), layout, host, fetch, count_writes=True)
        wanted = {(array.path, box) for array in layout.arrays for box in layout.boxes_by_host(array)[host]}
        assert result.buffers.keys() == result.num_writes.keys() == wanted
        for (path, box), buffer in result.buffers.items():
            np.testing.assert_array_equal(buffer, cut(values[path], box))
            assert (result.num_writes[path, box] == 1).all()


@PROPERTY
@given(survivable_losses())
def test_executions_figures_are_those_of_the_plan(situation):
    layout, holdings = situation
    values = random_values(layout.arrays)
    plan = make_plan(layout, holdings, step=7)
    results = [
        execute_transfers(
            plan.for_target(host), layout, host, lambda transfer: cut(values[transfer.path], transfer.piece)
        )
        for host in layout.mesh.distinct_hosts()
    ]
    assert sum(result.bytes_received for result in results) == plan.bytes_moved
    assert sum(result.bytes_reused for result in results) == plan.bytes_reused
    assert sum(result.bytes_reused + result.bytes_copied for result in results) == plan.bytes_local


@PROPERTY
@given(survivable_losses(), st.integers(1, 64))
def test_rounds_fill_the_same_boxes_as_the_whole_plan_within_their_bound(situation, max_bytes):
    layout, holdings = situation
    values = random_values(layout.arrays)
    plan = make_plan(layout, holdings, step=7)
    for host in layout.mesh.distinct_hosts():
        filled = {}
        for paths in plan.rounds(max_bytes):
            result = execute_transfers(
                plan.for_target(host),
                layout,
                host,
                lambda transfer: cut(values[transfer.path], transfer.piece),
                paths=paths,
            )
            assert {path for path, _ in result.buffers} <= set(paths)
            nbytes = sum(buffer.nbytes for buffer in result.buffers.values())
            assert nbytes <= max_bytes or len(paths) == 1
            assert not filled.keys() & result.buffers.keys()
            filled |= result.buffers
        wanted = {
            (array.path, box)
            for array in layout.arrays
            for box in layout.boxes_by_host(array)[host]
            if array.nbytes
        }
        assert filled.keys() == wanted
        for (path, box), buffer in filled.items():
            np.testing.assert_array_equal(buffer, cut(values[path], box))


A, B = HostId(0), HostId(1)


def one_array(host, shape, dtype="float32", itemsize=4):
    mesh = MeshLayout(axis_names=("data",), axis_sizes=(1,), hosts=(host,))
    return Layout(mesh=mesh, arrays=(ArrayLayout(path="w", shape=shape, dtype=dtype, itemsize=itemsize),))


def transfers_of(shape, **kwargs):
    """What brings `w` from A to B."""
    return make_plan(
        one_array(B, shape, **kwargs), layout_holdings(one_array(A, shape, **kwargs), step=1), step=1
    ).transfers


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "int4", "complex128", "bool", "float64"])
@pytest.mark.parametrize("shape", [(), (3, 5)])
def test_execution_keeps_any_dtype_without_knowing_it(name, shape):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    values = (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 2).astype(dtype)
    layout = one_array(B, shape, dtype=name, itemsize=dtype.itemsize)
    transfers = transfers_of(shape, dtype=name, itemsize=dtype.itemsize)
    buffer = execute_transfers(transfers, layout, B, lambda _: values).buffers[
        "w", tuple((0, n) for n in shape)
    ]
    np.testing.assert_array_equal(buffer.view(dtype), values)


def test_execution_keeps_the_payload_of_a_signalling_nan():
    values = np.array([0x7F800001, 0xFFC12345], np.uint32)
    buffer = execute_transfers(
        transfers_of((2,)), one_array(B, (2,)), B, lambda _: values.view(np.float32)
    ).buffers
    assert buffer["w", ((0, 2),)].view(np.uint32).tolist() == values.tolist()


def test_execution_fills_the_buffers_it_is_given_in_place():
    stage = bytearray(4 * 6)
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    out = {("w", ((0, 2), (0, 3))): np.frombuffer(stage, np.uint8)}
    execute_transfers(transfers_of((2, 3)), one_array(B, (2, 3)), B, lambda _: values, out=out)
    assert bytes(stage) == values.tobytes()


@pytest.mark.parametrize(
    "buffer",
    [
        np.zeros(5, np.float32),
        np.frombuffer(bytes(24), np.float32),
        np.zeros(12, np.float32)[::2],
    ],
    ids=["short", "read-only", "strided"],
)
def test_execution_refuses_a_buffer_it_cannot_fill(buffer):
    with pytest.raises(UsageError, match="must be writable, C-contiguous and of 24 bytes"):
        execute_transfers(
            transfers_of((6,)), one_array(B, (6,)), B, lambda _: np.zeros(6), out={("w", ((0, 6),)): buffer}
        )


def test_execution_gives_an_empty_array_its_empty_buffer():
    buffers = execute_transfers(
        transfers_of((0, 3)), one_array(B, (0, 3)), B, lambda _: pytest.fail("nothing to fetch")
    ).buffers
    assert buffers["w", ((0, 0), (0, 3))].shape == (0, 3)


def test_execution_gives_a_host_outside_the_layout_nothing():
    assert execute_transfers((), one_array(B, (6,)), A, lambda _: np.zeros(6)).buffers == {}


@pytest.mark.parametrize("nbytes", [0, 23, 25, 48])
def test_execution_refuses_a_copy_of_the_wrong_size_and_names_its_source(nbytes):
    with pytest.raises(CorruptCopyError, match=f"got {nbytes} bytes where the piece has 24") as info:
        execute_transfers(transfers_of((6,)), one_array(B, (6,)), B, lambda _: memoryview(bytes(nbytes)))
    assert (info.value.path, info.value.source) == ("w", A)


def piece(start, stop, **changes):
    """Elements of the six of `w` on their way from A to B."""
    values = {
        "path": "w",
        "source": A,
        "target": B,
        "source_box": ((0, 6),),
        "piece": ((start, stop),),
        "target_box": ((0, 6),),
        "nbytes": 4 * (stop - start),
    }
    return Transfer(**values | changes)


def execute_zeros(transfers, **options):
    return execute_transfers(
        transfers, one_array(B, (6,)), B, lambda t: np.zeros(t.nbytes, np.uint8), **options
    )


def test_execution_never_returns_a_short_result_when_a_transfer_is_missing():
    with pytest.raises(InvariantBrokenError, match="writes 3 of the 6 elements"):
        execute_zeros([piece(0, 3)])


def test_execution_refuses_a_write_too_many_before_it_touches_the_box():
    held = np.arange(6, dtype=np.float32)
    local = piece(0, 6, source=B)
    with pytest.raises(InvariantBrokenError, match="writes 8 of the 6 elements"):
        execute_transfers(
            [local, piece(2, 4)],
            one_array(B, (6,)),
            B,
            lambda t: held if t is local else np.zeros(2, np.float32),
        )
    assert held.tolist() == [0, 1, 2, 3, 4, 5]


def test_execution_notices_an_overlap_behind_a_right_total_when_counting():
    overlapping = [piece(0, 3), piece(2, 5)]
    execute_zeros(overlapping)
    with pytest.raises(InvariantBrokenError, match=r"written 0 to 2 times, \(2,\) 2 times"):
        execute_zeros(overlapping, count_writes=True)


def test_execution_reuses_a_held_box_and_copies_only_a_cut_one():
    held = np.arange(6, dtype=np.float32)
    result = execute_transfers([piece(0, 6, source=B)], one_array(B, (6,)), B, lambda _: held)
    assert np.shares_memory(result.buffers["w", ((0, 6),)], held)
    assert (result.bytes_reused, result.bytes_copied, result.bytes_received) == (24, 0, 0)

    larger = np.arange(8, dtype=np.float32)
    local = piece(0, 6, source=B, source_box=((0, 8),))
    result = execute_transfers([local], one_array(B, (6,)), B, lambda _: larger)
    assert not np.shares_memory(result.buffers["w", ((0, 6),)], larger)
    assert (result.bytes_reused, result.bytes_copied, result.bytes_received) == (0, 24, 0)


def test_execution_copies_a_held_box_into_the_buffer_that_is_given_for_it():
    held, stage = np.arange(6, dtype=np.float32), np.zeros(6, np.float32)
    result = execute_transfers(
        [piece(0, 6, source=B)], one_array(B, (6,)), B, lambda _: held, out={("w", ((0, 6),)): stage}
    )
    assert stage.tolist() == held.tolist()
    assert (result.bytes_reused, result.bytes_copied) == (0, 24)


def test_execution_refuses_a_transfer_to_another_host():
    with pytest.raises(UsageError, match="the layout has no such box on s1h0"):
        execute_zeros([piece(0, 6, target=A)])


def test_execution_refuses_a_plan_for_another_layout():
    with pytest.raises(UsageError, match="the layout has no such box on s1h0"):
        execute_transfers(transfers_of((6,)), one_array(B, (8,)), B, lambda _: np.zeros(6, np.float32))
    with pytest.raises(UsageError, match="the layout has no such box on s1h0"):
        execute_transfers(
            transfers_of((6,)), one_array(B, (6,), itemsize=2), B, lambda _: np.zeros(6, np.float32)
        )
