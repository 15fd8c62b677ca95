"""What a metric may ask for: a closed set of observations, each reduced while the network runs."""

from .attention import Attention, AttentionSums
from .captures import Called, capture
from .coverage import Coverage
from .device import spectra_places
from .features import Features, FeatureSums
from .folds import Folds
from .jacobian import Jacobian, observe_jacobians
from .kernel import Kernel, observe_ntk, plan_ntk
from .optimizer import OptimizerState
from .outputs import Outputs, OutputSums, TaskAccuracies
from .plans import Plan
from .sensitivity import (
    ChangeBound,
    RateOfChange,
    attention_bound,
    joined_rates,
    linear_bound,
    norm_bound,
    observe_rate_of_change,
    observe_rate_of_change_embedding,
    token_radius,
)
from .spectra import Spectrum, spectra_of
from .symmetric import in_threads
from .units import UnitGradients, UnitGradientSums, Units, UnitSums, rows_of
from .weights import Magnitude, Weight

__all__ = [
    "Attention",
    "AttentionSums",
    "Called",
    "ChangeBound",
    "Coverage",
    "FeatureSums",
    "Features",
    "Folds",
    "Jacobian",
    "Kernel",
    "Magnitude",
    "OptimizerState",
    "OutputSums",
    "Outputs",
    "Plan",
    "RateOfChange",
    "Spectrum",
    "TaskAccuracies",
    "UnitGradientSums",
    "UnitGradients",
    "UnitSums",
    "Units",
    "Weight",
    "attention_bound",
    "capture",
    "in_threads",
    "joined_rates",
    "linear_bound",
    "norm_bound",
    "observe_jacobians",
    "observe_ntk",
    "observe_rate_of_change",
    "observe_rate_of_change_embedding",
    "plan_ntk",
    "rows_of",
    "spectra_of",
    "spectra_places",
    "token_radius",
]
