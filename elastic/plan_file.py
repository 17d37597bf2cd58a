"""The file that `elastic plan` reads: a cluster, a model and how it trains, as TOML.

Every key is checked; an error names the file, the line and the key. `elastic plan --template` prints a
commented file with all of them.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from reshard.candidates import Kind
from reshard.choice import ALLOWED
from reshard.errors import UsageError

Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0, le=1e30)]
NotNegative = Annotated[float, Meta(ge=0, le=1e30)]
AxisName = Annotated[str, Meta(min_length=1)]
Axes = AxisName | tuple[AxisName, ...]
"""The mesh axes that partition one dim: a name, several (outermost first), or `[]` for none."""
FigureName = Literal[
    "chips_per_host",
    "device_memory_bytes",
    "device_bandwidth_bytes_s",
    "interconnect_bytes_s",
    "host_network_bytes_s",
    "host_memory_bytes",
    "host_copy_bytes_s",
    "peak_flops_s",
]
"""Those of `reshard.accelerators.FIGURES`."""
DimName = Literal["embed", "heads", "kv", "ff", "vocab", "experts", "layers"]
"""The logical dims of a transformer that rules may partition."""
Optimizer = Literal["adam", "none"]


class ClusterTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[cluster]`: the machines. `figures` replace published ones; a host has `shm_bytes` in /dev/shm."""

    accelerator: str
    slices: Count
    hosts_per_slice: Count
    figures: dict[FigureName, Positive] = {}
    shm_bytes: Positive | None = None
    request_s: NotNegative = 0.0


class MeshTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[mesh]`: axes in order, -1 for the size that is left, and the axis that spans slices."""

    axes: dict[AxisName, int]
    elastic: AxisName


class TransformerTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[model.transformer]`: a decoder like Llama's; with `experts`, each layer has so many feed-forwards.

    Each token passes through `experts_per_token` of them. `stacked` keeps all layers of a kind in one array,
    as a scan over layers does.
    """

    layers: Count
    d_model: Count
    d_ff: Count
    heads: Count
    vocab: Count
    kv_heads: Count | None = None
    head_dim: Count | None = None
    experts: Annotated[int, Meta(ge=0)] = 0
    experts_per_token: Count | None = None
    stacked: bool = False
    tied: bool = False


class ArrayTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[[model.arrays]]`: `count` arrays of one shape; `spec` names the mesh axes of each dim."""

    path: Annotated[str, Meta(min_length=1)]
    shape: tuple[Annotated[int, Meta(ge=0)], ...]
    dtype: str | None = None
    spec: tuple[Axes, ...] = ()
    count: Count = 1
    trained: bool = True


class ModelTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[model]`: the arrays, from a transformer's dims, one by one, or both; the optimizer adds its own.

    `rules` say which mesh axes partition a logical dim of the transformer.
    """

    dtype: str = "float32"
    optimizer: Optimizer = "adam"
    optimizer_dtype: str = "float32"
    transformer: TransformerTable | None = None
    rules: dict[DimName, Axes] = {}
    arrays: tuple[ArrayTable, ...] = ()


class TrainingTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[training]`: the global batch in rows, the axes it is split over, and the step's time if it is known.

    Else it is worked out from `tokens_per_row`, at the part `utilisation` of the peak. A device needs
    `state_factor` bytes for each byte of state on it, for gradients and activations.
    """

    global_batch: Count
    batch_axes: tuple[AxisName, ...]
    step_s: Positive | None = None
    tokens_per_row: Count | None = None
    utilisation: Annotated[float, Meta(gt=0, le=1)] = 1.0
    state_factor: Annotated[float, Meta(ge=1, le=1e30)] = 1.0


class SnapshotsTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[snapshots]`: slices that keep each shard, slots a host, and steps between two snapshots.

    `stall` is the part of a step that training is held up by them; `persisted`: they go to disk too.
    """

    replicas: Count = 2
    slots: Annotated[int, Meta(ge=2)] = 2
    every_steps: Count = 1
    persisted: bool = False
    stall: Annotated[float, Meta(ge=0, lt=1)] = 0.0


class RecoveryTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[recovery]`: what no cluster tells: measured phases, how often slices are lost, when they are back.

    `layouts` are the kinds that the program can follow (see `reshard.choice`).
    """

    min_slices: Count = 1
    layouts: frozenset[Kind] = ALLOWED
    detect_s: NotNegative | None = None
    fence_s: NotNegative | None = None
    rebuild_s: NotNegative | None = None
    mtbf_s: Positive | None = None
    repair_s: NotNegative | None = None


class PlanFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    title: str = ""
    cluster: ClusterTable
    mesh: MeshTable
    model: ModelTable
    training: TrainingTable
    snapshots: SnapshotsTable = SnapshotsTable()
    recovery: RecoveryTable = RecoveryTable()


_TABLES = (ClusterTable, MeshTable, ModelTable, TrainingTable, SnapshotsTable, RecoveryTable)
KNOWN: Mapping[str, tuple[str, ...]] = {
    **dict(zip(PlanFile.__struct_fields__[1:], (table.__struct_fields__ for table in _TABLES), strict=True)),
    "": PlanFile.__struct_fields__,
    "cluster.figures": get_args(FigureName),
    "model.optimizer": get_args(Optimizer),
    "model.transformer": TransformerTable.__struct_fields__,
    "model.rules": get_args(DimName),
    "model.arrays": ArrayTable.__struct_fields__,
    "recovery.layouts": get_args(Kind),
}
"""The names that a table may have as keys, or a key as its value."""


def read_plan_file(path: Path) -> PlanFile:
    """Return the checked contents of a file; raises `UsageError` naming the file, the line and the key."""
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror}",
            remedy="Name a file that exists; `elastic plan --template` prints one to begin with.",
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not text in UTF-8: {error}") from error
    return parse_plan(text, name=str(path))


def parse_plan(text: str, *, name: str = "the plan") -> PlanFile:
    """Return the checked contents of a text; `name` is what an error calls it."""
    try:
        return msgspec.convert(tomllib.loads(text), PlanFile)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{name} is not TOML: {error}") from error
    except msgspec.ValidationError as error:
        message, _, at = str(error).partition(" - at ")
        key = _key(message, at.strip("`"))
        line = line_of(text, key)
        where = name if line is None else f"{name}, line {line}"
        remedy = _names(message, key) or "Correct it; `elastic plan --template` shows every key."
        problem = f"{where}: {key or 'the file'}: {message}"
        raise UsageError(problem, remedy=remedy, key=key, line=line) from error


def _names(message: str, key: str) -> str:
    """Return what names there are, for an error about a name that there is not; else nothing."""
    if "unknown field" not in message and "Invalid enum" not in message:
        return ""
    plain = re.sub(r"\[[^\]]*\]", "", key)
    known = KNOWN.get(plain) if "Invalid enum" in message else None
    known = known or KNOWN.get(plain.rpartition(".")[0], ())
    return f"Known here are {', '.join(known)}; see `elastic plan --template`."


def _key(message: str, at: str) -> str:
    """Return the dotted key an error of msgspec is about: `cluster.slices`, `model.arrays[0].shape[1]`."""
    key = at.removeprefix("key` in `").removeprefix("$").removeprefix(".")
    named = re.search(r"(?:unknown|required) field `([^`]+)`", message)
    if at.startswith("key"):  # a key of a table with a fixed set of names
        named = re.search(r"value '([^']+)'", message)
    return f"{key}.{named[1]}".removeprefix(".") if named else key


def line_of(text: str, key: str) -> int | None:
    """Return the number, from 1, of the line that sets a key, or else the one that opens its table."""
    lines = _lines_by_key(text)
    while key:
        if key in lines:
            return lines[key]
        shorter = re.sub(r"\[[^\]]*\]$", "", key)
        key = shorter if shorter != key else key.rpartition(".")[0]
    return None


def _lines_by_key(text: str) -> Mapping[str, int]:
    """Return the line of each header and key, as `line_of` names them; not of keys inside inline tables."""
    found: dict[str, int] = {}
    table = ""
    num_seen: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*(\[\[?)\s*([\w.\-]+)\s*\]", line):
            table = header[2]
            if header[1] == "[[":
                num_seen[table] = num_seen.get(table, -1) + 1
                table = f"{table}[{num_seen[table]}]"
            found.setdefault(table, number)
        elif setting := re.match(r"\s*([\w.\-]+)\s*=", line):
            found.setdefault(f"{table}.{setting[1]}".removeprefix("."), number)
    return found
