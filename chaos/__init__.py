"""Chaos tooling: faults as data, and what injects them. Nothing shipped to a training job imports it."""

from chaos.faults import KINDS, Fault, parse_fault, parse_faults

__all__ = ["KINDS", "Fault", "parse_fault", "parse_faults"]
