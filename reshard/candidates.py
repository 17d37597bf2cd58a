"""The layouts that come into question when the number of slices changes.

One mesh axis that spans slices takes another size; the others stay. For the largest number of slices that
factors there are ways to treat the dims that do not divide; beside them stands the largest number of slices
over which every dim divides, which leaves the rest idle.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from reshard.errors import UsageError
from reshard.fits import Misfit, misfits, part_shape, without_axis
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout, MeshLayout, Spec

Kind = Literal["shrink", "replicate", "pad", "replicate-and-pad", "fewer-slices"]
"""`shrink`: every dim divides over the new size of the axis (also where it grows). `replicate`: dims that do
not are not partitioned over the axis any more. `pad`: they are stored rounded up. `fewer-slices`: every dim
divides, over fewer slices than there are."""
Treatment = Literal["replicate", "pad"]


class Alike(NamedTuple):
    """What arrays have in common that are treated alike."""

    shape: tuple[int, ...]
    itemsize: int
    spec: Spec
    padded: bool


Groups = Mapping[Alike, tuple[str, ...]]
"""The paths of the arrays that are alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """What is done about dim `dim` of arrays, which has `size` elements and does not divide into `num_parts`.

    With `pad` the program stores `stored_size` elements, and the last `num_empty` parts have none of the
    array; with `replicate` both are as without it. `is_new` is False for arrays that were padded before.
    """

    kind: Treatment
    paths: tuple[str, ...]
    dim: int
    size: int
    num_parts: int
    stored_size: int
    num_empty: int = 0
    is_new: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A candidate without figures: which axis takes which size, on which slices, and what becomes of arrays.

    `treated` has the spec of each group, and whether it is stored padded. `refused` says why there is no such
    layout; the rest is then as it would have been.
    """

    kind: Kind
    axis: str
    axis_size: int
    slices: tuple[int, ...]
    treated: Mapping[Alike, tuple[Spec, bool]]
    fallbacks: tuple[Fallback, ...] = ()
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A mesh whose `axis` is to take another size, on the slices of `hosts_by_slice`, best to keep first."""

    mesh: MeshLayout
    axis: str
    hosts_by_slice: Mapping[int, tuple[HostId, ...]]
    devices_per_host: int
    _meshes: dict[tuple[int, ...], MeshLayout] = field(default_factory=dict, init=False, compare=False)

    def slices(self, num_slices: int) -> tuple[int, ...]:
        """Return the slices that are used when so many are, in order."""
        return tuple(sorted(list(self.hosts_by_slice)[:num_slices]))

    def axis_size(self, num_slices: int) -> int | None:
        """Return the axis's size on so many slices, None when the other axes do not fit them."""
        num_hosts = sum(len(self.hosts_by_slice[index]) for index in self.slices(num_slices))
        fixed = self.mesh.num_devices // self.mesh.axis_size(self.axis)
        size, rest = divmod(num_hosts * self.devices_per_host, fixed)
        return size if size and not rest else None

    def sizes(self, axis_size: int) -> dict[str, int]:
        """Return the sizes of all axes when `axis` has this one."""
        return self.mesh.sizes() | {self.axis: axis_size}

    def mesh_on(self, slices: tuple[int, ...]) -> MeshLayout:
        """Return the mesh on these slices, `axis` outermost as `Layout.resized` puts it.

        The same object for the same slices. Raises `UsageError` when their devices do not factor.
        """
        if slices in self._meshes:
            return self._meshes[slices]
        hosts = [host for index in slices for host in self.hosts_by_slice[index]]
        no_arrays = Layout(mesh=self.mesh, arrays=(), elastic_axis=self.axis)
        mesh = no_arrays.resized(hosts, self.devices_per_host).mesh
        return self._meshes.setdefault(slices, mesh)


def group_arrays(arrays: Iterable[ArrayLayout]) -> Groups:
    """Return the paths of the arrays that are alike, in the order in which they come."""
    found: defaultdict[Alike, list[str]] = defaultdict(list)
    for array in arrays:
        found[_alike(array)].append(array.path)
    return {alike: tuple(paths) for alike, paths in found.items()}


def drafts(change: Change, groups: Groups) -> Iterator[Draft]:
    """Yield what comes into question for one axis, on the largest numbers of slices that will do.

    What is asked for first, the axis over all slices and every dim divided, is there even when it is refused.
    """
    num_slices = len(change.hosts_by_slice)
    counts = [count for count in range(num_slices, 0, -1) if change.axis_size(count)]
    if num_slices not in counts:
        yield _without_mesh(change)
    for count in counts:
        found = find_misfits(groups, change.sizes(change.axis_size(count) or 0))
        plain = treat(change, count, groups, {})
        if not found:
            yield plain
            return
        if count == counts[0]:
            yield replace(plain, refused=_describe(found, groups))
            yield treat(change, count, groups, dict.fromkeys(found, "replicate"))
            yield treat(change, count, groups, dict.fromkeys(found, "pad"))


