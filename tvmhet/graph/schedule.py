"""A schedule that tuning found for one generated kernel: plain data, carried by the plan as the kernel's `spec`.

    {"function": "<hash of the kernel's function before any schedule>", "trace": [...MetaSchedule's trace as JSON...]}

The trace replays on a function of that hash and on no other.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from tvmhet.errors import BadBundle


@dataclass(frozen=True, slots=True)
class TunedSchedule:
    """`function` is the hash of the unscheduled function as hex, `trace` JSON text in MetaSchedule's own form."""

    function: str
    trace: str

    @property
    def digest(self) -> str:
        """A short name of this schedule; equal for equal ones."""
        return hashlib.sha256(self.to_text().encode()).hexdigest()[:16]

    def to_text(self) -> str:
        """Return the JSON text that a plan carries."""
        return json.dumps({"function": self.function, "trace": json.loads(self.trace)}, separators=(",", ":"))

    @staticmethod
    def from_text(text: str) -> TunedSchedule:
        """Read what `to_text` wrote. Raises BadBundle."""
        try:
            tree = json.loads(text)
            function, trace = tree["function"], tree["trace"]
        except (ValueError, KeyError, TypeError) as error:
            raise BadBundle(f"a tuned schedule cannot be read: {error!r}", "plan again, or tune again") from error
        if not isinstance(function, str) or not isinstance(trace, list):
            raise BadBundle("a tuned schedule has no function hash or no trace", "plan again, or tune again")
        return TunedSchedule(function, json.dumps(trace, separators=(",", ":")))
