"""What a gradient rule is, and each of them.

`base.GradientRule` is the interface; `layerwise` and `grams` are what most rules share; `lpr`,
`agem`, `owm` (with AOP) and `gpm` (with SGP) are the rules. It hands on changed gradients.
"""
