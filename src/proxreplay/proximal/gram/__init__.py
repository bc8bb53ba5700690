"""``Z'Z`` of a layer's rows, fast and exact, without building ``Z`` where that can be avoided.

It takes rows (`rows.Rows`; `patches.PatchRows` for convolutions) and hands on Gram matrices
(`sums.GramSum`). Tensors only; it knows no modules.
"""
