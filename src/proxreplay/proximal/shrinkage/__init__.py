"""From a statistic and a strength to the matrix that gradients are multiplied with.

It takes Gram matrices and a strength and hands on a `Shrinkage` in the form that is cheapest.
Functions of tensors; it knows no modules and no rules.
"""
