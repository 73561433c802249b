"""The training program. A package is one job; imports point down this list only, and a test keeps it so:

    evaluation, evaluate_and_save    what the loop calls by name
    faults/           what ends or endangers a run
    records/          what a run says
    cuda_graphs/      the captured step
    checkpoints/      saving, verifying, resuming
    optimization/     the step and what it is made of
    strategies/       one process, DDP, ZeRO-1, FSDP
    batches/          from token files to batches
    hardware/         what the machine can do
    process/          ranks, console, exit statuses
    configuration/    the keys

Below it stand the model, ops/ and data/, which know nothing of it.
"""
