"""Tells where the time of an iteration goes: runs train.py for a few iterations under torch.profiler, sorts
the kernels into parts, and names what lies between the peak and the measured MFU. It may import
tools/trials.py, which starts bench.throughput, and everything below it.
"""
