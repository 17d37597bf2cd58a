"""The files by which Orbax knows a checkpoint, written without Orbax.

As Orbax 0.12 writes them for zarr3 arrays without OCDBT; see docs/persistent-format.md. Values are
declared numpy arrays, as a jax.Array needs a sharding to be restored without a target; with one, it decides.
"""

from __future__ import annotations

from typing import Any

import msgspec

from snapshot.persist_format import ITEM_NAME, StoredArray
from snapshot.persist_tree import TreeDescription, TreeNode

_HANDLER = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"
_INDEX_KEY, _DICT_KEY = 1, 2


def orbax_files(
    tree: TreeDescription, stored: dict[str, StoredArray], *, started_ns: int, ended_ns: int
) -> dict[str, bytes]:
    """Return the content of each of Orbax's own files, by its name within the checkpoint.

    `stored` maps an array's path to how it lies on disk; times are nanoseconds since 1970.
    """
    documents: dict[str, dict[str, Any]] = {
        "_CHECKPOINT_METADATA": {
            "item_handlers": {ITEM_NAME: _HANDLER},
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": started_ns,
            "commit_timestamp_nsecs": ended_ns,
            "custom_metadata": {},
        },
        f"{ITEM_NAME}/_METADATA": {
            "tree_metadata": {_tuple_text(node): _tree_entry(node) for node in tree.nodes},
            "use_ocdbt": False,
            "use_zarr3": True,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        },
        f"{ITEM_NAME}/array_metadatas/process_0": {
            "array_metadatas": [
                {"array_metadata": _array_entry(node, stored[node.path])}
                for node in tree.leaves
                if node.key_impl is not None
            ]
        },
    }
    return {name: msgspec.json.encode(document) for name, document in documents.items()}


def _tuple_text(node: TreeNode) -> str:
    return str(tuple(key.name for key in node.keys))


def _tree_entry(node: TreeNode) -> dict[str, Any]:
    kind = "np.ndarray" if node.kind == "array" else node.kind
    value = {"value_type": kind, "skip_deserialize": node.is_empty}
    keys = [{"key": key.name, "key_type": _INDEX_KEY if key.is_index else _DICT_KEY} for key in node.keys]
    return {"key_metadata": keys, "value_metadata": value}


def _array_entry(node: TreeNode, stored: StoredArray) -> dict[str, Any]:
    return {
        "param_name": node.name,
        "write_shape": list(stored.chunk_shape),
        "chunk_shape": list(stored.chunk_shape),
        "ext_metadata": {"random_key_impl": node.key_impl},
    }
