import copy
import pickle

import pytest

from reshard import errors
from reshard.errors import ElasticError, InsufficientMemoryError, MissingShardError, UsageError

ALL_CLASSES = [
    found for found in vars(errors).values() if isinstance(found, type) and issubclass(found, ElasticError)
]


def test_error_kinds_are_stable_and_distinct():
    assert {cls.__name__: (cls.kind, cls.exit_status) for cls in ALL_CLASSES} == {
        "ElasticError": ("elastic", 1),
        "UsageError": ("usage", 2),
        "RetryLaterError": ("retry-later", 1),
        "CorruptCopyError": ("corrupt-copy", 1),
        "MissingShardError": ("missing-shard", 1),
        "JobFailedError": ("job-failed", 1),
        "InvariantBrokenError": ("invariant-broken", 3),
        "InsufficientMemoryError": ("insufficient-memory", 2),
        "PersistentTierError": ("persistent-tier", 1),
    }


def test_error_text_says_what_happened_and_then_what_to_do():
    assert str(UsageError("no axis 'x'.")) == f"no axis 'x'. {UsageError.remedy}"
    assert str(errors.RetryLaterError("busy", remedy="Wait for s1h0.")) == "busy. Wait for s1h0."


def test_error_fields_are_readable_by_name_and_others_are_not():
    error = UsageError("no axis", axis="x")
    assert error.axis == "x"
    assert error.fields == {"axis": "x"}
    with pytest.raises(AttributeError, match="no field 'dim'"):
        _ = error.dim


def test_missing_shard_error_names_array_box_step_and_what_was_lost():
    error = MissingShardError("params/w", ((4, 8), (0, 2)), 40, lost=["s1h0", "s1h1"])
    assert error.message == "no surviving copy of 'params/w', box [4:8, 0:2] at step 40 (lost: s1h0, s1h1)"
    assert (error.path, error.box, error.step, error.lost) == (
        "params/w",
        ((4, 8), (0, 2)),
        40,
        ("s1h0", "s1h1"),
    )


def test_insufficient_memory_error_gives_both_sizes_and_the_place():
    error = InsufficientMemoryError(2_000_000, 64_000, "/dev/shm")
    assert error.message == "/dev/shm has 64,000 bytes available, 2,000,000 are needed"
    assert (error.needed_bytes, error.available_bytes, error.where) == (2_000_000, 64_000, "/dev/shm")


@pytest.mark.parametrize("clone", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
@pytest.mark.parametrize(
    "error",
    [
        UsageError("no axis", axis="x", remedy="Name another."),
        MissingShardError("w", ((0, 1),), 3, lost=["s1h0"]),
        InsufficientMemoryError(2, 1, "/dev/shm"),
    ],
)
def test_error_survives_pickling_and_copying(clone, error):
    twin = clone(error)
    assert type(twin) is type(error)
    assert str(twin) == str(error)
    assert twin.to_dict() == error.to_dict()


def test_error_as_dict_has_what_json_output_needs():
    assert UsageError("no axis", axis="x").to_dict() == {
        "kind": "usage",
        "message": "no axis",
        "remedy": UsageError.remedy,
        "exit_status": 2,
        "fields": {"axis": "x"},
    }
