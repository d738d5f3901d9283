"""One recorded forward pass: who feeds whom, who is called how often, with which values.

The single source of wiring facts; where it cannot know, it says `unknown`. Not for measuring values or time.
"""

from normalcy.flow.norms import base_kind as base_kind
from normalcy.flow.norms import is_norm as is_norm
from normalcy.flow.record import record as record
from normalcy.flow.records import Flow as Flow
from normalcy.flow.records import Step as Step
from normalcy.flow.records import Value as Value

__all__ = ["Flow", "Step", "Value", "base_kind", "is_norm", "record"]
