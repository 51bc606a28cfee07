"""Operators, the tensors between them, and which of them may be one kernel."""

from tvmhet.graph.fusion import LegalKernel, LegalKernels, fuse_ops_groups, legal_kernels
from tvmhet.graph.opgraph import Operator, OpGraph, PatternKind, Tensor

__all__ = [
    "LegalKernel",
    "LegalKernels",
    "OpGraph",
    "Operator",
    "PatternKind",
    "Tensor",
    "fuse_ops_groups",
    "legal_kernels",
]
