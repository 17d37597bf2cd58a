import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import UsageError
from reshard.ids import HostId

indices = st.integers(0, 10_000)


@given(indices, indices)
def test_host_id_parses_what_it_prints(slice_index, host_index):
    host = HostId(slice_index, host_index)
    assert HostId.parse(str(host)) == host


def test_host_id_is_ordered_by_slice_then_host_as_numbers():
    hosts = [HostId(10), HostId(2, 1), HostId(2, 0), HostId(0, 11)]
    assert [str(host) for host in sorted(hosts)] == ["s0h11", "s2h0", "s2h1", "s10h0"]


@pytest.mark.parametrize("text", ["", "s1", "h0", "s1h", "s-1h0", "s1h0 ", "S1H0", "s01h0", "s1h0\n", "s١h0"])
def test_host_id_refuses_other_text_and_says_what_it_expects(text):
    with pytest.raises(UsageError, match="expected s<slice>h<host>"):
        HostId.parse(text)


@pytest.mark.parametrize("indices", [(-1, 0), (0, -1), (2**31, 0), (0, 10**30)])
def test_host_id_refuses_indices_that_are_negative_or_no_numbers_of_hosts(indices):
    with pytest.raises(UsageError, match="count from zero"):
        HostId(*indices)
