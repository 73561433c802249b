"""One iteration and its parts: step, optimizer, schedule, loss scale, update guard, compilation. It may
import strategies/ and everything below it.
"""
