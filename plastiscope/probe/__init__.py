"""The probe: the fixed batch of inputs that every checkpoint of a run is replayed on."""

from plastiscope.probe.find import find, hint
from plastiscope.probe.sets import Probe

__all__ = ["Probe", "find", "hint"]
