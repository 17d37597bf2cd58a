"""Adapters, how worlds are formed: `local` (one process, virtual slices), `multicontroller` (processes)."""
