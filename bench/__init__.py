"""Benchmarks of flash_cute: ``python -m bench fwd|host|compile|variants``.

Every number comes with its peers, measured in the same run in a random order per round, and is
read as a ratio. A peer that is missing is named with the reason; nothing is estimated.
"""
