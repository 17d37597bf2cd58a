"""What every `elastic.arbiter.ArbiterStore` must do; a store's tests subclass `ArbiterContract`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from elastic.arbiter import ArbiterStore

LEASE_S = 2.0


class ArbiterContract:
    @pytest.fixture
    def make(self) -> Callable[[], ArbiterStore]:
        """Claimants of one job: each call makes another one."""
        raise NotImplementedError

    def test_store_is_empty_at_first_and_the_first_claim_gets_epoch_1(
        self, make: Callable[[], ArbiterStore]
    ) -> None:
        store = make()
        assert store.read() is None
        claimed = store.claim(None, LEASE_S)
        assert claimed is not None
        assert (claimed.epoch, claimed.lease_s) == (1, LEASE_S)
        assert make().read() == claimed

    def test_claim_of_what_another_has_claimed_meanwhile_changes_nothing(
        self, make: Callable[[], ArbiterStore]
    ) -> None:
        first, second = make(), make()
        seen = second.read()
        claimed = first.claim(None, LEASE_S)
        assert second.claim(seen, LEASE_S) is None
        assert second.read() == claimed

    def test_epochs_only_grow(self, make: Callable[[], ArbiterStore]) -> None:
        epochs = []
        for _ in range(4):
            store = make()
            claimed = store.claim(store.read(), LEASE_S)
            assert claimed is not None
            epochs.append(claimed.epoch)
        assert epochs == [1, 2, 3, 4]

    def test_renewal_changes_the_record_so_that_a_claimant_sees_it(
        self, make: Callable[[], ArbiterStore]
    ) -> None:
        holder, other = make(), make()
        claimed = holder.claim(None, LEASE_S)
        assert claimed is not None
        seen = other.read()
        renewed = holder.renew(claimed)
        assert renewed is not None
        assert other.read() == renewed != seen
        assert other.claim(seen, LEASE_S) is None
        assert holder.renew(renewed) is not None

    def test_renewal_after_a_later_epoch_began_fails_and_leaves_that_epoch(
        self, make: Callable[[], ArbiterStore]
    ) -> None:
        stale, fresh = make(), make()
        held = stale.claim(None, LEASE_S)
        assert held is not None
        claimed = fresh.claim(held, LEASE_S)
        assert claimed is not None
        assert stale.renew(held) is None
        assert fresh.read() == claimed
        assert fresh.renew(claimed) is not None

    def test_living_holder_is_not_called_dead(self, make: Callable[[], ArbiterStore]) -> None:
        holder, other = make(), make()
        claimed = holder.claim(None, LEASE_S)
        assert claimed is not None
        assert not other.is_holder_dead(claimed)
        assert not holder.is_holder_dead(claimed)
