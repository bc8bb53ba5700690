"""Where a model's parameters are, and what goes into them.

It takes a model and a batch and hands on, for every linear map (`sites.Site`), the rows that the
map multiplies with its parameters (`capture.visit`).
"""
