"""Opening a session from the environment that the launcher's agent gave this process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

from elastic.adapters import find_adapter
from elastic.job import ENV_DIRECTORY, ENV_HOST, ENV_SLICE, load_job
from elastic.leash import watch_leash
from elastic.members import member_of
from elastic.ports import OneProcessAdapter
from elastic.sessions import Session
from reshard.errors import UsageError
from reshard.ids import HostId


def open_session(*, seed: int | None) -> Session:
    """See `elastic.session`."""
    directory = os.environ.get(ENV_DIRECTORY)
    if directory is None:
        return _open_local(seed)
    spec = load_job(Path(directory))
    host = HostId(_index(ENV_SLICE), _index(ENV_HOST))
    member = member_of(host, spec.config.hosts_per_slice)
    watch_leash(lambda: os._exit(1))
    link, runtime = find_adapter(spec.adapter).connect(spec, member)
    return Session(spec, link, runtime)


def _index(name: str) -> int:
    value = os.environ.get(name, "0")
    if not value.isdecimal():
        raise UsageError(f"{name}={value!r} is no index")
    return int(value)


def _open_local(seed: int | None) -> Session:
    adapter = cast(OneProcessAdapter, find_adapter("local"))
    spec = adapter.default_job(seed=0 if seed is None else seed)
    link, runtime = adapter.connect(spec, 0)
    return Session(spec, link, runtime)
