"""The parts of a training run. Each package has one job. Imports point down this list only, and a test
checks that:

    evaluation, evaluate_and_save    called directly by the loop
    faults/           detects what can end or damage a run
    records/          reports what a run does
    memory/           what fits
    cuda_graphs/      captures and replays the step
    checkpoints/      saves, verifies, resumes
    optimization/     step, optimizer, schedule
    strategies/       one process, DDP, ZeRO-1, FSDP
    batches/          from token files to batches
    hardware/         what the machine can do
    process/          ranks, console, exit statuses
    configuration/    the keys

The model, ops/ and data/ stand below this package and never import it.
"""