def find_misfits(groups: Groups, sizes: Mapping[str, int]) -> dict[Alike, tuple[Misfit, ...]]:
    """Return the dims that do not divide, of the groups that have any; those stored padded have none."""
    found = {alike: misfits(alike.shape, alike.spec, sizes) for alike in groups if not alike.padded}
    return {alike: dims for alike, dims in found.items() if dims}


def treat(change: Change, num_slices: int, groups: Groups, how: Mapping[Alike, Treatment]) -> Draft:
    """Return the draft on so many slices in which groups whose dims do not divide are treated as `how` says.

    Those that `how` does not name stay as they are.
    """
    axis_size = change.axis_size(num_slices) or 0
    treated = {alike: (alike.spec, alike.padded) for alike in groups}
    paths_of: defaultdict[tuple[Treatment, bool, Misfit], list[str]] = defaultdict(list)
    for alike, paths in groups.items():
        kind = "pad" if alike.padded else how.get(alike)
        found = () if kind is None else misfits(alike.shape, alike.spec, change.sizes(axis_size))
        if found and kind == "replicate":
            treated[alike] = without_axis(alike.spec, found, change.axis), False
        elif found:
            treated[alike] = alike.spec, True
        for misfit in found:
            paths_of[kind or "pad", not alike.padded, misfit] += paths
    kinds = set(how.values())
    is_partial = num_slices < len(change.hosts_by_slice)
    plain: Kind = "fewer-slices" if is_partial else "shrink"
    return Draft(
        kind=plain if not kinds else kinds.pop() if len(kinds) == 1 else "replicate-and-pad",
        axis=change.axis,
        axis_size=axis_size,
        slices=change.slices(num_slices),
        treated=treated,
        fallbacks=tuple(_fallback(*key, tuple(paths)) for key, paths in paths_of.items()),
    )


def mixed_draft(change: Change, num_slices: int, groups: Groups, budget_bytes: int) -> Draft | None:
    """Return the draft that replicates what fits into `budget_bytes` of state a device and pads the rest.

    Arrays that grow least by it are replicated first. None when all of them would be treated alike.
    """
    sizes = change.sizes(change.axis_size(num_slices) or 0)
    found = find_misfits(groups, sizes)

    def stored_bytes(alike: Alike, spec: Spec) -> int:
        return math.prod(part_shape(alike.shape, spec, sizes)) * alike.itemsize * len(groups[alike])

    left_bytes = budget_bytes - sum(stored_bytes(alike, alike.spec) for alike in groups)
    more_bytes = {
        alike: stored_bytes(alike, without_axis(alike.spec, dims, change.axis))
        - stored_bytes(alike, alike.spec)
        for alike, dims in found.items()
    }
    how: dict[Alike, Treatment] = dict.fromkeys(found, "pad")
    for alike in sorted(found, key=more_bytes.__getitem__):
        if more_bytes[alike] <= left_bytes:
            left_bytes -= more_bytes[alike]
            how[alike] = "replicate"
    return treat(change, num_slices, groups, how) if len(set(how.values())) == 2 else None


def layout_of(draft: Draft, layout: Layout, mesh: MeshLayout) -> Layout:
    """Return the arrays of `layout` on `mesh`, treated as the draft says."""
    arrays: list[ArrayLayout] = []
    for array in layout.arrays:
        spec, padded = draft.treated[_alike(array)]
        is_same = spec == array.spec and padded == array.padded
        arrays.append(array if is_same else replace(array, spec=spec, padded=padded))
    return Layout(mesh=mesh, arrays=tuple(arrays), elastic_axis=draft.axis)


def _alike(array: ArrayLayout) -> Alike:
    return Alike(array.shape, array.itemsize, array.spec, array.padded)


def _without_mesh(change: Change) -> Draft:
    """Return the draft on all slices, whose devices do not factor."""
    slices = tuple(sorted(change.hosts_by_slice))
    try:
        change.mesh_on(slices)
    except UsageError as error:
        refused = error.message
    return Draft(kind="shrink", axis=change.axis, axis_size=0, slices=slices, treated={}, refused=refused)


def _describe(found: Mapping[Alike, tuple[Misfit, ...]], groups: Groups) -> str:
    """Say what does not divide: the first array, and how many more there are."""
    alike, (misfit, *_) = next(iter(found.items()))
    num_more = sum(len(groups[other]) for other in found) - 1
    more = f", nor do dims of {num_more:,} other arrays" if num_more > 1 else ""
    more = ", nor does a dim of another array" if num_more == 1 else more
    path = groups[alike][0]
    return f"dim {misfit.dim} ({misfit.size:,}) of {path} does not divide into {misfit.num_parts}{more}"


def _fallback(kind: Treatment, is_new: bool, misfit: Misfit, paths: tuple[str, ...]) -> Fallback:
    length = -(-misfit.size // misfit.num_parts)
    is_pad = kind == "pad"
    return Fallback(
        kind=kind,
        paths=paths,
        dim=misfit.dim,
        size=misfit.size,
        num_parts=misfit.num_parts,
        stored_size=length * misfit.num_parts if is_pad else misfit.size,
        num_empty=misfit.num_parts + -misfit.size // length if is_pad else 0,
        is_new=is_new,
    )
