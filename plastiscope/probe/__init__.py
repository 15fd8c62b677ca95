"""The probe: the fixed batch of inputs that every checkpoint of a run is replayed on."""

from plastiscope.probe.find import find, hint
from plastiscope.probe.second import find_second
from plastiscope.probe.sets import Probe

VERSION = 1
"""Of the inputs. Raise it with every change after which the same files, or none, make another
batch: how texts are cut, pictures prepared, synthetic inputs drawn."""

__all__ = ["Probe", "find", "find_second", "hint"]
