"""Chaos tooling: faults as data, and what injects them. Nothing shipped to a training job imports it."""

from chaos.catalogue import KINDS, ROLES, FaultKind
from chaos.faults import AtPhase, AtStep, Fault, parse_fault, parse_faults

__all__ = ["KINDS", "ROLES", "AtPhase", "AtStep", "Fault", "FaultKind", "parse_fault", "parse_faults"]
