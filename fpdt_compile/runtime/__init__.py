"""What runs at every step: instructions, schedule, executor, stores, autograd nodes."""
