"""How weights, gradients and optimizer state are spread over the processes: one process, DDP, ZeRO-1 and FSDP
behind one protocol. It may import batches/ and everything below it.
"""
