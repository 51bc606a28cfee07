"""Every error a user can meet: a stable code, the thing, its value, the limit, the remedy.

A message reads `[TVMHET-E004] <what is wrong>. <what to change>`. Codes never change meaning; new ones are appended.
"""

from __future__ import annotations


class HetError(ValueError):
    """Base of all errors that a caller can mend. `code` is stable; `remedy` says what to change."""

    code = "TVMHET-E000"

    def __init__(self, problem: str, remedy: str = "") -> None:
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"[{self.code}] {problem}" + (f"\n  remedy: {remedy}" if remedy else ""))

    def __reduce__(self) -> tuple[type[HetError], tuple[str, str], dict[str, object]]:
        """Pickle by problem and remedy: errors travel between processes."""
        return type(self), (self.problem, self.remedy), dict(self.__dict__)


class UnknownDeviceType(HetError):
    """A device type that neither the catalogue nor the cluster file defines."""

    code = "TVMHET-E001"


class BadQuantity(HetError):
    """A number without its unit, an unknown unit, or a value out of range."""

    code = "TVMHET-E002"


class BadClusterFile(HetError):
    """A cluster file that cannot be read: unknown key, wrong type, missing field. Names the line."""

    code = "TVMHET-E003"


class Infeasible(HetError):
    """No plan meets the constraints. Names the binding constraint and the smallest mend."""

    code = "TVMHET-E004"


class UnsupportedOperator(HetError):
    """An operator that an importer or a compiler cannot take. Names it and where it stands.

    `operators` are the names of all that an importer cannot take.
    """

    code = "TVMHET-E005"
    operators: tuple[str, ...] = ()


class PlanMismatch(HetError):
    """A plan, bundle or cache entry made for another module, cluster or TVM."""

    code = "TVMHET-E006"


class EmptyCluster(HetError):
    """A cluster with no device."""

    code = "TVMHET-E007"


class BadModel(HetError):
    """A model file or module that cannot be read or is not well formed.

    `operators` are the names of those that a front end converts wrongly.
    """

    code = "TVMHET-E008"
    operators: tuple[str, ...] = ()


class BadTime(HetError):
    """A time that is NaN, negative, zero or missing."""

    code = "TVMHET-E009"


class BadGraph(HetError):
    """A graph that is not a DAG, or whose tensors or kernels contradict each other."""

    code = "TVMHET-E010"


class BadBundle(HetError):
    """A bundle, plan or database file that is corrupt, tampered with or of another schema."""

    code = "TVMHET-E011"


class MeasurementFailed(HetError):
    """A kernel that crashed, hung or could not be built while it was measured."""

    code = "TVMHET-E012"


class WorkerFailed(HetError):
    """A device's worker process died or raised while it ran a stage. Names the stage and the device."""

    code = "TVMHET-E013"

    def __init__(
        self,
        problem: str,
        remedy: str = "",
        *,
        device: str | None = None,
        stage: str | None = None,
        input_index: int | None = None,
        text: str = "",
    ) -> None:
        super().__init__(problem, remedy)
        self.device = device
        self.stage = stage
        self.input_index = input_index
        self.text = text  # what the worker itself said


class BadInput(HetError):
    """An input tensor or argument of the wrong number, shape, dtype or value."""

    code = "TVMHET-E014"


class NotSupported(HetError):
    """A thing that tvmhet does not do (yet), said plainly."""

    code = "TVMHET-E015"


class MissingPackage(HetError):
    """An optional package that this call needs. Names what to install."""

    code = "TVMHET-E016"


class BrokenSolution(HetError):
    """A solution that breaks rules of its problem: a defect of a solver, or a file that was changed. Lists them."""

    code = "TVMHET-E017"


class BadMarket(HetError):
    """A price list that cannot be used: a price, count or currency that makes no sense, or nothing on offer."""

    code = "TVMHET-E018"


class BadLoss(HetError):
    """A loss that is not one real number."""

    code = "TVMHET-E019"


class NoGradient(HetError):
    """An operator between the parameters and the loss that has no gradient. Names it and its module."""

    code = "TVMHET-E020"


class BadBatch(HetError):
    """A global batch that the micro-batches do not divide, or whose tensors disagree about its size."""

    code = "TVMHET-E021"


class OutOfMemory(WorkerFailed):
    """A training step that needs more than the memory of a device. Names the device."""

    code = "TVMHET-E022"


class NotFinite(HetError):
    """A loss, or a norm of gradients, that is NaN or infinite: the step is not taken."""

    code = "TVMHET-E023"


class PartLost(WorkerFailed):
    """A worker or a machine of a Ray cluster that is gone, and with it the part of a model that it ran."""

    code = "TVMHET-E024"
