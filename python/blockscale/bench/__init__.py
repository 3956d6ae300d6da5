"""The benchmark suite behind ``python -m blockscale bench``.

Candidates take turns in one process on weights that come from memory, each is checked against float64 before it is
timed, and the limits of the machine are timed in the same rounds. ``shapes`` and ``inputs`` say what is multiplied,
``peers`` by whom, ``measure`` and ``roofline`` how time and limits are taken, ``tables`` what is shown.
"""
