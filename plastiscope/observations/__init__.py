"""What a metric may ask for: a closed set of observations, each reduced while the network runs."""

from .attention import Attention, AttentionSums
from .features import Features, FeatureSums
from .outputs import Outputs, OutputSums
from .spectra import Spectrum, spectra_of
from .units import Units, UnitSums, rows_of
from .weights import Magnitude, Weight, in_threads

__all__ = [
    "Attention",
    "AttentionSums",
    "FeatureSums",
    "Features",
    "Magnitude",
    "OutputSums",
    "Outputs",
    "Spectrum",
    "UnitSums",
    "Units",
    "Weight",
    "in_threads",
    "rows_of",
    "spectra_of",
]
