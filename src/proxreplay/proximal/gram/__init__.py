"""``Z'Z`` of a layer's rows, fast and exact, without building ``Z`` where that can be avoided.

It takes rows (`rows.Rows`) and hands on Gram matrices. Tensors only; it knows no modules.
"""
