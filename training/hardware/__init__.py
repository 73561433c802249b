"""What the machine can do: capabilities, peaks, attention kernels, its description. It may import process/
and everything below it.
"""
