"""What a checkpoint is: headers, quantisation formats, families, identification, key maps and settings.

Nothing under this package imports torch, diffusers, transformers or numpy; ``slipcast inspect`` answers from here.
The way of the data is ``header`` -> ``quantisation`` -> ``identify``; the engine goes on with the plan.
"""
