"""Diagnostics that watch a run and leave no trace in it: drift, gradient ratios, spectra.

Each attaches from the outside, to an optimizer or around a loss, and a run computes the same bits
with and without them: modes, buffers, gradients and random generators are as they were.

What they cost: `RepresentationDrift` one evaluation forward over its examples for every SGD step;
`GradientRatios` about two more backward passes and three preconditionings for every step it looks
at; `shrinkage_spectrum` ``d / out`` preconditionings and an eigenvalue problem of size ``d`` for
every layer.
"""

from proxreplay.evaluation.diagnostics.drift import RepresentationDrift as RepresentationDrift
from proxreplay.evaluation.diagnostics.gradients import GradientRatios as GradientRatios
from proxreplay.evaluation.diagnostics.gradients import Ratios as Ratios
from proxreplay.evaluation.diagnostics.spectrum import Spectrum as Spectrum
from proxreplay.evaluation.diagnostics.spectrum import shrinkage_matrix as shrinkage_matrix
from proxreplay.evaluation.diagnostics.spectrum import shrinkage_spectrum as shrinkage_spectrum
from proxreplay.evaluation.diagnostics.spectrum import spectrum_record as spectrum_record
