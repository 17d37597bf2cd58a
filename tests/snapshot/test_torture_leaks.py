"""After hundreds of captures of a training loop: no more memory, descriptors or files than before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from snapshot_helpers import start_python

PROGRAM = """
import gc, json, os, sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from reshard.ids import HostId
from reshard.redundancy import captures
from snapshot.arena import Arena
from snapshot.capture import Capturer
from snapshot.tree import layout_of
import snapshot

root, num_captures = Path(sys.argv[1]), int(sys.argv[2])
host = HostId(0)
mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
place = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))
state = {
    "sharded": jax.device_put(jnp.zeros((64, 64)), place("data", "model")),
    "replicated": jax.device_put(jnp.zeros((256,), jnp.bfloat16), place()),
    "key": jax.device_put(jax.random.key(0), place()),
    "step": 0,
}
shardings = {name: getattr(leaf, "sharding", None) for name, leaf in state.items() if name != "step"}
update = jax.jit(
    lambda arrays: {n: a if n == "key" else a + 1 for n, a in arrays.items()},
    donate_argnums=0, out_shardings=shardings,
)
layout = layout_of(state, mesh, {device.id: host for device in mesh.devices.flat})
arena = Arena.create("job", host, root=root)
capturer = Capturer(arena, layout, host, captures(layout, 1)[host])
arena.reserve(capturer.slot_bytes, journal_record_bytes=256, journal_records=16)

def train(first, count):
    global state
    for step in range(first, first + count):
        arrays = update({name: leaf for name, leaf in state.items() if name != "step"})
        state = arrays | {"step": step}
        capturer.capture(state, step=step, generation=1, position=step)
        if step % 10 == 0:
            with snapshot.open("job", root=root) as view:
                assert (view["['sharded']"] == view.step).all()
            arena.verified_holdings()

def measure():
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    used = sum(path.lstat().st_blocks * 512 for path in root.rglob("*"))
    maps = sum(str(root) in line for line in Path("/proc/self/maps").read_text().splitlines())
    return {"rss": pages * 4096, "fds": len(os.listdir("/proc/self/fd")), "shm": used, "maps": maps,
            "arrays": len(jax.live_arrays())}

train(1, 300)  # compiles, fills caches, lets the allocator settle
before = measure()
train(301, num_captures)
after = measure()
found = {"before": before, "after": after, "step": arena.manifests().complete[0].step}
arena.unlink()
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    "num_captures",
    [
        250,
        pytest.param(1000, marks=[pytest.mark.real, pytest.mark.slow]),
        pytest.param(20_000, marks=[pytest.mark.soak, pytest.mark.timeout(600)]),
    ],
)
def test_captures_leave_no_memory_descriptors_or_files_behind(root: Path, num_captures: int) -> None:
    child = start_python(PROGRAM, root, num_captures)
    out, _ = child.communicate(timeout=500)
    assert child.returncode == 0
    found = json.loads(out)
    print(found)
    before, after = found["before"], found["after"]
    assert found["step"] == 300 + num_captures
    for name in ("fds", "shm", "maps", "arrays"):
        assert after[name] == before[name], name
    # A leak of one copy of the state a capture would be 17 MB after a thousand; of one shard, 4 MB.
    assert after["rss"] - before["rss"] < 2 << 20
    assert list(root.iterdir()) == []
