"""What is known of the rows of every site: Gram matrices over batches and over refreshes.

It takes rows wherever they come from and hands on a `Statistic` (or a `Sketch` of one) per site.
No strength enters here.
"""
