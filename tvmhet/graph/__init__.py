"""Operators, the tensors between them, and which of them may be one kernel."""

from tvmhet.graph.convex import convex_closure, is_acyclic_quotient, is_convex, quotient_order
from tvmhet.graph.fusion import LegalKernel, LegalKernels, fuse_ops_groups, legal_kernels
from tvmhet.graph.liveness import MemoryUse, memory_use
from tvmhet.graph.opgraph import Operator, OpGraph, PatternKind, Tensor

__all__ = [
    "LegalKernel",
    "LegalKernels",
    "MemoryUse",
    "OpGraph",
    "Operator",
    "PatternKind",
    "Tensor",
    "convex_closure",
    "fuse_ops_groups",
    "is_acyclic_quotient",
    "is_convex",
    "legal_kernels",
    "memory_use",
    "quotient_order",
]
