"""What a metric may ask for: a closed set of observations, each reduced while the network runs."""

from .attention import Attention, AttentionSums
from .features import Features, FeatureSums
from .gradients import Plan
from .kernel import Kernel, observe_ntk, plan_ntk
from .outputs import Outputs, OutputSums
from .spectra import Spectrum, spectra_of
from .units import Units, UnitSums, rows_of
from .weights import Magnitude, Weight, in_threads

__all__ = [
    "Attention",
    "AttentionSums",
    "FeatureSums",
    "Features",
    "Kernel",
    "Magnitude",
    "OutputSums",
    "Outputs",
    "Plan",
    "Spectrum",
    "UnitSums",
    "Units",
    "Weight",
    "in_threads",
    "observe_ntk",
    "plan_ntk",
    "rows_of",
    "spectra_of",
]
