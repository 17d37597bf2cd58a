"""The arbiter store as fsynced files in a directory that every coordinator of the job can reach.

    <directory>/epoch-N        the tenure of epoch N, as JSON; the highest N is what is stored
    <directory>/held-HOLDER    held (flock) by that coordinator for as long as it lives

An epoch is taken by linking its file: that succeeds once. No lock is held while files are written, because a
holder that is stopped (SIGSTOP) in the middle would lock out everybody; a stale holder that goes on there
only writes its own old epoch. That a free `held-…` means a dead holder is believed on the holder's own
machine and boot only: file systems differ in whether other machines see such locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from dataclasses import replace
from pathlib import Path

import msgspec

from elastic.arbiter import Tenure
from reshard.errors import ElasticError

FILE_MODE = 0o600
_EPOCH = re.compile(r"epoch-(\d+)", re.ASCII)


class ArbiterDamagedError(ElasticError):
    """The arbiter's record cannot be read: nobody can tell whose turn it is."""

    kind = "arbiter-damaged"
    remedy = "Make sure that no coordinator of this job runs, then start the job anew."


def this_machine() -> str:
    """A name of this machine and its boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class FileArbiter:
    """See `elastic.arbiter.ArbiterStore`. One object is one claimant; what it holds ends with its process."""

    def __init__(self, directory: Path, machine: str | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._machine = machine or this_machine()
        self._holder = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._life: int | None = os.open(self._life_path(self._holder), os.O_RDWR | os.O_CREAT, FILE_MODE)
        fcntl.flock(self._life, fcntl.LOCK_EX)  # nobody else knows this name yet

    def read(self) -> Tenure | None:
        """What is stored now. Raises OSError, ArbiterDamagedError."""
        while (epoch := self._newest_epoch()) is not None:
            with contextlib.suppress(FileNotFoundError):  # removed for a newer one
                return self._read(epoch)
        return None

    def claim(self, seen: Tenure | None, lease_s: float) -> Tenure | None:
        """Begin the epoch after `seen`, if that is still what is stored."""
        if self.read() != seen:
            return None
        epoch = 1 if seen is None else seen.epoch + 1
        claimed = Tenure(epoch=epoch, holder=self._holder, machine=self._machine, lease_s=lease_s)
        unfinished = self._write_unfinished(claimed)
        try:
            os.link(unfinished, self._epoch_path(epoch))
        except FileExistsError:
            return None
        finally:
            unfinished.unlink()
        sync_directory(self._directory)
        try:
            is_as_seen = seen is None or self._read(seen.epoch) == seen
        except FileNotFoundError:
            return None  # a still later claimant has removed it
        if not is_as_seen:
            # It was renewed while we claimed, and its holder may not look again before its lease is over.
            self._epoch_path(epoch).unlink(missing_ok=True)
            return None
        self._remove_older(claimed, seen)
        return claimed

    def renew(self, held: Tenure) -> Tenure | None:
        """Count the beat up, if no later epoch has begun."""
        renewed = replace(held, beat=held.beat + 1)
        self._write_unfinished(renewed).replace(self._epoch_path(held.epoch))
        sync_directory(self._directory)
        now = self.read()  # after the renewal is stored: a claimant looks at it after its own claim
        return renewed if now == renewed else None

    def is_holder_dead(self, seen: Tenure) -> bool:
        """Whether nobody holds that claimant's lock, on this machine."""
        if seen.machine != self._machine or seen.holder == self._holder:
            return False
        try:
            descriptor = os.open(self._life_path(seen.holder), os.O_RDWR)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True

    def close(self) -> None:
        """Let go of what is held, as the end of the process would."""
        if self._life is not None:
            os.close(self._life)
            self._life = None

    def _newest_epoch(self) -> int | None:
        found = (_EPOCH.fullmatch(name) for name in os.listdir(self._directory))
        return max((int(match[1]) for match in found if match), default=None)

    def _read(self, epoch: int) -> Tenure:
        path = self._epoch_path(epoch)
        try:
            return msgspec.json.decode(path.read_bytes(), type=Tenure)
        except msgspec.MsgspecError as error:
            raise ArbiterDamagedError(f"{path} cannot be read: {error}") from error

    def _epoch_path(self, epoch: int) -> Path:
        return self._directory / f"epoch-{epoch}"

    def _life_path(self, holder: str) -> Path:
        return self._directory / f"held-{holder}"

    def _write_unfinished(self, tenure: Tenure) -> Path:
        unfinished = self._directory / f"part-{self._holder}"
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(tenure))
            file.flush()
            os.fsync(file.fileno())
        return unfinished

    def _remove_older(self, claimed: Tenure, seen: Tenure | None) -> None:
        """Only names go: a stale holder keeps its lock, and may write its old epoch again."""
        for name in os.listdir(self._directory):
            match = _EPOCH.fullmatch(name)
            if match and int(match[1]) < claimed.epoch:
                (self._directory / name).unlink(missing_ok=True)
        if seen is not None and seen.holder != self._holder:
            self._life_path(seen.holder).unlink(missing_ok=True)


def sync_directory(directory: Path) -> None:
    """Have the names in a directory on disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
