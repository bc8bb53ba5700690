"""Diagnostics that watch a run and leave no trace in it: drift, gradient ratios, spectra.

Each attaches from the outside, to an optimizer or around a loss, and a run computes the same bits
with and without them: modes, buffers, gradients and random generators are as they were.

What they cost: `RepresentationDrift` one evaluation forward over its examples for every SGD step;
`GradientRatios` about two more backward passes and three preconditionings for every step it looks
at; `shrinkage_spectrum` ``d / out`` preconditionings and an eigenvalue problem of size ``d`` for
every layer.
"""

from proxreplay.evaluation.diagnostics.drift import RepresentationDrift
from proxreplay.evaluation.diagnostics.gradients import GradientRatios, Ratios
from proxreplay.evaluation.diagnostics.spectrum import (
    Spectrum,
    shrinkage_matrix,
    shrinkage_spectrum,
    spectrum_record,
)

__all__ = [
    "GradientRatios",
    "Ratios",
    "RepresentationDrift",
    "Spectrum",
    "shrinkage_matrix",
    "shrinkage_spectrum",
    "spectrum_record",
]
