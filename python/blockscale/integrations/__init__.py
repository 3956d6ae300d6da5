"""Engines that run FP8 checkpoints through the kernels of this package: :mod:`.vllm` and :mod:`.transformers`.

Neither engine is a dependency: each module imports its engine when it is first asked to do something.
"""
